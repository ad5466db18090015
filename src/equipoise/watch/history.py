"""The last steps, and one row of every sampled step in ``steps.jsonl``.

Enters: a ``StepReport`` after each step, still unread. Leaves: the last reports, the count of skips in a
row, rows on disk. Where: at the end of a step, before anything decides. Source: the lazy ``StepReport`` of
``records.py``.

``append`` reads nothing from a device. Where a step's flag lies on an accelerator it waits in line, and the
line is read at once: on a sampled step, or when someone calls ``settle``.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..errors import RunError
from ..records import StepReport, finite_only

CAPACITY = 16
"""Reports kept; each holds at most four numbers on its device. Few, so that a tiny step's memory stays in
cache."""


class RowFile(Protocol):
    """What a JSONL file must be able to do: ``watch.files.Rows``."""

    def add(self, row: Mapping[str, Any]) -> None:
        """Take a row, unwritten."""

    def sync(self) -> int:
        """Put all rows on the disk; the file's length in bytes."""


class History:
    """A bounded ring of step reports, and their rows on sampled steps.

    Args:
        rows: where rows of sampled steps go; None keeps no file.
        sample_every: steps from one row to the next.
        capacity: reports kept in memory.
    """

    __slots__ = ("_pending", "_ring", "_rows", "_sample_every", "skips_in_a_row")

    def __init__(
        self, rows: RowFile | None = None, *, sample_every: int = 50, capacity: int = CAPACITY
    ) -> None:
        if sample_every < 1 or capacity < 1:
            raise RunError(
                f"a history got sample_every={sample_every} and capacity={capacity}; both must be at least 1"
            )
        self._rows = rows
        self._sample_every = sample_every
        self._ring: deque[StepReport] = deque(maxlen=capacity)
        self._pending: list[Any] = []
        self.skips_in_a_row = 0
        """Skipped steps since the last one that was taken, as far as flags were read."""

    def append(self, report: StepReport) -> None:
        """Take the report of the step just done; reads from a device on sampled steps only."""
        self._ring.append(report)
        skipped = report._skipped
        if skipped is False and not self._pending:
            self.skips_in_a_row = 0
        elif skipped is True and not self._pending:
            self.skips_in_a_row += 1
        else:
            self._pending.append(skipped)
        if report.step % self._sample_every == 0:
            self._sample(report)

    def settle(self) -> int:
        """Read the flags that still lie on a device, all at once; the skips in a row up to now."""
        if self._pending:
            for skipped in _read_all(self._pending):
                self.skips_in_a_row = self.skips_in_a_row + 1 if skipped else 0
            self._pending.clear()
        return self.skips_in_a_row

    def _sample(self, report: StepReport) -> None:
        self.settle()
        if self._rows is not None:
            self._rows.add(finite_only(report.as_dict()))

    def flush(self) -> int:
        """Put the rows on the disk; the length of ``steps.jsonl`` in bytes, 0 without a file.

        A checkpoint keeps that length, and resume cuts the file back to it (``Rows(..., keep=length)``).
        """
        return 0 if self._rows is None else self._rows.sync()

    def __len__(self) -> int:
        return len(self._ring)

    def __iter__(self) -> Iterator[StepReport]:
        """Reports from the oldest kept to the newest."""
        return iter(self._ring)

    @property
    def last(self) -> StepReport | None:
        """The newest report; None before the first step."""
        return self._ring[-1] if self._ring else None

    def state_dict(self) -> dict[str, Any]:
        """What decisions rest on; the reports themselves are not kept. Reads from the device."""
        return {"skips_in_a_row": self.settle()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a saved state: the ring is empty, the count as it was."""
        if "skips_in_a_row" not in state_dict:
            raise RunError(
                f"this history state has {sorted(state_dict)}; it must have 'skips_in_a_row'. Pass what"
                " History.state_dict() gave"
            )
        self._ring.clear()
        self._pending.clear()
        self.skips_in_a_row = int(state_dict["skips_in_a_row"])


def _read_all(flags: list[Any]) -> list[bool]:
    """Flags as booleans; those on a device with one read for all of them."""
    tensors = [flag for flag in flags if not isinstance(flag, bool)]
    if len(tensors) > 1:
        import torch

        device = tensors[0].device
        values = iter(
            torch.stack([t.to(device=device, dtype=torch.float32).reshape(()) for t in tensors]).tolist()
        )
        return [flag if isinstance(flag, bool) else bool(next(values)) for flag in flags]
    return [bool(flag) for flag in flags]
