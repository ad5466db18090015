"""The loss scale predicted: the largest power of two that overflows less often than a stated bound.

Enters: at each step whether it overflowed, and on some steps log2 of the largest magnitude among the unscaled
gradients ("amax"). Leaves: the scale of the next step. Where: inside ``LossScaler.update``. Source: below.

A step overflows when amax * scale reaches 65520, the smallest number that rounds to infinity in FP16. Let
x = log2(amax). Its *level* m follows the drift of training by a short exponential average; its *residuals*
r = x - m, each against the level before it, are what the prediction got wrong, drift included. Of them a
long exponential window keeps the tail, and the scale is the largest power of two with

    m + q(bound) + log2(scale) < log2(65520),        P(r > q(p)) = p

where ``bound`` is rarer than anything the window has seen, so that q extrapolates; in one of three ways:

- ``"log-normal"``: mean and deviation of r.
- ``"gumbel"``: maxima of blocks of 32 residuals follow a Gumbel law, fitted by moments (Fisher and Tippett,
  1928; Gumbel, 1958).
- ``"histogram"``: counts of r in eighths of an octave; beyond the bin where a fixed share lies above, their
  mean excess gives the slope of an exponential tail in log2, so of a power law in amax (Pickands, 1975; Hill,
  1975).

An overflow says only that x was at least log2(65520) - log2(scale): it enters as that bound, one among many
residuals, so that a single spike moves the scale little. Overflows in a row are a level that has risen
unseen: each takes off twice as much, until an amax is seen. One step costs a fixed number of float operations.
"""

import math
from statistics import NormalDist

FP16_OVERFLOW_LOG2 = math.log2(65520.0)
"""Half-way between the largest FP16 number, 65504, and the next power of two: rounds to infinity."""

_BLIND_DROP = 16
"""Octaves down after an overflow before any amax was seen: a finite step tells where to be, and one step at a
scale that is too low costs less than a skip."""

_EULER = 0.5772156649015329
_BLOCK = 32
_BIN, _BINS, _LOWEST = 0.125, 256, -16.0  # residuals from -16 to 16 octaves


class LogNormalTail:
    """Mean and deviation of residuals in an exponential window.

    Args:
        window: residuals that count.
        prior: deviation in octaves before anything is known, worth ``prior_n`` residuals.
    """

    def __init__(self, window: float, prior: float = 1.0, prior_n: float = 8.0) -> None:
        self.window, self.n = window, prior_n
        self.mean, self.square = 0.0, prior**2

    def observe(self, r: float) -> None:
        """Count a residual."""
        self.n = min(self.n + 1.0, self.window)
        self.mean += (r - self.mean) / self.n
        self.square += (r * r - self.square) / self.n

    def deviation(self) -> float:
        """Octaves."""
        return math.sqrt(max(self.square - self.mean**2, 0.0))

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p."""
        return self.mean - NormalDist().inv_cdf(p) * self.deviation()


class GumbelTail(LogNormalTail):
    """Maxima of blocks of residuals, Gumbel by moments; the log-normal tail until four blocks are full."""

    def __init__(self, window: float, prior: float = 1.0, prior_n: float = 8.0) -> None:
        super().__init__(window, prior, prior_n)
        self.blocks, self.in_block, self.largest = 0.0, 0, -math.inf
        self.max_mean = self.max_square = 0.0

    def observe(self, r: float) -> None:
        """Count a residual."""
        super().observe(r)
        self.in_block, self.largest = self.in_block + 1, max(self.largest, r)
        if self.in_block == _BLOCK:
            self.blocks = min(self.blocks + 1.0, max(self.window / _BLOCK, 8.0))
            self.max_mean += (self.largest - self.max_mean) / self.blocks
            self.max_square += (self.largest**2 - self.max_square) / self.blocks
            self.in_block, self.largest = 0, -math.inf

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p."""
        if self.blocks < 4:
            return super().quantile(p)
        sd = math.sqrt(max(self.max_square - self.max_mean**2, 0.0))
        beta = sd * math.sqrt(6.0) / math.pi
        return self.max_mean - beta * (_EULER + math.log(-_BLOCK * math.log1p(-p)))


class HistogramTail(LogNormalTail):
    """Counts in eighths of an octave with an exponential tail; log-normal until 50 residuals are in."""

    share = 0.02
    """The tail begins where at most this share lies above."""

    def __init__(self, window: float, prior: float = 1.0, prior_n: float = 8.0) -> None:
        super().__init__(window, prior, prior_n)
        self.counts, self.total, self.unit = [0.0] * _BINS, 0.0, 1.0

    def observe(self, r: float) -> None:
        """Count a residual; instead of all old counts shrinking, the unit of new ones grows."""
        super().observe(r)
        at = min(max(int((r - _LOWEST) / _BIN), 0), _BINS - 1)
        self.counts[at] += self.unit
        self.total += self.unit
        self.unit /= 1.0 - 1.0 / self.window
        if self.unit > 1e100:
            self.counts = [c / self.unit for c in self.counts]
            self.total, self.unit = self.total / self.unit, 1.0

    def quantile(self, p: float) -> float:
        """The residual that is exceeded with probability p."""
        if self.total < 50.0 * self.unit:
            return super().quantile(p)
        above = moment = 0.0
        at = _BINS
        while at > 0 and above + self.counts[at - 1] <= self.share * self.total:
            at -= 1
            above += self.counts[at]
            moment += self.counts[at] * at
        if above == 0.0:
            at -= 1
            above, moment = self.counts[at], self.counts[at] * at
        excess = (moment / above - at + 0.5) * _BIN
        return _LOWEST + at * _BIN + excess * math.log(above / self.total / p)


TAILS = {"log-normal": LogNormalTail, "gumbel": GumbelTail, "histogram": HistogramTail}


class ScalePredictor:
    """The next scale from the magnitudes of the steps before.

    Args:
        bound: probability of an overflow in one step, at most.
        tail: how the tail is extrapolated, a name of :data:`TAILS`.
        init_scale: the scale until an amax was seen; a power of two.
        level_window: steps over which the level is averaged.
        tail_window: steps over which the tail is kept.

    Raises:
        SessionError: a setting that can't be.
    """

    def __init__(
        self,
        bound: float,
        *,
        tail: str = "log-normal",
        init_scale: float = 2.0**16,
        level_window: float = 100.0,
        tail_window: float = 2000.0,
    ) -> None:
        self.bound = bound
        self.tail_name = tail
        self.level_window = level_window
        self._tail = TAILS[tail](tail_window)
        self._level = 0.0
        self._seen = 0
        self._exponent = math.frexp(init_scale)[1] - 1
        self._in_a_row = 0
        self._drop = 0

    def scale(self) -> float:
        """The scale of the next step: a power of two."""
        return 2.0**self._exponent

    def observe(self, amax_log2: float | None, overflowed: bool) -> None:
        """Take a step that was made with :meth:`scale`.

        Args:
            amax_log2: log2 of the largest unscaled gradient; None where it wasn't looked at.
            overflowed: whether some gradient was not finite.
        """
        if overflowed:
            self._overflow()
        elif amax_log2 is not None and amax_log2 > -math.inf:
            self._in_a_row = self._drop = 0
            self._count(amax_log2)
        if self._seen:
            at_most = FP16_OVERFLOW_LOG2 - self._level - self._tail.quantile(self.bound)
            self._exponent = math.ceil(at_most) - 1 - self._drop

    def _count(self, x: float) -> None:
        if self._seen:
            self._tail.observe(x - self._level)
        self._seen += 1
        self._level += (x - self._level) / min(self._seen, self.level_window)

    def _overflow(self) -> None:
        if not self._seen:
            self._exponent -= _BLIND_DROP
            return
        self._drop += 2**self._in_a_row - 1  # the first takes nothing off: it may be a spike
        self._in_a_row += 1
        self._count(FP16_OVERFLOW_LOG2 - self._exponent)
