"""The loss scale predicted: the largest power of two that overflows less often than a stated bound.

Enters: for each step whether it overflowed, and on some steps log2 of the largest magnitude among the
unscaled gradients ("amax"). Leaves: the scale of the next step. Where: inside ``LossScaler.update``.

A step overflows when amax * scale reaches 65520, the smallest number that rounds to infinity in FP16. Let
x = log2(amax). Its *level* m follows the drift of training by a short exponential average; its *residuals*
r = x - m, each against the level before it, are what the prediction got wrong, drift included. Of them a
long exponential window keeps the tail, and the scale is the largest power of two with

    m + q(bound) + margin + log2(scale) < log2(65520),        P(r > q(p)) = p

where ``bound`` is rarer than what the window has seen, so that q extrapolates; in one of three ways:

- ``"log-normal"``: mean and deviation of r.
- ``"gumbel"``: maxima of blocks of 32 residuals follow a Gumbel law, fitted by moments.
- ``"histogram"``: counts of r in eighths of an octave; above the bin that 2 % exceed, their mean excess is
  the slope of a tail that is exponential in log2, so a power law in amax.

An overflow says only that x was at least log2(65520) - log2(scale). Where that step was to be looked at, it
enters as this bound, one among many residuals, so that a single spike moves the scale little. Further
overflows before an amax is seen are a level that rose: they take off 1, 2, 4, ... octaves until one is seen,
and the level starts anew from that.

No law of tails holds for every training (an LSTM overflowed five times as often as its Gumbel tail said). So
the margin, in octaves, corrects the law by what happens: it rises by a quarter with each overflow and falls
by a quarter in 1/bound steps without one, so that over a long time overflows are as many as stated.

A step costs a few float operations, whatever the windows.

Source: Fisher and Tippett, 1928, and Gumbel, 1958 (maxima); Hill, 1975, and Pickands, 1975 (excesses); Gibbs
and Candes, 2021, "Adaptive conformal inference under distribution shift" (the margin).
Figures of the three on recordings: docs/loss-scale.md.
"""

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

from ..errors import SessionError, did_you_mean

FP16_OVERFLOW_LOG2 = math.log2(65520.0)
"""Half-way between the largest FP16 number, 65504, and the next power of two: rounds to infinity."""

_BLIND_DROP = 16
"""Octaves down after an overflow before any amax was seen: a finite step tells where to be, and one step at a
scale that is too low costs less than a skip."""

_PRIOR, _PRIOR_N = 1.0, 8.0
"""Deviation in octaves before anything is known, and how many residuals that is worth."""

_GAIN = 0.25
"""Octaves that an overflow adds to the margin: four in 1/bound steps halve the scale."""
_LEAST_MARGIN = -2.0
"""Octaves that a law which is too cautious is overruled by, at most."""

_EULER = 0.5772156649015329
_BLOCK, _FEWEST_BLOCKS = 32, 4
_BIN, _BINS, _LOWEST = 0.125, 256, -16.0  # residuals from -16 to 16 octaves
_SHARE = 0.02  # the histogram's tail begins where at most this share lies above
_REFIT = 32  # residuals between two looks at the histogram


class LogNormalTail:
    """Mean and deviation of residuals in an exponential window.

    Args:
        window: residuals that count.
    """

    def __init__(self, window: float) -> None:
        self.window, self.n = window, _PRIOR_N
        self.mean, self.square = 0.0, _PRIOR**2

    def observe(self, r: float) -> None:
        """Count a residual, in octaves."""
        self.n = min(self.n + 1.0, self.window)
        self.mean += (r - self.mean) / self.n
        self.square += (r * r - self.square) / self.n

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p."""
        return self.mean - NormalDist().inv_cdf(p) * math.sqrt(max(self.square - self.mean**2, 0.0))


class GumbelTail(LogNormalTail):
    """Maxima of blocks of residuals; the log-normal tail until four blocks are full."""

    def __init__(self, window: float) -> None:
        super().__init__(window)
        self.blocks, self.in_block, self.largest = 0.0, 0, -math.inf
        self.max_mean = self.max_square = 0.0

    def observe(self, r: float) -> None:
        """Count a residual, in octaves."""
        super().observe(r)
        self.in_block, self.largest = self.in_block + 1, max(self.largest, r)
        if self.in_block == _BLOCK:
            self.blocks = min(self.blocks + 1.0, max(self.window / _BLOCK, 2.0 * _FEWEST_BLOCKS))
            self.max_mean += (self.largest - self.max_mean) / self.blocks
            self.max_square += (self.largest**2 - self.max_square) / self.blocks
            self.in_block, self.largest = 0, -math.inf

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p."""
        if self.blocks < _FEWEST_BLOCKS:
            return super().quantile(p)
        deviation = math.sqrt(max(self.max_square - self.max_mean**2, 0.0))
        # Mean and deviation of a Gumbel law are mu + 0.577 beta and pi / sqrt(6) beta.
        beta = deviation * math.sqrt(6.0) / math.pi
        return self.max_mean - beta * (_EULER + math.log(-_BLOCK * math.log1p(-p)))


class HistogramTail(LogNormalTail):
    """Counts with an exponential tail, looked at every 32 residuals; until then the log-normal tail."""

    def __init__(self, window: float) -> None:
        super().__init__(window)
        self.counts, self.unit, self.until_refit = [0.0] * _BINS, 1.0, 2 * _REFIT
        self.start, self.above, self.excess = 0.0, 0.0, 0.0

    def observe(self, r: float) -> None:
        """Count a residual, in octaves; old counts don't shrink, the unit of new ones grows instead."""
        super().observe(r)
        self.counts[min(max(int((r - _LOWEST) / _BIN), 0), _BINS - 1)] += self.unit
        self.unit /= 1.0 - 1.0 / self.window
        self.until_refit -= 1
        if self.until_refit <= 0:
            self._refit()

    def _refit(self) -> None:
        self.counts = [c / self.unit for c in self.counts]
        self.unit, self.until_refit = 1.0, _REFIT
        total = sum(self.counts)
        at, above, moment = _BINS, 0.0, 0.0
        while at > 0 and (above == 0.0 or above + self.counts[at - 1] <= _SHARE * total):
            at -= 1
            above += self.counts[at]
            moment += self.counts[at] * (at + 0.5)
        self.start, self.above = _LOWEST + at * _BIN, above / total
        self.excess = (moment / above - at) * _BIN

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p, where p is below the tail's share."""
        if self.above == 0.0:
            return super().quantile(p)
        return self.start + self.excess * math.log(self.above / p)


TAILS = {"log-normal": LogNormalTail, "gumbel": GumbelTail, "histogram": HistogramTail}


class ScalePredictor:
    """The next scale from the magnitudes of the steps before.

    Args:
        bound: probability of an overflow in one step, at most; from 0 to 0.02, both excluded.
        init_scale: the scale until an amax is seen, taken down to a power of two.
        tail: how the tail is extrapolated, a name of :data:`TAILS`.
        level_window: amaxes over which the level is averaged.
        tail_window: amaxes over which the tail is kept.

    Raises:
        SessionError: a setting that can't be.
    """

    def __init__(
        self,
        bound: float,
        *,
        init_scale: float = 2.0**16,
        tail: str = "histogram",
        level_window: float = 100.0,
        tail_window: float = 4000.0,
    ) -> None:
        if isinstance(bound, bool) or not 0.0 < bound < _SHARE:
            raise SessionError(
                f"the bound of the predicted scale is {bound!r}; allowed is a probability a step above 0 and "
                f"below {_SHARE}, such as 1/8000"
            )
        if tail not in TAILS:
            raise SessionError(f"no tail {tail!r}; allowed: {', '.join(TAILS)}{did_you_mean(tail, TAILS)}")
        if not (level_window >= 1.0 and tail_window >= 2.0):
            raise SessionError(
                f"level_window={level_window!r} and tail_window={tail_window!r} were given; allowed are at "
                "least 1 and 2"
            )
        self.bound, self.tail, self.level_window = float(bound), tail, float(level_window)
        self._tail = TAILS[tail](float(tail_window))
        self.seen = 0
        """Amaxes that counted."""
        self._level = self._margin = 0.0  # octaves
        self._averaged = 0  # amaxes in the level
        self._exponent = math.frexp(init_scale)[1] - 1
        self._blind = 0  # overflows since an amax was seen
        self._drop = 0  # octaves that they took off

    def scale(self) -> float:
        """The scale of the next step: a power of two."""
        return 2.0**self._exponent

    def observe(self, amax_log2: float | None, overflowed: bool, scale_log2: float | None = None) -> None:
        """Take one step.

        Args:
            amax_log2: log2 of the largest unscaled gradient, infinite or NaN where that overflowed; None
                where it was not looked at.
            overflowed: whether some gradient was not finite.
            scale_log2: log2 of the scale that the step had, where that was not :meth:`scale`.
        """
        used = float(self._exponent) if scale_log2 is None else scale_log2
        if overflowed:
            if self.seen:
                if self._blind:  # the first may be a spike
                    self._drop += 2 ** min(self._blind - 1, 6)
                if amax_log2 is not None:
                    self._count(FP16_OVERFLOW_LOG2 - used)
            else:
                self._exponent = math.floor(used) - _BLIND_DROP
            self._blind += 1
        elif amax_log2 is not None and math.isfinite(amax_log2):
            if self._blind > 1:
                self._level, self._averaged = amax_log2, 0
            self._blind = self._drop = 0
            self._count(amax_log2)
        if self.seen:
            self._margin = max(self._margin + _GAIN * (overflowed - self.bound), _LEAST_MARGIN)
            self._exponent = math.ceil(self._room()) - 1 - self._drop

    def _room(self) -> float:
        """log2 of the scale that is just too large."""
        return FP16_OVERFLOW_LOG2 - self._level - self._tail.quantile(self.bound) - self._margin

    def _count(self, x: float) -> None:
        if self.seen:
            self._tail.observe(x - self._level)
        self.seen += 1
        self._averaged += 1
        self._level += (x - self._level) / min(self._averaged, self.level_window)

    def state_dict(self) -> dict[str, Any]:
        """Settings and all that was learned: numbers, text and lists."""
        tail = {k: list(v) if isinstance(v, list) else v for k, v in vars(self._tail).items()}
        return {**{k: v for k, v in vars(self).items() if k != "_tail"}, "_tail": tail}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, with its settings.

        Raises:
            SessionError: this is no state of a predictor.
        """
        tail = TAILS.get(state.get("tail", ""))
        if tail is None or set(state) != {*vars(self)} or set(state["_tail"]) != {*vars(tail(2.0))}:
            raise SessionError("this is no state of a scale predictor; pass what its state_dict() gave")
        fresh = tail(2.0)
        vars(fresh).update({k: list(v) if isinstance(v, list) else v for k, v in state["_tail"].items()})
        vars(self).update({**state, "_tail": fresh})
