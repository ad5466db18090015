"""``equipoise train`` from its words to its output and exit code."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from equipoise import tasks
from equipoise.cli import train as verb
from equipoise.cli.main import app
from equipoise.cli.progress import Progress
from equipoise.cli.times import seconds as seconds_of
from equipoise.config import RunConfig
from equipoise.policy import Plan, Policy
from equipoise.rundir import RunDirectory
from equipoise.watch.files import Disk
from tiny_runs import differences, result_of, write_task


def _train(*words):
    done = CliRunner().invoke(app, ["train", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


def test_list_shows_the_shipped_tasks():
    code, out, _ = _train("--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [name for name, _ in tasks.names()]


def test_a_run_prints_its_result_and_json_prints_nothing_else(tmp_path):
    task = write_task(tmp_path)
    code, out, err = _train(task, "--precision", "fp32", "--out", tmp_path / "a", "--seed", 3)
    assert code == 0, err
    assert out.startswith("accuracy on test: ") and f"run: {tmp_path / 'a'}" in out
    assert (tmp_path / "a" / "report.html").exists()
    assert "step 12/12" in err and "3 layers in FP32" in err and "best so far" in err
    assert RunConfig.load(tmp_path / "a" / "run.toml").seed == 3

    code, out, _ = _train(task, "--precision", "fp32", "--out", tmp_path / "b", "--seed", 3, "--json")
    assert code == 0
    found = json.loads(out)
    assert found.keys() == {"metric", "run"} and found["run"] == str(tmp_path / "b")
    assert {"name", "value", "higher_is_better"} <= found["metric"].keys()
    assert differences(result_of(tmp_path / "a")["checkpoint"], result_of(tmp_path / "b")["checkpoint"]) == []

    code, out, err = _train("--resume", tmp_path / "b")
    assert code == 0 and "is finished" in err and f"{found['metric']['value']:.4g}" in out


def test_the_default_place_and_a_task_found_from_elsewhere(tmp_path, monkeypatch):
    write_task(tmp_path, steps=4)
    monkeypatch.chdir(tmp_path)
    code, out, err = _train("tiny.py:task", "--precision", "fp32", "--json")
    assert code == 0, err
    run = Path(json.loads(out)["run"])
    assert run.parent == Path("runs") and run.name.startswith("tiny-2")
    config = RunConfig.load(run / "run.toml")
    assert config.task == f"{tmp_path / 'tiny.py'}:task"
    assert config.repeat.startswith(f"equipoise train {tmp_path / 'tiny.py'}:task --seed 0 --precision fp32")


@pytest.mark.parametrize(
    "mistake", ["{}['x']", "sys.exit(0)", "open('/nowhere')", "nn.Linear(3, 1)(batch[0])", "batch[0].sum()"]
)
def test_a_mistake_in_the_tasks_own_code_is_the_users(tmp_path, mistake):
    task = write_task(tmp_path, steps=4)
    file = tmp_path / "tiny.py"
    loss = "nn.functional.cross_entropy(model(batch[0]).float(), batch[1])"
    file.write_text("import sys\n" + file.read_text().replace(loss, mistake))
    code, _, err = _train(task, "--precision", "fp32", "--out", tmp_path / "run")
    assert code == 2 and "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: task 'tiny': training after step 0 failed: ")
    assert f"({file}, line " in err or "the loss has no gradient" in err


def test_what_a_task_prints_is_not_the_result(tmp_path):
    task = write_task(tmp_path, steps=4)
    file = tmp_path / "tiny.py"
    file.write_text(
        file.read_text().replace("    return float(", "    print('HELLO')\n    return float(")
        + "\nprint('HI')"
    )
    code, out, err = _train(task, "--precision", "fp32", "--out", tmp_path / "run", "--json")
    assert code == 0 and json.loads(out) and "HELLO" in err and "HI" in err


def test_a_pinned_plan_is_used(tmp_path):
    task = write_task(tmp_path, steps=4)
    layers = {"0": "bf16", "1": "fp32", "4": "fp32"}
    plan = Plan(policy=Policy.parse("fp32; 0=bf16"), formats=layers, source="auto")
    plan.save(tmp_path / "mine.toml")
    code, _, err = _train(task, "--plan", tmp_path / "mine.toml", "--out", tmp_path / "run")
    assert code == 0, err
    assert "2 layers in FP32 and 1 in bf16" in err
    assert Plan.load(tmp_path / "run" / "plan.toml").same_decisions(plan)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "no TASK; give a name"),
        (("txet",), "no task 'txet'. Did you mean 'text'?"),
        (("digits", "--max-steps", "0"), "--max-steps is 0; it must be at least 1"),
        (("digits", "--max-time", "soon"), "--max-time is 'soon'; write a time above 0"),
        (("digits", "--checkpoint-every", "0s"), "--checkpoint-every is '0s'"),
        (("digits", "--workers", "-1"), "workers is -1; it must be at least 0"),
        (("digits", "--seed", "-1"), "seed is -1"),
        (("digits", "--precision", "bf61"), "bf61"),
        (("digits", "--device", "abacus"), "device 'abacus' isn't there"),
        (("digits", "--plan", "nowhere.toml"), "nowhere.toml"),
        (("nowhere.py:task",), "nowhere.py"),
        (("--resume", "nowhere"), "there is no run directory"),
        (("digits", "--resume", "r", "--seed", "1"), "--resume with TASK, --seed: a resumed run keeps"),
    ],
)
def test_bad_words_give_2_and_leave_nothing(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    code, out, err = _train(*words)
    assert code == 2, err
    assert out == "" and err.startswith("error: ") and says in err
    assert list(tmp_path.iterdir()) == []


def test_a_used_directory_and_a_held_one_give_2(tmp_path):
    task = write_task(tmp_path)
    code, _, err = _train(task, "--out", tmp_path)
    assert code == 2 and "is not empty" in err
    out = tmp_path / "run"
    with RunDirectory.create(out, Disk()) as held:
        held.put_text("run.toml", RunConfig(task=task).to_toml())
        code, _, err = _train("--resume", out)
        assert code == 2 and f"another process (process {os.getpid()}) is training in" in err
        code, _, err = _train(task, "--out", out)
        assert code == 2 and "holds a run; --out names a new or empty directory. To go on with a run: " in err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if sys.platform != "linux" or os.getuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root on Linux")
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no mount")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_full_disk_gives_2_and_the_run_goes_on_when_there_is_room(tmp_path, small_disk):
    task = write_task(tmp_path, steps=12)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(140 * 1024))
    code, out, err = _train(
        task, "--precision", "fp32", "--out", small_disk / "run", "--checkpoint-every", "0.00001"
    )
    assert code == 2 and out == "", err
    assert "No space left on device; free some space" in err
    assert "Traceback" not in err
    ballast.unlink()
    code, _, err = _train("--resume", small_disk / "run")
    assert code == 0, err
    _train(task, "--precision", "fp32", "--out", tmp_path / "whole")
    assert differences(result_of(tmp_path / "whole"), result_of(small_disk / "run")) == []


def test_a_read_only_place_gives_2(tmp_path, small_disk):
    task = write_task(tmp_path)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    code, out, err = _train(task, "--precision", "fp32", "--out", small_disk / "run")
    assert code == 2 and out == ""
    assert "Read-only file system; choose a place that can be written with --out" in err


BROKEN = """    def check(self, i):
        from equipoise.errors import TaskError
        if i == 41:
            raise TaskError("picture 41 is broken")
    def __len__"""


def test_an_error_amid_the_run_says_how_to_go_on(tmp_path):
    task = write_task(tmp_path, steps=12)
    source = tmp_path / "tiny.py"
    good = source.read_text()
    # Case 41 can't be read until someone mends it.
    source.write_text(
        good.replace("    def __len__", BROKEN).replace(
            "        noise =", "        self.check(i)\n        noise ="
        )
    )
    out = tmp_path / "run"
    code, _, err = _train(task, "--precision", "fp32", "--out", out, "--checkpoint-every", "0.00001")
    assert code == 2 and "picture 41 is broken" in err
    kept = list((out / "checkpoints").glob("step-*.pt"))
    assert ("what was trained is kept; go on with: equipoise train --resume" in err) == bool(kept)
    source.write_text(good)
    code, _, err = _train("--resume", tmp_path / "run")
    assert code == 0, err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5h", 5400), ("10m", 600), ("2 min", 120), (".5s", 0.5), (None, None)],
)
def test_times_are_read(text, seconds):
    assert seconds_of("--max-time", text) == seconds


def test_signals_before_the_first_step_stop_at_once(monkeypatch):
    watch = verb._Watch()
    with pytest.raises(KeyboardInterrupt):
        watch.on_signal(2, None)
    with pytest.raises(KeyboardInterrupt):
        watch.on_signal(15, None)
    assert not watch.asked()


def test_the_handlers_are_put_back(tmp_path):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    write_task(tmp_path, steps=2)
    assert _train(f"{tmp_path / 'tiny.py'}:task", "--precision", "fp32", "--out", tmp_path / "run")[0] == 0
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before


def test_progress_without_a_terminal_is_lines(capsys):
    progress = Progress()
    progress.on_event(
        "start", {"task": "t", "about": "a thing", "step": 5, "steps": 9, "run": "r", "metric": "auc"}
    )
    plan = Plan(policy=Policy("bf16"), formats={"a": "bf16", "b": "fp32"}, note="it paid")
    progress.on_event("planned", {"plan": plan, "setup_s": 0.0})
    facts = {"step": 6, "steps": 9, "loss": 0.5, "metric": None, "samples_per_s": 123.4, "left_s": 61.0}
    progress.on_event("progress", facts)
    progress.on_event("evaluated", {"step": 6, "metric": 0.75, "best": True, "extra": {}})
    progress.on_event("notice", {"text": "look [here]"})
    progress.on_event("saved", {"step": 6})
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["t: a thing", "from step 5 to step 9, kept in r"]
    assert lines[2] == "1 layer in bf16 and 1 in FP32; it paid"
    assert lines[3].startswith(
        "step 6/9 · loss 0.5 · auc 0.75 · 123 samples/s · 1 layer in bf16 and 1 in FP32 · "
    )
    assert lines[3].endswith("left (best so far)")
    assert lines[4:] == ["note: look [here]"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_on_a_terminal_a_bar_is_drawn_and_json_stays_clean(tmp_path):
    import pty

    task = write_task(tmp_path, steps=40, eval_every=20, pause_s=0.002)
    ours, theirs = pty.openpty()
    drawn = []

    def read():
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:
                return
            if not piece:
                return
            drawn.append(piece)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "TERM": "xterm",
        "COLUMNS": "150",
    }
    words = ["train", task, "--precision", "fp32", "--out", str(tmp_path / "run"), "--json"]
    done = subprocess.run([sys.executable, "-m", "equipoise", *words], stdout=subprocess.PIPE, stderr=theirs,
                          env=environment, check=False, text=True, timeout=200)  # fmt: skip
    os.close(theirs)
    reader.join(timeout=10)
    os.close(ours)
    assert done.returncode == 0
    assert json.loads(done.stdout).keys() == {"metric", "run"}
    text = b"".join(drawn).decode(errors="replace")
    assert "━" in text and "/40 · loss" in text and "samples/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again


def test_the_module_needs_no_torch():
    script = (
        "import sys; import equipoise.cli.train, equipoise.cli.progress; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    assert isinstance(app, typer.Typer)
