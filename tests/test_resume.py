"""``kill -9`` at random moments: the run goes on from its last checkpoint and ends with the same bits."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from equipoise import run, tasks
from equipoise.config import RunConfig
from tiny_runs import differences, result_of, start, without_clocks, write_task

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kill -9")



def _rows(out: Path) -> int:
    path = out / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill_at(child, out: Path, rows: int, jitter_s: float) -> None:
    """Kill the child a moment after its file has that many rows."""
    deadline = time.monotonic() + 120
    while _rows(out) < rows:
        if child.poll() is not None:
            raise AssertionError(f"ended before it was killed: {child.stderr.read()}")
        assert time.monotonic() < deadline, f"{_rows(out)} rows after 120 s"
        time.sleep(0.002)
    time.sleep(jitter_s)
    child.send_signal(signal.SIGKILL)
    child.communicate()


def _children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("workers", "precision"), [(0, "fp32"), (2, "bf16")])
def test_killed_three_times_it_ends_with_the_same_bits(tmp_path, workers, precision):
    seed = int.from_bytes(os.urandom(4), "big")
    print(f"moments of the kills: random.Random({seed})")
    draw = random.Random(seed)
    # Rows reach the file up to 50 at a time: each third leaves room for that and for the kills after it.
    task = write_task(tmp_path, steps=400, eval_every=50, pause_s=0.002)
    whole = tmp_path / "whole"
    config = RunConfig(task=task, precision=precision)
    assert run.train(tasks.resolve(task), config, whole).finished

    out = tmp_path / "killed"
    child = start(task, "--precision", precision, "--workers", workers, "--out", out,
                  "--checkpoint-every", "0.15")  # fmt: skip
    seen = []
    for latest in (100, 210, 320):
        low = _rows(out)
        moment = draw.randint(low + 1, max(low + 1, latest))
        _kill_at(child, out, moment, draw.uniform(0, 0.02))
        seen.append(moment)
        child = start("--resume", out)
    printed, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    print("killed at rows", seen)
    assert json.loads((out / "metrics.json").read_text())["resume"] == "exact"
    assert "accuracy on test" in printed
    assert differences(result_of(whole), result_of(out)) == []


def test_workers_end_with_a_killed_run_and_the_directory_is_free_at_once(tmp_path):
    task = write_task(tmp_path, steps=5000, eval_every=1000, pause_s=0.002)
    out = tmp_path / "run"
    child = start(task, "--precision", "fp32", "--workers", 2, "--out", out, "--checkpoint-every", "0.1")
    deadline = time.monotonic() + 120
    while _rows(out) < 5:
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.01)
    workers = _children_of(child.pid)
    assert len(workers) == 2
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert any(map(_alive, workers))
    # The workers may live a moment longer: they must not hold the directory.
    before = set(_children_of(os.getpid()))
    asked = []
    result = run.resume(out, tasks.resolve, stop=lambda: asked.append(1) or len(asked) > 2)
    assert not result.finished and result.step > 0
    deadline = time.monotonic() + 20
    # Those of the killed run, and those of the one that was stopped in this process.
    while any(map(_alive, [*workers, *set(_children_of(os.getpid())) - before])):
        assert time.monotonic() < deadline, "workers outlive their run"
        time.sleep(0.1)
    child.communicate()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_says_how_to_go_on(tmp_path, number, code):
    task = write_task(tmp_path, steps=60, eval_every=20, pause_s=0.003)
    out = tmp_path / "run"
    child = start(task, "--precision", "fp32", "--workers", 1, "--out", out, start_new_session=True)
    deadline = time.monotonic() + 120
    while _rows(out) < 4:
        assert time.monotonic() < deadline and child.poll() is None, child.communicate()
        time.sleep(0.005)
    os.killpg(child.pid, number)  # as a terminal does: the workers get it too
    _, errors = child.communicate(timeout=60)
    assert child.returncode == code, errors
    assert errors.count("stopping after this step") == 1
    assert f"Go on with: equipoise train --resume {out}" in errors
    assert "Traceback" not in errors
    rows = _rows(out)
    assert 4 <= rows < 60
    whole = tmp_path / "whole"
    run.train(tasks.resolve(task), RunConfig(task=task, precision="fp32"), whole)
    result = run.resume(out, tasks.resolve)
    assert result.finished and result.metrics["resumes"] == 1
    assert differences(result_of(whole), result_of(out)) == []


def test_stopping_at_every_look_and_resuming_changes_nothing(tmp_path):
    """In one process: stop after each chunk of steps, in evaluations too, until it is done."""
    task = write_task(tmp_path, steps=20, eval_every=6)
    config = RunConfig(task=task, precision="bf16")
    whole, out = tmp_path / "whole", tmp_path / "stopped"
    run.train(tasks.resolve(task), config, whole)
    make = tasks.resolve(task)
    looks = 0

    def stop_at_the(count):
        asked = []
        return lambda: asked.append(1) or len(asked) > count

    result = run.train(make, config, out, stop=stop_at_the(1))
    while not result.finished:
        looks += 1
        assert looks < 100
        result = run.resume(out, tasks.resolve, stop=stop_at_the(1 + looks % 5))
    assert looks > 5
    assert differences(result_of(whole), result_of(out)) == []
    assert without_clocks(result.metrics) == without_clocks(json.loads((out / "metrics.json").read_text()))
