"""Records: frozen, plain, and lazy where reading costs a sync."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise import records
from equipoise.records import StepParts, StepReport, Timing
from recorded import machine

FROZEN = [c for c in vars(records).values() if dataclasses.is_dataclass(c)]


@pytest.mark.parametrize("record", FROZEN, ids=lambda c: c.__name__)
def test_a_record_can_not_be_changed(record: type) -> None:
    assert record.__dataclass_params__.frozen and hasattr(record, "__slots__")
    assert all(f.kw_only for f in dataclasses.fields(record))


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_a_timing_lies_inside_its_readings(times_s: list[float]) -> None:
    timing = Timing.of(times_s)
    assert min(times_s) <= timing.low_s <= timing.median_s <= timing.high_s <= max(times_s)
    assert timing.rounds == len(times_s) and timing.spread >= 0


class Counted:
    """A value on a device that counts how often it is read."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value

    def __bool__(self) -> bool:
        self.reads += 1
        return bool(self.value)


def test_a_report_reads_nothing_until_it_is_asked() -> None:
    loss, skipped, scale, norm = Counted(2.5), Counted(0.0), Counted(8.0), Counted(1.5)
    report = StepReport(7, loss, skipped, scale, norm)
    repr(report)
    assert [v.reads for v in (loss, skipped, scale, norm)] == [0, 0, 0, 0]
    assert (report.loss, report.skipped, report.scale, report.grad_norm) == (2.5, False, 8.0, 1.5)
    assert [v.reads for v in (loss, skipped, scale, norm)] == [1, 1, 1, 1]


def test_a_row_has_what_was_recorded_and_no_more() -> None:
    assert StepReport(1, None, False).as_dict() == {"step": 1, "loss": None, "skipped": False, "scale": 1.0}
    parts = StepParts(data_s=1.0, forward_s=2.0, backward_s=3.0, optimizer_s=4.0, machinery_s=5.0)
    row = StepReport(2, torch.tensor(0.5), torch.tensor(1.0), 2.0, torch.tensor(math.inf), parts).as_dict()
    assert row == {
        "step": 2, "loss": 0.5, "skipped": True, "scale": 2.0, "grad_norm": math.inf,
        "parts": {"data_s": 1.0, "forward_s": 2.0, "backward_s": 3.0, "optimizer_s": 4.0, "machinery_s": 5.0},
    }  # fmt: skip


def test_a_machine_is_plain_data_and_its_table_is_escaped() -> None:
    found = dataclasses.replace(machine(bf16="use"), name="<b>CPU</b>", note="<script>")
    assert json.loads(json.dumps(found.as_dict()))["formats"]["bf16"]["verdict"] == "use"
    page = found._repr_html_()
    assert "<b>CPU</b>" not in page and "<script>" not in page and page.count("<tr>") == 4
