"""FP32 against a plan: real children on tiny tasks, and scripted arms where the clock must be known."""

import ast
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from equipoise import arm_plain, arms, tally
from equipoise.arms import Child, Race, Track
from equipoise.comparison import autocast_format, compare, margin_for, metric_from
from equipoise.errors import EquipoiseError, RunError, TaskError
from equipoise.evidence import paired_ratio
from equipoise.policy import Plan, Policy
from equipoise.records import Choice
from equipoise.step.feed import Feed

TASKS = """
import os, signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
from equipoise import Task

def accuracy(labels, scores):
    return float((scores.argmax(-1) == labels).mean())

def share_of_ones(labels, scores):
    return float(labels.mean())

class Net(nn.Module):
    def __init__(self, offset):
        super().__init__()
        self.first, self.head, self.offset = nn.Linear(12, 24), nn.Linear(24, 2), offset

    def forward(self, x):
        hidden = nn.functional.dropout(torch.relu(self.first(x)), 0.1, self.training)
        return self.head(hidden) + self.offset - self.offset

def make(seed, offset=0.0, loss=nn.functional.cross_entropy, **options):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(700, 12, generator=g)
    y = (x @ torch.randn(12, generator=g) > 0).long()
    torch.manual_seed(seed)
    model = Net(offset)
    parts = [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 350), (350, 500), (500, 700))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    return Task(name="tiny", model=model, optimizer=optimizer, train=parts[0], val=parts[1], test=parts[2],
                loss=lambda m, b: loss(m(b[0]), b[1]), metric=accuracy, metric_name="accuracy", margin=0.02,
                batch_size=32, steps=60, eval_every=20, max_grad_norm=1.0, about="two classes",
                lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 20),
                subgroup={"test": ["a", "b"] * 100}, extra_metrics={"ones": share_of_ones}, **options)

def good(seed, data):
    print("the task talks on stdout")
    return make(seed)

def fragile(seed, data):
    # In bf16 numbers near 4096 lie 32 apart: the logits are lost; in FP32 they are not.
    return make(seed, offset=4096.0)

def raises(seed, data):
    def loss(scores, labels):
        raise ValueError("no such loss")
    return make(seed, loss=loss)

def steep(seed, data):
    return make(seed, loss=lambda scores, labels: 1000 * nn.functional.cross_entropy(scores, labels))

def leaves(seed, data):
    return make(seed, loss=lambda scores, labels: os._exit(7))

def is_killed(seed, data):
    return make(seed, loss=lambda scores, labels: os.kill(os.getpid(), signal.SIGKILL))

def endless(seed, data):
    task = make(seed)
    task.steps = 10**9
    task.eval_every = 10**9
    return task
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the tasks above in ``tiny.py``; one thread, so that the arms' children don't stall."""
    (tmp_path / "tiny.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


# -- real children ----------------------------------------------------------------------------------


def test_fp32_against_itself_is_not_worse_to_the_last_bit(here: Path) -> None:
    events: list[Any] = []
    verdict = compare("tiny.py:good", precision="fp32", out=here / "out", on_event=events.append)
    assert (verdict.verdict, verdict.difference, verdict.low, verdict.high) == ("not-worse", 0, 0, 0)
    assert verdict.speedup > 0

    result = json.loads((here / "out" / "comparison.json").read_text())
    fp32, plan = result["arms"]["fp32"], result["arms"]["plan"]
    for seed in ("0", "1", "2"):
        # The same loss at every step: the same weights, batches, dropout and updates.
        assert [(r["step"], r["loss"]) for r in fp32["seeds"][seed]["curve"]] == [
            (r["step"], r["loss"]) for r in plan["seeds"][seed]["curve"]
        ]
        assert len(fp32["seeds"][seed]["curve"]) == 60
        assert [row["step"] for row in fp32["seeds"][seed]["evals"]] == [15, 30, 45, 60]
        tables = [
            (here / "out" / "predictions" / f"{seed}-{arm}.csv").read_text() for arm in ("fp32", "plan")
        ]
        assert tables[0] == tables[1]
        assert tables[0].startswith("case,label,score_0,score_1,subgroup\n0,")
        assert len(tables[0].splitlines()) == 201
    assert fp32["seeds"]["0"]["curve"] != fp32["seeds"]["1"]["curve"]
    assert (
        sum(row["samples"] for row in fp32["seeds"]["0"]["slices"]) == 5 * 350 + 5 * 32
    )  # 11 steps an epoch

    assert (result["task"], result["verdict"], result["formats"]) == ("tiny", "not-worse", {"fp32": 2})
    assert Plan.from_toml((here / "out" / "plan.toml").read_text()).counts() == {"fp32": 2}
    assert json.loads((here / "out" / "machine.json").read_text())["formats"]["fp32"]
    assert min(fp32["peak_mem_bytes"], plan["peak_mem_bytes"]) > 50e6
    assert fp32["time_to_metric_s"] > 0
    assert {event["event"] for event in events} >= {"probe", "setup", "ready", "round", "eval", "test"}


def test_a_plan_that_loses_the_model_is_worse(here: Path) -> None:
    verdict = compare("tiny.py:fragile", precision="bf16")
    assert verdict.verdict == "worse"
    assert verdict.difference < -0.04  # two margins
    assert verdict.result["formats"] == {"bf16": 2}


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("raises", "fp32 arm failed: ValueError: no such loss ("),
        ("leaves", "fp32 arm ended by itself with exit code 7"),
        ("is_killed", "fp32 arm was killed (signal 9)"),
    ],
)
def test_a_child_that_fails_says_how(here: Path, task: str, says: str) -> None:
    child = Child("fp32", "arm_plain", [f"tiny.py:{task}", "--device", "cpu"])
    try:
        child.answer()
        child.ask("setup", seed=0)
        with pytest.raises(TaskError if task == "raises" else RunError) as error:
            child.ask("advance", steps=1, curve_every=1)
    finally:
        child.close()
    assert says in str(error.value)
    assert "  | " not in str(error.value)  # a user's mistake needs no traceback of ours


@pytest.mark.parametrize("arm", ["arm_plain", "arm_plan"])
def test_a_child_reads_data_in_workers_while_it_listens(here: Path, arm: str) -> None:
    child = Child("fp32", arm, ["tiny.py:good", "--device", "cpu", "--workers", "2", "--precision", "fp32"])
    killer = threading.Timer(60, lambda: os.kill(child.pid, signal.SIGKILL))  # a hang must end the test
    killer.start()
    try:
        child.answer()
        child.ask("setup", seed=0)
        assert len(child.ask("advance", steps=3, curve_every=1)["losses"]) == 3
    finally:
        killer.cancel()
        child.close()


def test_a_task_that_is_not_there_is_the_users_mistake(here: Path) -> None:
    with pytest.raises(TaskError, match=r"tiny\.py"):
        compare("tiny.py:no_such_function")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_child_outlives_a_parent_that_is_killed(here: Path) -> None:
    script = (
        "from equipoise import compare\n"
        "compare('tiny.py:endless', precision='fp32', on_event=lambda e: print(e['event'], flush=True))"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        assert any(line.strip() == "round" for line in parent.stdout)
        children = [
            int(p.parent.name) for p in Path("/proc").glob("[0-9]*/stat") if _parent_of(p) == parent.pid
        ]
        assert len(children) == 2
    finally:
        parent.kill()
        parent.communicate()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in children if _alive(pid)] == []


def _parent_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- a whole loop -----------------------------------------------------------------------------------


def test_a_loop_that_two_margins_separate_is_worse_and_one_that_none_is_not() -> None:
    calls: list[tuple[int, str]] = []

    def train(seed: int, precision: str) -> float:
        """A loop of the user's."""
        calls.append((seed, precision))
        return 0.9 + seed / 100 - (0.04 if precision == "auto" else 0)

    verdict = compare(train, margin=0.02)
    assert (verdict.verdict, verdict.difference) == ("worse", pytest.approx(-0.04))
    assert calls == [(0, "fp32"), (0, "auto"), (1, "auto"), (1, "fp32"), (2, "fp32"), (2, "auto")]
    assert verdict.result["about"] == "A loop of the user's."
    assert compare(train, margin=0.05).verdict == "not-worse"
    assert compare(train, margin="1%").verdict == "worse"
    assert compare(train, margin=0.02, higher_is_better=False).verdict == "not-worse"
    assert compare(train).verdict is None
    assert compare(train, margin=0.02, repeats=2).verdict == "inconclusive"
    assert compare(train, margin=0.02, repeats=1).verdict == "inconclusive"


def test_a_loop_may_be_kept_in_a_directory(tmp_path: Path) -> None:
    verdict = compare(
        lambda seed, precision: float("nan") if precision == "auto" else 0.9, margin=0.1, out=tmp_path / "o"
    )
    assert verdict.verdict == "worse"
    kept = json.loads((tmp_path / "o" / "comparison.json").read_text())
    assert (kept["verdict"], kept["metric"]["plan"]) == ("worse", None)
    with pytest.raises(RunError, match="not empty"):
        compare(lambda seed, precision: 0.9, out=tmp_path / "o")


def test_what_a_loop_may_return() -> None:
    labels, scores = np.array([0, 1, 1, 0]), np.array([0.1, 0.9, 0.8, 0.7])
    assert metric_from(np.float32(0.5), None) == 0.5
    assert metric_from(torch.tensor(0.5), None) == 0.5
    assert metric_from({"auc": 0.7}, None) == 0.7
    assert metric_from({"auc": 0.7, "loss": 1.0}, "loss") == 1.0
    assert metric_from((labels, scores), "accuracy") == 0.75
    assert metric_from((labels, scores), "auc") == 1.0
    assert metric_from((labels, scores), lambda y, s: float(len(y))) == 4.0


@pytest.mark.parametrize(
    ("found", "metric", "says"),
    [
        ({"auc": 0.7, "loss": 1.0}, None, "name one of them"),
        ({"auc": 0.7, "loss": 1.0}, "acc", "auc, loss"),
        (([0, 1], [0, 1]), None, "give 'auc'"),
        (None, None, "gave a NoneType"),
    ],
)
def test_what_a_loop_may_not_return(found: Any, metric: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        metric_from(found, metric)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repeats": 0}, "repeats=0"),
        ({"steps": 0}, "steps=0"),
        ({"margin": -1.0}, "margin is -1"),
        ({"margin": "much"}, "margin is 'much'"),
        ({"alpha": 0.9}, "alpha is 0.9"),
        ({"with_autocast": True}, "with_autocast can't be given with a function"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(options: dict[str, Any], says: str) -> None:
    def train(seed: int, precision: str) -> float:
        raise AssertionError("was called")

    with pytest.raises(EquipoiseError, match=says):
        compare(train, **options)


def test_a_margin_may_be_a_share() -> None:
    assert margin_for("1%", -2.0) == pytest.approx(0.02)
    assert margin_for("0.5", 9.0) == 0.5
    assert margin_for(0.3, 9.0) == 0.3
    assert margin_for(None, 9.0) is None


# -- the same batches -------------------------------------------------------------------------------


class Drawn(Dataset[Any]):
    """Draws from all three generators, as an augmentation does."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(3)
        return {"x": noise + i, "y": torch.tensor(i)}


class Plain(Drawn):
    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((3,), float(i)), "y": torch.tensor(i)}


class Whole(Drawn):
    def get_batch(self, indices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(indices) * 2.0, torch.from_numpy(indices)


NUMBERS = TensorDataset(torch.arange(10.0), torch.arange(10))


def _tensors(batch: Any) -> list[torch.Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


@pytest.mark.parametrize("dataset", [Drawn(), Plain(), Whole(), NUMBERS, Subset(NUMBERS, [3, 1, 4, 5, 9])])
@pytest.mark.parametrize("workers", [0, 1])
def test_both_arms_read_the_same_batches(dataset: Any, workers: int) -> None:
    steps, seed = 7, 2**33 + 5  # more than one epoch; a seed of more than 32 bits
    ours = Feed(dataset, batch_size=4, seed=seed).batches(0)
    torch.manual_seed(1)
    loader = arm_plain.Loader(dataset, None, seed)
    theirs = loader.batches(arm_plain.order(len(dataset), 4, seed), workers)
    for _ in range(steps):
        for a, b in zip(_tensors(next(ours)), _tensors(next(theirs)), strict=True):
            assert torch.equal(a, b)
    del theirs
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(1)))


def test_the_plain_arm_imports_nothing_of_ours_but_the_task() -> None:
    tree = ast.parse(Path(arm_plain.__file__).read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported == []
    assert [name for name in names + modules if name.startswith("equipoise")] == []

    def ours(node: ast.AST) -> set[str]:
        texts = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        return {text for text in texts if text.startswith("equipoise.")}

    ifs = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    emulating = [node for node in ifs if "options.emulate" in ast.unparse(node.test)]
    assert set().union(*map(ours, emulating)) == {"equipoise.step.operators"}
    assert ours(tree) == {"equipoise.tasks", "equipoise.step.operators"}


def test_the_fp16_arm_scales_its_loss_and_a_skipped_step_does_not_move_the_schedule(here: Path) -> None:
    given = {"task": "tiny.py:steep", "data": None, "device": "cpu", "workers": 0}
    options = Namespace(**given, precision="fp16", emulate=False)
    arm = arm_plain.PlainArm(options)
    arm.setup(seed=0)
    answer = arm.advance(steps=20, curve_every=10)
    assert [step for step, _, _ in answer["losses"]] == [10, 20]
    assert arm._scaler is not None
    skipped = int(np.log2(2.0**16 / arm._scaler.get_scale()))  # each halves the scale
    assert 0 < skipped < 20
    assert arm._task.lr_scheduler.last_epoch == 20 - skipped
    assert all(torch.isfinite(p).all() for p in arm._task.model.parameters())


def test_predictions_of_whole_arrays_are_kept_as_arrays(tmp_path: Path) -> None:
    labels, scores = np.zeros((3, 5)), np.ones((3, 5), dtype=np.float32)
    arm_plain.write_predictions(tmp_path / "0-fp32.csv", labels, scores, None)
    assert [path.name for path in tmp_path.iterdir()] == ["0-fp32.npz"]
    assert np.load(tmp_path / "0-fp32.npz")["scores"].shape == (3, 5)


# -- the race, with scripted arms -------------------------------------------------------------------


class Scripted:
    """Stands where a Child stands; its clock is what the test says."""

    def __init__(self, name: str, step_s: float, log: list[tuple[str, int]]) -> None:
        self.name, self.step_s, self.log, self.pid, self.closed = name, step_s, log, os.getpid(), False
        self.peak_mem_bytes, self.slow_until = 1000, 0

    def answer(self) -> dict[str, Any]:
        return {}

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        if do == "setup":
            return {"name": "t", "about": "", "metric_name": "auc", "extra_metrics": ["f1"], "steps": 400,
                    "eval_every": 100, "batch_size": 32, "train_size": 330, "threads": 1,
                    "setup_s": 0.1}  # fmt: skip
        if do == "evaluate":
            return {"metric": 0.9, "extra": {"f1": 0.5}}
        self.log.append((self.name, arguments["steps"]))
        self.slow_until -= 1
        step_s = self.step_s * (10 if self.slow_until >= 0 else 1)
        return {"time_s": step_s * arguments["steps"], "losses": [], "parts": None}

    def close(self) -> None:
        self.closed = True


def _race(**options: Any) -> tuple[Race, list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    speeds = options.pop("speeds", {"fp32": 0.1, "plan": 0.05})
    children: Any = {name: Scripted(name, step_s, log) for name, step_s in speeds.items()}
    return Race(children=children, **options), log


def test_arms_take_turns_in_equal_slices_whose_order_rotates() -> None:
    race, log = _race()
    race.run([0, 1])
    rounds = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert all(a[1] == b[1] and {a[0], b[0]} == {"fp32", "plan"} for a, b in rounds)
    first = [a[0] for a, _ in rounds]
    assert first[:4] == ["fp32", "plan", "fp32", "plan"]
    assert sum(steps for name, steps in log if name == "plan") == 2 * 400
    # 1.5 s of 0.1 s steps, after two slices of one step that warm up.
    sizes = [a[1] for a, _ in rounds][:8]
    assert sizes[:2] == [1, 1]
    assert set(sizes[2:]) <= set(range(12, 18))
    assert [row["step"] for row in race.tracks["plan"][1].evals] == [100, 200, 300, 400]
    assert tally.ratio_of(race.tracks["fp32"], race.tracks["plan"]).median == pytest.approx(2.0)


def test_a_time_limit_shortens_all_arms_alike_and_says_so() -> None:
    race, log = _race(max_time_s=10.0)
    race.run([0, 1])
    for name in ("fp32", "plan"):
        assert sum(steps for arm, steps in log if arm == name) == 2 * 100
    assert "from 400 to 100 steps" in race.notes[0]
    assert [row["step"] for row in race.tracks["fp32"][1].evals] == [25, 50, 75, 100]


def test_a_disturbed_beginning_does_not_shorten_the_whole_run() -> None:
    race, log = _race(max_time_s=20.0)
    for child in race.children.values():
        scripted: Any = child
        scripted.slow_until = 6  # ten times slower in its first slices
    race.run([0])
    steps = sum(count for arm, count in log if arm == "fp32")
    # By the first slices 20 s would be 20 steps; the disturbed ones took at most half of the time.
    assert steps > 100
    assert race.tracks["fp32"][0].time_s == pytest.approx(20.0, abs=2.0)


def test_a_hopeless_autocast_arm_is_stopped_and_its_ratio_kept() -> None:
    race, _ = _race(speeds={"fp32": 0.1, "plan": 0.1, "autocast": 13.0})
    autocast: Any = race.children["autocast"]
    race.run([0, 1])
    assert autocast.closed
    assert list(race.tracks["autocast"]) == [0]
    assert "130 times" in race.notes[0]
    assert tally.ratio_of(race.tracks["fp32"], race.tracks["autocast"]).median == pytest.approx(1 / 130)
    assert race.peaks["autocast"] == 1000


def test_an_extra_metric_can_decide_and_an_unknown_one_is_refused() -> None:
    race, _ = _race(metric="f1")
    race.run([0])
    assert race.tracks["plan"][0].test == 0.5
    race, log = _race(metric="f2")
    with pytest.raises(TaskError, match="it has auc, f1"):
        race.run([0])
    assert log == []


# -- the tally --------------------------------------------------------------------------------------


def _machine(**verdicts: tuple[str, float]) -> dict[str, Any]:
    return {"formats": {n: {"verdict": v, "gemm_speedup": s} for n, (v, s) in verdicts.items()}}


def test_autocast_takes_the_better_usable_half_format() -> None:
    assert autocast_format(_machine(fp32=("use", 1.0), bf16=("use", 2.0), fp16=("use", 3.0))) == "fp16"
    assert autocast_format(_machine(bf16=("use", 3.0), fp16=("use", 3.0))) == "bf16"
    assert autocast_format(_machine(bf16=("use", 2.0), fp16=("unusable", 9.0))) == "bf16"
    assert autocast_format(_machine(bf16=("not-worth-it", 0.5), fp16=("unusable", 0.1))) == "bf16"


def test_the_time_to_a_metric_counts_training_until_it_is_first_reached() -> None:
    track = Track(
        evals=[{"time_s": t, "metric": m} for t, m in ((1.0, 0.8), (2.0, None), (3.0, 0.91), (4.0, 0.9))]
    )
    assert tally.target_of(track, 0.01, True) == pytest.approx(0.89)
    assert tally.time_to(track, 0.89, True) == 3.0
    assert tally.time_to(track, 0.85, False) == 1.0
    assert tally.time_to(track, 0.95, True) is None
    assert tally.time_to(track, None, True) is None


def _plan(formats: dict[str, str], source: str = "auto") -> Plan:
    choices = (
        Choice(
            what="memory_format", where="*", choice="channels_last", reason="", evidence={"time_ratio": 0.8}
        ),
        Choice(what="race", where="*", choice="x", reason="", evidence={"time_ratio": 0.7}),
    )
    return Plan(policy=Policy("fp32"), formats=formats, choices=choices, source=source)


def test_where_no_format_pays_it_is_said_what_helped_and_by_how_much() -> None:
    parts = {"forward_s": 0.5, "backward_s": 0.4, "optimizer_s": 0.0, "machinery_s": 0.0}
    made = {"fp32": {"parts": {"data_s": 0.1, **parts}}, "plan": {"parts": {"data_s": 0.0, **parts}}}
    speed = {"plan": paired_ratio([1.4], [1.0])}
    said = tally.helped(_plan({"a": "fp32"}), made, speed)
    assert "channels_last layout (1.25x), feed (1.11x); 1.40x in all" in said
    assert tally.helped(_plan({"a": "fp32", "b": "bf16"}), made, speed) == ""
    assert tally.helped(_plan({"a": "fp32"}, source="named"), made, speed) == ""
    assert tally.helped(None, made, speed) == ""
    assert tally.helped(_plan({"a": "fp32"}), made, {**speed, "autocast": paired_ratio([1.9], [1.0])}) == ""


def test_the_warm_up_does_not_count() -> None:
    rows = [{"time_s": t, "samples": 10, "steps": 1, "foreign": None} for t in (9.0, 5.0, 1.0, 1.0, 2.0)]
    assert [row["time_s"] for row in arms.settled(rows)] == [1.0, 1.0, 2.0]
    assert [row["time_s"] for row in arms.settled(rows[:3])] == [1.0]
    arm = tally.arm_of(
        {0: Track(slices=rows)}, peak_mem_bytes=None, targets={}, higher_is_better=True, metrics=[0.9]
    )
    assert arm["samples_per_s"]["median"] == 10.0
    assert arm["metric"] == {"mean": 0.9, "low": None, "high": None}


def test_a_directory_that_is_in_use_or_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError):
            tally.new_directory(path)
    assert (tmp_path / "file").read_text() == "mine"
