"""Exponents counted: where the magnitudes of a tensor lie on the scale of powers of two, and what is lost.

Enters: weights, activations, gradients or updates. Leaves: a histogram of their exponents, and from it what
each format would flush to zero, overflow or round away. Where: on sampled steps.

A format with ``m`` mantissa bits and smallest normal exponent ``emin`` has numbers 2**(max(e, emin) - m)
apart in the octave [2**e, 2**(e + 1)). From that follows, octave by octave:

- *underflow*: rounds to zero. Half of the smallest subnormal, 2**(emin - m - 1), rounds to even, which is
  zero, and all above it stays: the border lies *between* two octaves, so that whole octaves are flushed or
  kept. (A number that is this power of two exactly is flushed and predicted as kept: a histogram can't see
  it.)
- *overflow*: rounds past the largest number. This border lies inside an octave; the share beyond it follows
  from the density in the octave, taken as exp(k t) over t = log2(x) - e, with k from the octaves beside it.
- *noise*: spacing**2 / 12 where numbers are kept, subnormal ones too and those in the last half octave, which
  round up to the smallest; x**2 where they are flushed; (x - largest)**2 beyond the largest, as a cast that
  saturates gives it.

Source: IEEE 754 binary32: a sign bit, eight bits of exponent, 23 of fraction. Spacing and formats:
``formats.py``. Noise of rounding: Widrow and Kollar, Quantization Noise, 2008.
"""

import math
from dataclasses import dataclass

import torch

from ..errors import FormatError, did_you_mean
from ..formats import FORMATS, Format
from ..records import Ranges

LOSSY = ("fp16", "bf16", "fp8-e4m3", "fp8-e5m2")
"""Formats whose losses are predicted: all but FP32."""

_MORE_UNDERFLOW = 0.001
"""A suggested scale flushes at most this share more than the best one: a thousandth of the numbers."""
_MORE_NOISE_DB = 0.1
"""And is at most this much noisier; one mantissa bit is worth 6 dB."""

LOWEST = -149
"""Exponent of the smallest FP32 number above zero."""

BINS = 279
"""Zero; exponents from -149 to 127; not finite."""


def bin_of(exponent: int) -> int:
    """The bin of numbers in [2**exponent, 2**(exponent + 1))."""
    return exponent - LOWEST + 1


def exponent_counts(values: torch.Tensor) -> torch.Tensor:
    """How many numbers have each exponent, in one pass.

    Args:
        values: floating or complex, of any shape; complex ones count as two.

    Returns:
        int64 of shape (279,) on the same device: zeros, then floor(log2(abs(x))) from -149 to 127, then
        infinities and NaNs.
    """
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.to(torch.float32).reshape(-1)
    bits = flat.view(torch.int32)
    biased = torch.bincount((bits >> 23).to(torch.uint8), minlength=256)  # the cast drops the sign bit
    counts = biased.new_zeros(BINS)
    counts[bin_of(-126) :] = biased[1:]
    counts[0] = flat.numel() - torch.count_nonzero(flat)
    small = flat[(bits & 0x7F800000) == 0] if int(biased[0]) > int(counts[0]) else flat[:0]
    small = small[small != 0]
    if small.numel():
        # frexp gives a fraction in [0.5, 1): its exponent is one above floor(log2)
        at = torch.frexp(small).exponent.to(torch.int64) - 1 - LOWEST + 1
        counts += torch.bincount(at, minlength=BINS)
    return counts


def ranges_of(counts: torch.Tensor, format_name: str) -> Ranges:
    """What a format would lose of the numbers that a histogram counts, predicted from it alone.

    Args:
        counts: of :func:`exponent_counts`, or a sum of several.
        format_name: a name of :data:`LOSSY`.

    Raises:
        FormatError: the format is none of these.
    """
    if format_name not in LOSSY:
        hint = did_you_mean(str(format_name), LOSSY)
        raise FormatError(f"no ranges for format {format_name!r}; allowed: {', '.join(LOSSY)}{hint}")
    octaves = _Octaves.of(counts)
    if octaves is None:
        return Ranges(format=format_name, values=0, underflow=0.0, overflow=0.0, subnormal=0.0, sqnr_db=None)
    losses = _Losses.at(octaves, FORMATS[format_name], _scales_to_try(octaves, FORMATS[format_name]))
    own = _Losses.at(octaves, FORMATS[format_name], torch.zeros(1, dtype=torch.int64))
    best = losses.smallest_good_scale()
    return Ranges(
        format=format_name,
        values=int(octaves.counts.sum()),
        underflow=float(own.underflow[0]),
        overflow=float(own.overflow[0]),
        subnormal=float(own.subnormal[0]),
        sqnr_db=float(own.sqnr_db[0]),
        scale=2.0 ** int(losses.shifts[best]),
        scaled_underflow=float(losses.underflow[best]),
        scaled_sqnr_db=float(losses.sqnr_db[best]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Octaves:
    """The octaves that hold numbers, and how these lie inside; tensors of shape (E,), float64."""

    exponents: torch.Tensor
    """int64: numbers in [2**e, 2**(e + 1))."""
    counts: torch.Tensor
    slope: torch.Tensor
    """k of the density exp(k t) over t = log2(x) - e in [0, 1); ln 2 where values are spread evenly."""

    @classmethod
    def of(cls, counts: torch.Tensor) -> "_Octaves | None":
        """None where no number is finite and not zero."""
        all_counts = counts.detach().to("cpu", torch.float64)
        inner = all_counts[1:-1]
        # One-sided beside an empty octave: an evenly spread tensor ends at full density.
        empty = torch.nn.functional.pad(inner == 0, (1, 1), value=True)
        logs = torch.nn.functional.pad(torch.log(inner.clamp(min=0.5)), (1, 1))
        below = torch.where(empty[:-2], 0.0, logs[1:-1] - logs[:-2])
        above = torch.where(empty[2:], 0.0, logs[2:] - logs[1:-1])
        sides = (~empty[:-2]).double() + (~empty[2:]).double()
        slope = torch.where(sides == 0, math.log(2.0), (below + above) / sides.clamp(min=1.0))
        held = torch.nonzero(inner).reshape(-1)
        if not held.numel():
            return None
        return cls(exponents=held + LOWEST, counts=inner[held], slope=slope[held])

    def mean_power(self, power: int) -> torch.Tensor:
        """Mean of (x / 2**e)**power over each octave: the integral of exp(k t) 2**(power t)."""
        return _integral(self.slope + power * math.log(2.0)) / _integral(self.slope)

    def share_above(self, at: float) -> torch.Tensor:
        """Share of an octave's numbers above 2**(e + at)."""
        return 1.0 - at * _integral(self.slope * at) / _integral(self.slope)


def _integral(k: torch.Tensor) -> torch.Tensor:
    """Integral of exp(k t) over t in [0, 1]."""
    safe = torch.where(k.abs() < 1e-6, torch.ones_like(k), k)
    return torch.where(k.abs() < 1e-6, 1.0 + k / 2, torch.expm1(safe) / safe)


def _scales_to_try(octaves: _Octaves, fmt: Format) -> torch.Tensor:
    """Exponents of scales: from none (or below, where the largest overflows) up to what has room."""
    room = _top(fmt) - 1 - int(octaves.exponents[-1])
    if room <= 0:
        return torch.tensor([room])
    enough = max(0, fmt.min_exponent - int(octaves.exponents[0]))  # then all numbers are normal
    return torch.arange(0, min(room, enough) + 1)


def _top(fmt: Format) -> int:
    """Exponent of the octave that holds the format's largest number."""
    return math.frexp(fmt.largest)[1] - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Losses:
    """What a format loses at each of S scales 2**shift; tensors of shape (S,)."""

    shifts: torch.Tensor
    underflow: torch.Tensor
    overflow: torch.Tensor
    subnormal: torch.Tensor
    sqnr_db: torch.Tensor

    @classmethod
    def at(cls, octaves: _Octaves, fmt: Format, shifts: torch.Tensor) -> "_Losses":
        """Shapes: octaves (E,), shifts (S,); inside (S, E)."""
        e = octaves.exponents + shifts[:, None]
        counts = octaves.counts.expand(e.shape)
        top, least = _top(fmt), fmt.min_exponent - fmt.mantissa_bits
        step = 2.0 ** (top - fmt.mantissa_bits)
        beyond = (fmt.largest + step / 2) / 2.0**top  # in its octave, in [1, 2): from here on to infinity
        over = torch.where(e == top, octaves.share_above(math.log2(beyond)), (e > top).double())
        flushed = e < least - 1  # half the least rounds to even, zero: the border is a power of two

        # In units of the octave's own 2**e, so that no square leaves float64.
        square, mean = octaves.mean_power(2), octaves.mean_power(1)
        spacing = 2.0 ** (torch.clamp(e, min=fmt.min_exponent) - fmt.mantissa_bits - e).double()
        limit = fmt.largest * 2.0 ** -e.double()
        cut = torch.where(e > top, square - 2 * limit * mean + limit**2, ((2.0 - limit) / 2) ** 2)
        noise = torch.where(flushed, square, (1 - over) * spacing**2 / 12 + over * cut)
        # The largest octave is the unit of the sums.
        weight = counts * 4.0 ** (octaves.exponents - octaves.exponents[-1]).double()
        total = octaves.counts.sum()
        ratio = (weight * square).sum(1) / (weight * noise).sum(1)
        return cls(
            shifts=shifts,
            underflow=(counts * flushed).sum(1) / total,
            overflow=(counts * over).sum(1) / total,
            subnormal=(counts * ((e < fmt.min_exponent) & ~flushed)).sum(1) / total,
            sqnr_db=10 * torch.log10(ratio),
        )

    def smallest_good_scale(self) -> int:
        """Index of the first scale that loses hardly more than the best."""
        few = self.underflow <= self.underflow.min() + _MORE_UNDERFLOW
        clear = self.sqnr_db >= self.sqnr_db[few].max() - _MORE_NOISE_DB
        return int(torch.nonzero(few & clear)[0])
