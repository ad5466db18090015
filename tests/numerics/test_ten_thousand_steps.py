"""After 10,000 steps of each kind of trouble scale and weights are finite, and what was wrong has a name."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FLOOR, CAP = 2.0**-24, 2.0**48


def run(kind: str, ranks: int = 1) -> list[dict[str, Any]]:
    launch = [sys.executable]
    if ranks > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*launch, str(HERE / "ten_thousand_steps.py"), kind],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, done.stdout + done.stderr
    results: list[dict[str, Any]] = json.loads(lines[0].removeprefix("RESULT "))
    for result in results:
        assert result["finite"] and FLOOR <= result["least"] <= result["most"] <= CAP
        assert FLOOR <= result["scale"] <= CAP
    return results


def test_always_overflow_ends_at_the_floor_and_is_recorded_once() -> None:
    (result,) = run("always")
    assert result["skipped"] == 10_000 and result["scale"] == FLOOR
    assert [(what, step) for what, _, step in result["decisions"]] == [("stall", 20)]
    assert "20 steps in a row were skipped" in result["text"][0]


def test_never_overflow_grows_by_each_interval() -> None:
    (result,) = run("never")
    assert result["skipped"] == 0 and result["moved"] and not result["decisions"]
    assert result["scale"] == 2.0 ** (16 + 10_000 // 2000)


def test_alternating_falls_to_the_floor_and_trains_on() -> None:
    (result,) = run("alternating")
    assert result["skipped"] == 5_000 and result["scale"] == FLOOR and not result["decisions"]


def test_one_bad_layer_is_widened_at_once() -> None:
    (result,) = run("one-bad-layer")
    assert [(what, where) for what, where, _ in result["decisions"]] == [("widen", "0")]
    assert result["skipped"] < 5 and result["scale"] >= 2.0**16


def test_a_model_that_only_fits_below_a_scale_of_1_finds_its_scale_and_trains() -> None:
    (result,) = run("fits-below-1")
    assert result["least"] < 1.0 and result["moved"]
    assert 16 < result["skipped"] < 40 and not result["decisions"]


@pytest.mark.dist
def test_one_bad_rank_is_skipped_by_both_and_named() -> None:
    a, b = run("one-bad-rank", ranks=2)
    assert a == b
    bad = sum(step % 7 == 3 or 200 <= step < 300 for step in range(10_000))
    assert a["skipped"] == bad
    assert [(what, step) for what, _, step in a["decisions"]] == [("stall", 219)]  # from 199 = 7 * 28 + 3 on
