"""Curves of many steps and seeds, brought to what a chart can show.

Enters: rows ``{step, time_s, loss}`` of each seed. Leaves: at most ``POINTS`` points ``[step, time_s,
value]`` for each seed and for their mean, and the count of values that were not finite. Where: after the
run, called by ``figures.py``.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .words import finite

POINTS = 160
"""More can't be told apart on a chart 480 units wide, and would weigh the page down."""

Row = list[float | None]
"""[step, time_s, value]; a value that was not finite is None."""


def curve(seeds: Mapping[str, Sequence[Mapping[str, Any]]], value: str) -> dict[str, Any] | None:
    """One arm's curve: the mean of its seeds at the steps that all have, and each seed; None without a row.

    Args:
        seeds: seed -> rows in order of steps.
        value: key of the value in a row.

    Seeds that share fewer than two steps (a time limit cut one) have no mean, and neither has a step where
    one seed is not finite: leaving that seed out would flatter the rest.
    """
    read = {seed: _rows(rows, value) for seed, rows in seeds.items()}
    read = {seed: rows for seed, rows in read.items() if rows}
    if not read:
        return None
    non_finite = sum(row[2] is None for rows in read.values() for row in rows)
    mean = _mean(list(read.values()))
    if len(mean) < 2 <= max(len(rows) for rows in read.values()):
        mean = []
    size = -(-max(len(rows) for rows in [mean, *read.values()]) // POINTS)
    return {
        "mean": _binned(mean, size),
        "seeds": {seed: _binned(rows, size) for seed, rows in read.items()} if len(read) > 1 else {},
        "steps_a_point": size,
        "non_finite": non_finite,
    }


def _rows(rows: Sequence[Mapping[str, Any]], value: str) -> list[Row]:
    found = []
    for row in rows:
        step = finite(row.get("step"))
        if step is not None and value in row:
            found.append([step, finite(row.get("time_s")), finite(row[value])])
    return found


def _mean(seeds: list[list[Row]]) -> list[Row]:
    by_step = [{row[0]: row for row in rows} for rows in seeds]
    common = [row[0] for row in seeds[0] if all(row[0] in seed for seed in by_step)]
    return [
        [step, *(_mean_or_none([seed[step][column] for seed in by_step]) for column in (1, 2))]
        for step in common
    ]


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    read = [v for v in values if v is not None]
    return statistics.fmean(read) if read and len(read) == len(values) else None


def _binned(rows: list[Row], size: int) -> list[Row]:
    """Means of ``size`` rows each; a bin is a gap only when none of its values is finite."""
    if size <= 1:
        return rows
    binned: list[Row] = []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        values = [row[2] for row in chunk if row[2] is not None]
        binned.append([chunk[-1][0], chunk[-1][1], statistics.fmean(values) if values else None])
    return binned
