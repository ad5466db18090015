"""Loss scales replayed on recordings: how often a step is skipped, and what share of the numbers is flushed.

Enters: the folder that ``bench/recordings.py`` wrote. Leaves: a table, or JSON. Where: by hand.

    python bench/prediction.py FOLDER [--json]

A step overflows when its largest gradient times the scale reaches 65520. A number is flushed when it is not
zero and its exponent plus log2(scale) is below -25: half of FP16's smallest number. The flushed share is the
mean over the steps that were taken, and over all steps beside it.

Parameters of the predictor (windows, and the bound as 1 / (c * growth interval)) are those that were best on
the *other* recordings: the least worst of 5 * skips / GradScaler's skips and flushed / GradScaler's flushed
over their four settings. "met": at most a fifth of GradScaler's skips, and flushed no larger.

Two rows are not in the product: the predictor that knows the loss of the step to come ("with the loss"), and
the best constant scale with at most a fifth of GradScaler's skips, known in hindsight.
"""

import argparse
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from equipoise.step.prediction import FP16_OVERFLOW_LOG2, TAILS, ScalePredictor

FLUSHED_BELOW = -25
STARTS, INTERVALS = (16, 32), (2000, 1000)
"""torch's and Megatron-LM's: log2 of the first scale, clean steps before it grows."""
CELLS = tuple(itertools.product(STARTS, INTERVALS))
GRID = tuple(itertools.product((30, 100), (1000, 4000), (2, 4, 8, 16, 32)))
"""(level window, tail window, c)."""
SAMPLED, WITH_LOSS = "histogram", "histogram, with the loss"


class Recording:
    """One file of ``bench/recordings.py``; N steps."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as data:
            self.name = path.stem
            self.amax_log2 = data["amax_log2"].astype(np.float64)  # (N,)
            self.loss_log2 = np.log2(data["loss"].astype(np.float64))
            self.weights_largest = float(np.mean(data["weights_amax_log2"] >= data["amax_log2"]))
            counts, self._lowest = data["counts"].astype(np.int64), int(data["lowest"])
        self._below = np.pad(counts.cumsum(1), ((0, 0), (1, 0)))  # (N, E + 1)

    def flushed(self, exponents: np.ndarray) -> np.ndarray:
        """Share of each step's numbers that its scale 2**exponent flushes; (N,) to (N,)."""
        columns = np.clip(FLUSHED_BELOW - exponents - self._lowest, 0, self._below.shape[1] - 1)
        return self._below[np.arange(len(columns)), columns] / self._below[:, -1]

    def foresight(self) -> tuple[float, float]:
        """What could be known of log2(amax) off its level, the mean of about 100 steps before.

        Returns:
            its correlation with that of the step before, and with log2(loss) off its level.
        """
        x, loss = (v - _level(v) for v in (self.amax_log2, self.loss_log2))
        late = slice(min(2000, len(x) // 2), None)
        x, loss = x[late], loss[late]
        return float(np.corrcoef(x[1:], x[:-1])[0, 1]), float(np.corrcoef(x, loss)[0, 1])


def _level(values: np.ndarray, window: int = 100) -> np.ndarray:
    """Exponential average of the values before each, (N,)."""
    level, levels = float(values[0]), []
    for i, value in enumerate(values.tolist()):
        levels.append(level)
        level += (value - level) / min(i + 1, window)
    return np.array(levels)


class Policy(Protocol):
    """Chooses a scale 2**exponent for each step."""

    exponent: int

    def after(self, amax_log2: float, overflowed: bool) -> None:
        """Take the step that was made with ``exponent``."""


class GradScalerRule:
    """torch's rule with its factors of 2, patience as Megatron-LM has it, and caps."""

    def __init__(
        self, start: int, interval: int, patience: int = 1, caps: tuple[int, int, int] | None = None
    ):
        self.exponent, self.interval, self.patience, self.caps = start, interval, patience, caps
        self.tracker, self.left, self.steps = 0, patience, 0
        self._cap()

    def after(self, amax_log2: float, overflowed: bool) -> None:
        """Back off or grow."""
        self.steps += 1
        if overflowed:
            self.tracker, self.left = 0, max(self.left - 1, 0)
            self.exponent -= self.left == 0
        else:
            self.tracker += 1
            if self.tracker == self.interval:
                self.exponent, self.tracker, self.left = self.exponent + 1, 0, self.patience
        self._cap()

    def _cap(self) -> None:
        if self.caps is not None:
            early, until, late = self.caps
            self.exponent = min(self.exponent, early if self.steps < until else late)


class Predicted:
    """The product's predictor, which sees the amax of every n-th step."""

    def __init__(self, predictor: ScalePredictor, every: int = 1) -> None:
        self.predictor, self.every, self.steps = predictor, every, 0

    @property
    def exponent(self) -> int:
        """log2 of the scale."""
        return math.frexp(self.predictor.scale())[1] - 1

    def after(self, amax_log2: float, overflowed: bool) -> None:
        """Look at the step if it is one of the n-th."""
        looked = self.steps % self.every == 0
        self.steps += 1
        self.predictor.observe((math.inf if overflowed else amax_log2) if looked else None, overflowed)


class PredictorWithLoss(ScalePredictor):
    """The same predictor for residuals of log2(amax) against log2(loss), which is known before backward."""

    WINDOW = 2000
    slope = loss_level = product = told_loss = 0.0
    square, n = 1e-3, 20.0

    @property
    def exponent(self) -> int:
        """log2 of the scale."""
        return self._exponent

    def told(self, loss_log2: float) -> None:
        """The loss of the step to come."""
        self.told_loss = loss_log2
        if self.seen:
            room = self._room() - self.slope * (loss_log2 - self.loss_level)
            self._exponent = math.ceil(room) - 1 - self._drop

    def after(self, amax_log2: float, overflowed: bool) -> None:
        """Take the step."""
        self.observe(math.inf if overflowed else amax_log2, overflowed)

    def _count(self, x: float) -> None:
        off, d = self.told_loss - self.loss_level, x - self._level
        if self.seen:
            self._tail.observe(d - self.slope * off)
            self.n = min(self.n + 1.0, self.WINDOW)
            self.square += (off * off - self.square) / self.n
            self.product += (d * off - self.product) / self.n
            self.slope = self.product / (self.square + 1e-4)
        self.seen += 1
        self._averaged += 1
        weight = 1.0 / min(self._averaged, self.level_window)
        self._level += d * weight
        self.loss_level += off * weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a policy did on a recording."""

    skips: int
    flushed: float
    """Over the steps that were taken."""
    flushed_all: float


def replay(recording: Recording, policy: Policy) -> Result:
    """Run a policy over all steps."""
    n = len(recording.amax_log2)
    exponents, skipped = np.zeros(n, np.int64), np.zeros(n, bool)
    tell = getattr(policy, "told", None)
    steps = zip(recording.amax_log2.tolist(), recording.loss_log2.tolist(), strict=True)
    for i, (amax_log2, loss_log2) in enumerate(steps):
        if tell is not None:
            tell(loss_log2)
        exponents[i] = exponent = policy.exponent
        skipped[i] = overflowed = amax_log2 + exponent >= FP16_OVERFLOW_LOG2
        policy.after(amax_log2, overflowed)
    return result(recording, exponents, skipped)


def result(recording: Recording, exponents: np.ndarray, skipped: np.ndarray) -> Result:
    """Skips and flushed shares of these scales."""
    shares = recording.flushed(exponents)
    taken = shares[~skipped]
    return Result(
        skips=int(skipped.sum()),
        flushed=float(taken.mean()) if len(taken) else math.nan,
        flushed_all=float(shares.mean()),
    )


def grad_scaler(recording: Recording, start: int, interval: int) -> Result:
    """What all others are compared with."""
    found = replay(recording, GradScalerRule(start, interval))
    if not (found.skips and found.flushed):
        raise SystemExit(
            f"{recording.name}, start 2^{start}, interval {interval}: GradScaler skips {found.skips} and"
            f" flushes {found.flushed}: nothing to compare with; record more steps"
        )
    return found


def predicted(
    recording: Recording,
    method: str,
    start: int,
    interval: int,
    parameters: tuple[int, int, int],
    every: int = 1,
) -> Result:
    """A replay of the predictor; ``method`` is a tail or :data:`WITH_LOSS`."""
    level, tail_window, c = parameters
    make = PredictorWithLoss if method == WITH_LOSS else ScalePredictor
    predictor = make(
        1.0 / (c * interval),
        init_scale=2.0**start,
        tail="histogram" if method == WITH_LOSS else method,
        level_window=level,
        tail_window=tail_window,
    )
    if isinstance(predictor, PredictorWithLoss):
        return replay(recording, predictor)
    return replay(recording, Predicted(predictor, every))


def constant(recording: Recording, reference: Result) -> Result:
    """The constant scale that flushes least among those with at most a fifth of the reference's skips."""
    best = None
    for exponent in range(0, 32):
        skipped = recording.amax_log2 + exponent >= FP16_OVERFLOW_LOG2
        if skipped.sum() <= reference.skips / 5:
            best = result(recording, np.full(len(skipped), exponent), skipped)
    if best is None:
        raise SystemExit(f"no constant scale from 1 on skips seldom enough in {recording.name}")
    return best


def worst(found: Result, reference: Result) -> float:
    """At most 1 where both demands are met."""
    return max(5 * found.skips / reference.skips, found.flushed / reference.flushed)


def table(recordings: list[Recording], report: Callable[[str], None]) -> list[dict[str, object]]:
    """Every recording x start x interval x method."""
    references = {(r.name, *cell): grad_scaler(r, *cell) for r in recordings for cell in CELLS}
    rows: list[dict[str, object]] = []

    def add(
        r: Recording, cell: tuple[int, int], method: str, found: Result, parameters: object = None
    ) -> None:
        reference = references[r.name, *cell]
        rows.append({
            "recording": r.name,
            "steps": len(r.amax_log2),
            "log2_start": cell[0],
            "growth_interval": cell[1],
            "method": method,
            "skips": found.skips,
            "flushed": found.flushed,
            "flushed_all": found.flushed_all,
            "skips_ratio": found.skips / reference.skips,
            "flushed_ratio": found.flushed / reference.flushed,
            "met": 5 * found.skips <= reference.skips and found.flushed <= reference.flushed,
            "parameters": parameters,
        })  # fmt: skip

    for r, cell in itertools.product(recordings, CELLS):
        add(r, cell, "GradScaler", references[r.name, *cell])
        add(r, cell, "caps 2^18, then 2^15", replay(r, GradScalerRule(*cell, caps=(18, 5000, 15))))
        add(r, cell, "hysteresis 2", replay(r, GradScalerRule(*cell, patience=2)))
        add(r, cell, "constant, in hindsight", constant(r, references[r.name, *cell]))
    for method in (*TAILS, WITH_LOSS):
        scores: dict[tuple[str, tuple[int, int, int]], float] = {}
        kept = {}
        for r, parameters in itertools.product(recordings, GRID):
            found = {cell: predicted(r, method, *cell, parameters) for cell in CELLS}
            kept[r.name, parameters] = found
            scores[r.name, parameters] = max(worst(f, references[r.name, *c]) for c, f in found.items())
        report(f"{method}: {len(GRID)} settings replayed on {len(recordings)} recordings")
        for r in recordings:
            others = [o.name for o in recordings if o is not r] or [r.name]
            best = min(GRID, key=lambda p: max(scores[o, p] for o in others))
            for cell in CELLS:
                add(r, cell, method, kept[r.name, best][cell], best)
                if method == SAMPLED:
                    for every in (10, 50):
                        found_seldom = predicted(r, method, *cell, best, every)
                        add(r, cell, f"{method}, every {every}th step seen", found_seldom, best)
        overall = min(GRID, key=lambda p: max(scores[o.name, p] for o in recordings))
        report(f"{method}: best on all recordings together: level window, tail window, c = {overall}")
    order = {r.name: i for i, r in enumerate(recordings)}
    return sorted(
        rows, key=lambda w: (order[str(w["recording"])], w["log2_start"], -int(str(w["growth_interval"])))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="one object on stdout instead of a table")
    args = parser.parse_args()
    recordings = [Recording(path) for path in sorted(args.folder.glob("*.npz"))]
    if not recordings:
        raise SystemExit(f"no recording in {args.folder}; run bench/recordings.py {args.folder} first")
    notes: list[str] = []
    rows = table(recordings, notes.append)
    if args.json:
        about = {
            r.name: {"largest_is_a_weight": r.weights_largest, "correlations": r.foresight()}
            for r in recordings
        }
        print(json.dumps({"rows": rows, "notes": notes, "recordings": about}, indent=1))
        return
    print("recording  start interval method                         skips      flushed  of all steps"
          "  skips:GS  flushed:GS  met  (level, tail, c)")  # fmt: skip
    for w in rows:
        print(
            f"{w['recording']:10s} 2^{w['log2_start']:<4d} {w['growth_interval']:5d} {w['method']:29s}"
            f" {w['skips']:6d} {w['flushed']:12.4e} {w['flushed_all']:12.4e} {w['skips_ratio']:9.2f}"
            f" {w['flushed_ratio']:11.3f}  {'yes' if w['met'] else 'no ':3s}  {w['parameters'] or ''}"
        )
    for r in recordings:
        before, loss = r.foresight()
        print(
            f"{r.name}: the largest gradient is a weight's in {r.weights_largest:.2%} of the steps; off its"
            f" level it correlates {before:.2f} with that of the step before, {loss:.2f} with the loss"
        )
    print("\n".join(notes))


if __name__ == "__main__":
    main()
