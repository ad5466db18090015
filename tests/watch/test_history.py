"""The ring of reports, its rows, and the count of skips."""

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.errors import RunError
from equipoise.records import StepReport
from equipoise.watch.files import Disk, Rows
from equipoise.watch.history import History


class Flag:
    """A value on a device: counts how often it is read."""

    reads = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        Flag.reads += 1
        return self.value


@pytest.fixture(autouse=True)
def no_reads() -> None:
    Flag.reads = 0


@pytest.fixture
def open_rows(tmp_path: Path) -> Iterator[Callable[..., Rows]]:
    with contextlib.ExitStack() as stack:
        yield lambda keep=0: stack.enter_context(
            contextlib.closing(Rows(Disk(), tmp_path / "steps.jsonl", keep=keep))
        )


def report(step: int, skipped: Any = False, loss: Any = None) -> StepReport:
    return StepReport(step, Flag(1.5) if loss is None else loss, skipped, 8.0)


def test_the_ring_keeps_the_newest() -> None:
    history = History(capacity=3)
    assert history.last is None
    for step in range(1, 6):
        history.append(report(step))
    assert [r.step for r in history] == [3, 4, 5] and len(history) == 3
    assert history.last is not None and history.last.step == 5


def test_nothing_is_read_but_on_sampled_steps(tmp_path: Path, open_rows: Any) -> None:
    history = History(open_rows(), sample_every=10)
    for step in range(1, 10):
        history.append(report(step, torch.tensor(1.0)))
    assert Flag.reads == 0 and history.skips_in_a_row == 0
    history.append(report(10))
    assert Flag.reads == 1 and history.skips_in_a_row == 0
    history.flush()
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert rows == [{"step": 10, "loss": 1.5, "skipped": False, "scale": 8.0}]


def test_skips_in_a_row() -> None:
    history = History()
    for step, skipped in enumerate([False, True, True, False, True, True, True], 1):
        history.append(report(step, skipped))
    assert history.skips_in_a_row == 3


def test_flags_on_a_device_are_read_together_and_in_order() -> None:
    history = History(sample_every=5)
    for step, skipped in enumerate([True, torch.tensor(1.0), torch.tensor(0.0), torch.tensor(1.0)], 1):
        history.append(report(step, skipped))
    assert history.skips_in_a_row == 1  # what is known without a read
    history.append(report(5, True))
    assert history.skips_in_a_row == 2
    history.append(report(6, torch.tensor(1.0)))
    assert history.settle() == 3


def test_an_unread_step_before_a_taken_one_is_not_overtaken() -> None:
    history = History()
    history.append(report(1, torch.tensor(1.0)))
    history.append(report(2, False))
    assert history.settle() == 0
    history.append(report(3, True))
    assert history.skips_in_a_row == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_are_json_whatever_the_loss(tmp_path: Path, open_rows: Any, value: float) -> None:
    history = History(open_rows(), sample_every=1)
    history.append(report(1, True, torch.tensor(value)))
    history.flush()

    def refuse(text: str) -> None:
        raise AssertionError(text)

    row = json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=refuse)
    assert row == {"step": 1, "loss": None, "skipped": True, "scale": 8.0}


def test_flush_gives_the_length_that_resume_cuts_back_to(tmp_path: Path, open_rows: Any) -> None:
    path = tmp_path / "steps.jsonl"
    history = History(open_rows(), sample_every=1)
    history.append(report(1))
    kept = history.flush()
    assert kept == path.stat().st_size > 0
    history.append(report(2))
    assert path.stat().st_size == kept  # buffered
    assert history.flush() > kept
    again = History(open_rows(keep=kept), sample_every=1)
    again.append(report(2))
    again.flush()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
    assert History().flush() == 0


def test_state_round_trip() -> None:
    history = History()
    for step in (1, 2):
        history.append(report(step, torch.tensor(1.0)))
    state = history.state_dict()
    assert state == {"skips_in_a_row": 2}
    other = History()
    other.append(report(9, torch.tensor(1.0)))
    other.load_state_dict(state)
    other.append(report(3, True))
    assert other.skips_in_a_row == 3 and [r.step for r in other] == [3]
    with pytest.raises(RunError, match="skips_in_a_row"):
        other.load_state_dict({"steps": 3})


@pytest.mark.parametrize("kwargs", [{"capacity": 0}, {"sample_every": 0}])
def test_sizes_below_one_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(RunError, match="at least 1"):
        History(**kwargs)
