"""A run from its start to its end, and what it refuses."""

import csv
import hashlib
import json
import pickle
import random
import shutil
import tomllib

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from equipoise import run, tasks
from equipoise.config import RunConfig
from equipoise.errors import NonFiniteError, RunError, StallError, TaskError
from equipoise.evaluation import first_nonfinite, out_of_memory
from equipoise.policy import Plan
from equipoise.rundir import RunDirectory
from equipoise.task import Task
from equipoise.trainer import ReadersGone, Stopped, Trainer, pick_device
from equipoise.watch import snapshot
from equipoise.watch.files import Disk
from equipoise.watch.rng import rng_state
from tiny_runs import differences, result_of, write_task


def _accuracy(labels, scores):
    return float((scores.argmax(1) == labels).mean())


def _task(**changes):
    """Two classes, 20 training cases in batches of 8."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    torch.manual_seed(1)
    model = changes.pop("model", None) or nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    task = {
        "name": "two", "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": TensorDataset(x[:20], y[:20]), "val": TensorDataset(x[20:30], y[20:30]),
        "test": TensorDataset(x[30:], y[30:]),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        "metric": _accuracy, "metric_name": "accuracy", "batch_size": 8, "steps": 6, "eval_every": 2,
    }  # fmt: skip
    return Task(**{**task, **changes})


def _config(**changes):
    return RunConfig(**{"task": "two", "precision": "fp32", **changes})


def _train(out, task=None, **changes):
    made = task or _task()
    return run.train(lambda seed, data: made, _config(**changes), out)


# -- what a run leaves --


def test_a_run_leaves_what_the_design_lists(tmp_path):
    out = tmp_path / "a" / "run"
    events = []
    task = _task(
        subgroup={"test": list("aabbaabbab")}, extra_metrics={"error": lambda y, s: 1 - _accuracy(y, s)}
    )
    result = run.train(
        lambda seed, data: task, _config(), out, on_event=lambda k, f: events.append((k, dict(f)))
    )
    assert result.finished and result.step == 6
    names = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {"lock"}
    best = result.metrics["best"]
    checkpoint = "checkpoints/step-00000006-0003"
    assert names == {
        "run.toml", "machine.json", "plan.toml", "steps.jsonl", "metrics.json", "predictions/0-plan.csv",
        best["file"], best["file"].replace(".pt", ".json"), f"{checkpoint}.pt", f"{checkpoint}.json",
    }  # fmt: skip
    asked = tomllib.loads((out / "run.toml").read_text())
    assert asked["schema"] == 1 and asked["steps"] == 6 and asked["device"] == str(pick_device("auto"))
    assert asked["resume"] == "exact" and asked["versions"]["torch"] == torch.__version__
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert all({"step", "loss", "skipped", "scale"} <= row.keys() for row in rows)
    metrics = json.loads((out / "metrics.json").read_text())
    assert [e["step"] for e in metrics["evals"]] == [2, 4, 6]
    assert metrics["best"]["metric"] == max(e["metric"] for e in metrics["evals"])
    assert (
        metrics["finished"] and metrics["metric"]["value"] == metrics["test"] == 1 - metrics["extra"]["error"]
    )
    assert Plan.load(out / "plan.toml").counts() == {"fp32": 2}
    with (out / "predictions" / "0-plan.csv").open(newline="") as file:
        cases = list(csv.DictReader(file))
    assert [c["subgroup"] for c in cases] == list("aabbaabbab")
    scores = np.array([[c["score_0"], c["score_1"]] for c in cases], dtype=np.float32)
    assert _accuracy(np.array([int(c["label"]) for c in cases]), scores) == metrics["test"]
    kinds = [kind for kind, _ in events]
    assert kinds[:2] == ["start", "planned"] and kinds.count("evaluated") == 3 and "progress" in kinds


def test_the_test_split_is_judged_once_with_the_weights_that_were_best(tmp_path):
    reads = []

    class Counted(TensorDataset):
        def get_batch(self, indices):
            reads.extend(indices.tolist())
            return [t[torch.from_numpy(indices)] for t in self.tensors]

    values = iter([0.5, 0.9, 0.4, 0.6])  # three on val, one on test
    task = _task(metric=lambda labels, scores: next(values))
    task.test = Counted(*task.test.tensors)
    result = _train(tmp_path / "run", task)
    assert reads == list(range(10))
    assert result.metrics["best"] == {"step": 4, "metric": 0.9, "file": "checkpoints/best-00000004.pt"}
    assert result.metrics["test"] == 0.6
    best = snapshot.load(tmp_path / "run" / "checkpoints" / "best-00000004.pt")["model"]
    assert differences(dict(best), dict(task.model.state_dict())) == []


def test_lower_can_be_better(tmp_path):
    values = iter([0.5, 0.4, 0.9, 0.6])
    task = _task(metric=lambda labels, scores: next(values), higher_is_better=False)
    assert _train(tmp_path / "run", task).metrics["best"]["step"] == 4


def test_a_time_limit_ends_the_run_and_is_labelled(tmp_path):
    result = _train(tmp_path / "run", max_time=1e-6)
    assert result.finished and result.step == 1
    assert result.metrics["resume"] == "resumes, not exact: a time limit decides where it ends"


def test_another_number_of_threads_is_said(tmp_path):
    task = write_task(tmp_path)
    out = tmp_path / "run"
    asked = []
    stopped = run.train(tasks.resolve(task), RunConfig(task=task, precision="fp32"), out,
                        stop=lambda: asked.append(1) or len(asked) > 2)  # fmt: skip
    assert not stopped.finished
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    notes = []
    result = run.resume(out, tasks.resolve, on_event=lambda k, f: notes.append(f) if k == "notice" else None)
    assert f"threads is {threads + 1}, was {threads}" in notes[0]["text"]
    assert result.metrics["resume"] == f"resumes, not exact: threads is {threads + 1}, was {threads}"


def test_a_finished_run_says_so(tmp_path):
    task = write_task(tmp_path)
    out = tmp_path / "run"
    first = run.train(tasks.resolve(task), RunConfig(task=task, precision="fp32"), out)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "lock"}
    again = run.resume(out, tasks.resolve)
    assert again.was_finished and again.finished and again.metrics == json.loads(json.dumps(first.metrics))
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.name != "lock"}


# -- what a run refuses, with nothing half-written --


def test_a_used_directory_is_refused_and_untouched(tmp_path):
    (tmp_path / "mine").write_text("x")
    with pytest.raises(RunError, match="is not empty"):
        _train(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(RunError, match="is a file"):
        _train(tmp_path / "mine")


@pytest.mark.parametrize(
    ("make", "config", "says"),
    [
        (lambda seed, data: 1 / 0, {}, "making the task 'two' failed: ZeroDivisionError"),
        (lambda seed, data: None, {}, "must return an equipoise.Task"),
        (lambda seed, data: _task(), {"precision": "fp32; nowhere=bf16"}, "nowhere"),
        (lambda seed, data: _task(), {"device": "abacus"}, "isn't there"),
        (lambda seed, data: _task(), {"plan": "no-such-plan.toml"}, "no-such-plan"),
        (lambda seed, data: _task(train=TensorDataset(torch.ones(0, 4))), {}, "train split is empty"),
    ],
)  # fmt: skip
def test_bad_input_is_found_before_anything_is_written(tmp_path, make, config, says):
    with pytest.raises((RunError, TaskError, ValueError), match=says):
        run.train(make, _config(**config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_second_process_is_kept_out(tmp_path):
    task = write_task(tmp_path)
    out = tmp_path / "run"
    asked = []
    run.train(tasks.resolve(task), RunConfig(task=task, precision="fp32"), out,
              stop=lambda: asked.append(1) or len(asked) > 2)  # fmt: skip
    with RunDirectory.reopen(out, Disk()), pytest.raises(RunError, match=r"another process \(process \d+\)"):
        run.resume(out, tasks.resolve)
    assert run.resume(out, tasks.resolve).finished


def _stopped(tmp_path, name="task"):
    task = write_task(tmp_path)
    out = tmp_path / "run"
    asked = []
    config = RunConfig(task=task, precision="fp32", checkpoint_every=1e-9)
    result = run.train(tasks.resolve(task), config, out, stop=lambda: asked.append(1) or len(asked) > 7)
    assert not result.finished and len(snapshot.checkpoints(out / "checkpoints")) == 2
    return out


def test_resume_with_another_model_names_the_first_difference(tmp_path):
    out = _stopped(tmp_path)
    path = out / "run.toml"
    path.write_text(path.read_text().replace("tiny.py:task", "tiny.py:wider"))
    with pytest.raises(
        RunError, match=r"'0.weight' is \(16, 8\) in the checkpoint of step \d+ and \(17, 8\)"
    ):
        run.resume(out, tasks.resolve)


def test_resume_with_other_data_is_refused(tmp_path):
    out = _stopped(tmp_path)
    path = tmp_path / "tiny.py"
    path.write_text(path.read_text().replace("Noisy(53,", "Noisy(54,"))
    with pytest.raises(RunError, match="number of training cases 53, the task now has 54"):
        run.resume(out, tasks.resolve)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("schema = 1", "schema = 2", "schema 2; this version of Equipoise reads 1"),
        ("workers = 0", "worker = 0", "unknown key 'worker' .* did you mean 'workers'"),
        ("workers = 0", "workers = true", "'workers' .* is True; it must be a int"),
        ("workers = 0", "workers = -1", "workers is -1; it must be at least 0"),
        ("schema = 1", "schema = ", "can't be read"),
    ],
)
def test_a_run_file_that_cannot_be_right_is_refused(tmp_path, old, new, says):
    out = _stopped(tmp_path)
    path = out / "run.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(RunError, match=says):
        run.resume(out, tasks.resolve)


def test_what_is_no_run_directory_is_refused(tmp_path):
    with pytest.raises(RunError, match="there is no run directory"):
        run.resume(tmp_path / "nothing", tasks.resolve)
    with pytest.raises(RunError, match="is not a run directory, or its run ended before it began"):
        run.resume(tmp_path, tasks.resolve)


def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(tmp_path):
    out = _stopped(tmp_path)
    task = tasks.resolve(str(tmp_path / "tiny.py") + ":task")
    whole = tmp_path / "whole"
    run.train(task, RunConfig(task=str(tmp_path / "tiny.py") + ":task", precision="fp32"), whole)
    newest = snapshot.checkpoints(out / "checkpoints")[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    notes = []
    result = run.resume(out, tasks.resolve, on_event=lambda k, f: notes.append(f) if k == "notice" else None)
    assert result.finished and newest.name in notes[0]["text"] and "checkpoint before it" in notes[0]["text"]
    assert differences(result_of(whole), result_of(out)) == []


class _Attack:
    def __reduce__(self):
        return (exec, ("raise SystemExit('ran')",))


def test_a_hostile_checkpoint_is_refused(tmp_path):
    out = _stopped(tmp_path)
    newest = snapshot.checkpoints(out / "checkpoints")[-1]
    newest.write_bytes(pickle.dumps(_Attack(), protocol=2))
    manifest = json.loads(newest.with_suffix(".json").read_text())
    manifest |= {"bytes": newest.stat().st_size, "sha256": hashlib.sha256(newest.read_bytes()).hexdigest()}
    newest.with_suffix(".json").write_text(json.dumps(manifest))
    with pytest.raises(RunError, match="it may run code, so it was not loaded"):
        run.resume(out, tasks.resolve)


# -- data and metrics that can't be used --


def _with_nan(split, case):
    task = _task()
    x, _ = getattr(task, split).tensors
    x = x.clone()
    x[case, 2] = float("nan")
    setattr(task, split, TensorDataset(x, getattr(task, split).tensors[1]))
    return task


@pytest.mark.parametrize(("split", "case"), [("train", 3), ("train", 13), ("val", 7), ("test", 2)])
def test_a_nan_in_the_data_names_the_case(tmp_path, split, case):
    with pytest.raises(TaskError, match=f"case {case} of {split} holds a NaN"):
        _train(tmp_path / "run", _with_nan(split, case))
    for path in snapshot.checkpoints(tmp_path / "run" / "checkpoints"):
        weights = snapshot.load(path)["model"]
        assert all(bool(torch.isfinite(w).all()) for w in weights.values())


def test_labels_out_of_range_are_the_datas_fault(tmp_path):
    task = _task()
    x, y = task.train.tensors
    task.train = TensorDataset(x, y + 1)
    with pytest.raises(TaskError, match="out of bounds"):
        _train(tmp_path / "run", task)


def test_a_metric_that_fails_or_is_no_number_says_where(tmp_path):
    with pytest.raises(TaskError, match=r"metric 'accuracy' on val .* failed: ZeroDivisionError"):
        _train(tmp_path / "a", _task(metric=lambda y, s: 1 / 0))
    with pytest.raises(TaskError, match="is nan; it must be a finite number"):
        _train(tmp_path / "b", _task(metric=lambda y, s: float("nan")))


def test_a_model_that_diverged_is_not_blamed_on_the_data():
    task = _task()
    trainer = Trainer(task, seed=0, precision="fp32")
    trainer.advance(1)
    with torch.no_grad():
        task.model[0].weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="10 of 10 scores on val are NaN"):
        trainer.evaluate("val")
    with pytest.raises(StallError):
        trainer.advance(30)


def test_first_nonfinite_looks_everywhere():
    good, bad = torch.ones(3, 2), torch.tensor([[1.0, 1], [1, 1], [1, float("inf")]])
    assert first_nonfinite([good, {"a": (good, torch.arange(3))}, "text", torch.tensor(float("nan"))]) is None
    assert first_nonfinite([good, {"a": (good, bad)}]) == 2


# -- the trainer --


def test_evaluation_disturbs_nothing():
    frozen = nn.BatchNorm1d(4).eval()
    model = nn.Sequential(frozen, nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))

    def predict(model, batch):
        assert not any(m.training for m in model.modules())
        return model(batch[0]) + torch.rand(2) + float(np.random.rand()) + random.random()

    trainer = Trainer(_task(model=model, predict=predict), seed=0, precision="fp32")
    trainer.advance(1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    generators = snapshot.pack(rng_state())
    first, second = trainer.evaluate("val"), trainer.evaluate("val")
    assert first.metric == second.metric and first.scores.dtype == np.float32
    assert differences(first.scores.tolist(), second.scores.tolist()) == []
    assert [m.training for m in model] == [False, True, True, True] and model.training
    assert differences(before, dict(model.state_dict())) == []
    assert differences(generators, snapshot.pack(rng_state())) == []


def test_evaluation_is_in_order_and_under_the_plan():
    trainer = Trainer(_task(), seed=0, precision="bf16")
    found = trainer.evaluate("train")
    task = trainer.task
    assert found.labels.tolist() == task.train.tensors[1].tolist()
    task.model.eval()
    with torch.no_grad():
        exact = task.model(task.train.tensors[0])
        with trainer.session.autocast():
            narrow = task.model(task.train.tensors[0]).float()
    assert not np.array_equal(found.scores, exact.numpy())
    assert np.array_equal(found.scores, narrow.numpy())


class _Greedy(nn.Linear):
    """Has memory for three cases at a time."""

    most = 3
    seen: list[int] = []

    def forward(self, x):
        self.seen.append(len(x))
        if len(x) > self.most and not self.training:
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
            )
        return super().forward(x)


def test_evaluation_that_runs_out_of_memory_takes_smaller_batches():
    torch.manual_seed(0)
    model = _Greedy(4, 2)
    task = _task(model=model)
    trainer = Trainer(task, seed=0, precision="fp32")
    found = trainer.evaluate("val")
    with torch.no_grad():
        expected = nn.functional.linear(task.val.tensors[0], model.weight, model.bias).numpy()
    assert np.allclose(found.scores, expected, atol=1e-6)  # another batch size may differ in the last digit
    model.seen.clear()
    trainer.evaluate("val")
    assert max(model.seen) <= 3  # it has learned
    model.most = 0
    with pytest.raises(TaskError, match="one case of val doesn't fit into memory"):
        trainer.evaluate("val")


def test_training_that_runs_out_of_memory_names_the_batch_size():
    def loss(model, batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(TaskError, match="a training step with batch_size 8 doesn't fit into memory"):
        Trainer(_task(loss=loss), seed=0, precision="fp32").advance(1)
    assert out_of_memory(MemoryError()) and not out_of_memory(RuntimeError("shape"))


def test_advance_in_any_pieces_is_the_same_training():
    whole = Trainer(_task(), seed=3, precision="bf16")
    rows = whole.advance(9)
    pieces = Trainer(_task(), seed=3, precision="bf16")
    parts = []
    for steps in (1, 4, 4):
        parts += pieces.advance(steps)
        pieces.evaluate("val")
    assert [(r["step"], r["loss"]) for r in rows] == [(r["step"], r["loss"]) for r in parts]
    assert differences(dict(whole.task.model.state_dict()), dict(pieces.task.model.state_dict())) == []
    assert whole.samples == 3 * 20  # 8, 8, 4 in each of three epochs
    times = [r["time_s"] for r in parts]
    assert times == sorted(times)


def test_the_trainers_state_round_trips():
    trainer = Trainer(_task(), seed=0, precision="fp32")
    trainer.advance(4)
    state, weights = trainer.state_dict(), {k: v.clone() for k, v in trainer.task.model.state_dict().items()}
    state = snapshot.unpack(snapshot.pack(state))
    step, time_s, samples = trainer.step, trainer.time_s, trainer.samples
    expected = [r["loss"] for r in trainer.advance(5)]
    other = Trainer(_task(), seed=0, precision="fp32")
    other.task.model.load_state_dict(weights)
    other.load_state_dict(state)
    assert (other.step, other.time_s, other.samples) == (step, time_s, samples)
    assert [r["loss"] for r in other.advance(5)] == expected


def test_auto_plans_once_and_resume_never(tmp_path, monkeypatch):
    task = write_task(tmp_path)
    out = tmp_path / "run"
    asked = []
    run.train(tasks.resolve(task), RunConfig(task=task), out, stop=lambda: asked.append(1) or len(asked) > 3)
    plan = (out / "plan.toml").read_text()
    assert json.loads((out / "machine.json").read_text())["formats"]
    monkeypatch.setattr(Trainer, "prepare", _no_planning(Trainer.prepare))
    result = run.resume(out, tasks.resolve)
    assert result.finished
    assert (out / "plan.toml").read_text() == plan


def _no_planning(prepare):
    def checked(self):
        assert self.session.plan is not None, "a resumed run plans again"
        return prepare(self)

    return checked


def test_disk_copies_of_a_run_can_be_resumed_elsewhere(tmp_path):
    out = _stopped(tmp_path)
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    assert run.resume(out, tasks.resolve).metrics["test"] == run.resume(moved, tasks.resolve).metrics["test"]


@pytest.mark.parametrize(("asked", "raised"), [(True, Stopped), (False, ReadersGone)])
def test_readers_that_end_in_an_evaluation_are_told_from_a_stop(asked, raised):
    class Gone:
        def ordered(self, size):
            yield torch.zeros(2, 4), torch.zeros(2, dtype=torch.long)
            asked_to.append(asked)
            raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Terminated.")

    asked_to: list[bool] = []
    trainer = Trainer(_task(), seed=0, precision="fp32", device="cpu")
    trainer._eval_feeds["val"] = Gone()
    with pytest.raises(raised):
        trainer.evaluate("val", lambda: bool(asked_to and asked_to[-1]))


def test_a_data_sets_own_error_in_a_worker_is_not_taken_for_a_dead_worker():
    class Broken(TensorDataset):
        def __getitem__(self, index):
            raise RuntimeError("no such shard")

    x = torch.randn(20, 4)
    trainer = Trainer(_task(train=Broken(x, x)), seed=0, precision="fp32", device="cpu", workers=1)
    with pytest.raises(TaskError, match="RuntimeError: no such shard") as raised:
        trainer.advance(1)
    assert not isinstance(raised.value, ReadersGone)
