"""Two real processes on gloo: the same plan, the same skips, the same weights."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SHARDED = [
    f"{where}-{order}{clip}"
    for where in ("plain", "shard", "loss")
    for order in ("first", "last")
    for clip in ("", "-clip")
]
NORMS = ["norms:1:none", "norms:1e30:none"]
"""The second: numbers whose squares leave FP32's range."""
SCENARIOS = [
    "ddp:auto:none",
    "fsdp:auto:none",
    "ddp:bf16:2",
    "ddp:fp16:2",
    "fsdp:bf16:2",
    *(f"sharded:{where}:2" for where in SHARDED),
    "sharded:first:none",
    "sharded:last-clip:none",
    *NORMS,
    "local:fp32:2",
    "gan:bf16:none",
    "overflow:ddp:2",
    "overflow:local:0",
    "first_loss:bf16:none",
    "first:value:none",
    "first:error:none",
]

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    """Scenario -> what rank 0 and rank 1 saw; all in one launch, since starting two processes costs
    seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "two_ranks.py"), *SCENARIOS],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment,
        check=False,
    )
    lines = [line.split(" ", 2) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(SCENARIOS), done.stdout + done.stderr
    return {name: json.loads(text) for _, name, text in lines}


@pytest.mark.parametrize("scenario", ["ddp:auto:none", "fsdp:auto:none"])
def test_auto_chooses_the_same_plan_on_both_ranks(results, scenario: str) -> None:
    a, b = results[scenario]
    assert a["plan"] is not None and a == b
    assert not any(a["skipped"])


@pytest.mark.parametrize("scenario", ["ddp:bf16:2", "ddp:fp16:2", "fsdp:bf16:2"])
def test_a_fault_on_one_rank_is_skipped_by_both(results, scenario: str) -> None:
    a, b = results[scenario]
    assert a["skipped"] == b["skipped"] == [False, False, True, False, False, False]
    assert a["weights"] == b["weights"] and a["scale"] == b["scale"]


@pytest.mark.parametrize("where", SHARDED)
def test_s8_an_overflow_on_one_rank_with_some_gradients_sharded_and_some_not(results, where: str) -> None:
    a, b = results[f"sharded:{where}:2"]
    assert a == b  # skips, scales, norms, weights
    assert a["skipped"] == [False, False, True, False, False, False]
    # grown after two clean steps, halved by the skip, grown again after two
    assert a["scales"] == [1024, 1024, 2048, 1024, 1024, 2048] and a["scale"] == 2048


@pytest.mark.parametrize("scenario", NORMS)
def test_s8_neighbour_the_norm_counts_every_shard_and_what_is_not_sharded_once(
    results, scenario: str
) -> None:
    a, b = results[scenario]
    assert a == b
    assert a["norm"] == pytest.approx(a["exact"], rel=1e-5) and a["left"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("scenario", ["sharded:first:none", "sharded:last-clip:none"])
def test_s8_without_an_overflow_they_train_as_one_process_does(results, scenario: str) -> None:
    a, b = results[scenario]
    assert a == b and not any(a["skipped"])
    assert a["weights"] == pytest.approx(a["alone"], rel=2e-3)


@pytest.mark.parametrize("scenario", ["overflow:ddp:2", "overflow:local:0"])
def test_f11_a_layer_that_overflows_on_one_rank_is_widened_on_both(results, scenario: str) -> None:
    a, b = results[scenario]
    assert [where for _, what, where in a["decisions"] if what == "widen"] == ["0"]
    assert {key: a[key] for key in a if key != "weights"} == {key: b[key] for key in b if key != "weights"}
    assert (a["weights"] == b["weights"]) == (scenario == "overflow:ddp:2")
    assert not a["skipped"][-1] and a["plan"] == "fp16; 0=fp32"


def test_a_first_loss_that_is_not_finite_on_one_rank_stops_both(results) -> None:
    a, b = results["first_loss:bf16:none"]
    assert "the first loss is nan" in b["error"] and "the first loss" in a["error"]


def test_ranks_skip_alike_where_nobody_reduces_gradients(results) -> None:
    a, b = results["local:fp32:2"]
    assert a["skipped"] == b["skipped"] == [False, False, True, False, False, False]
    assert a["weights"] != b["weights"]  # their data differ, and so do their weights


def test_one_loss_at_a_time_over_two_data_parallel_models(results) -> None:
    a, b = results["gan:bf16:none"]
    assert a["weights"] == b["weights"]


def test_what_rank_0_makes_reaches_both_and_so_does_its_error(results) -> None:
    a, b = results["first:value:none"]
    assert a == {"value": 7, "made": [0]} and b == {"value": 7, "made": []}
    a, b = results["first:error:none"]
    assert a == {"error": "integer division or modulo by zero", "made": [0]} and b == a | {"made": []}
