"""A heat map of layers over exponents, with the window of each number format, as inline SVG.

Enters: a histogram of exponents for each layer. Leaves: SVG markup, every text escaped; colours come from the
page. Where: after the run, called by ``inspected.py``; no torch.

A row is a layer, a column an octave [2**e, 2**(e + 1)): darker where more of its numbers lie.
A format's window reaches from where it rounds to zero to where it overflows; thin where it has subnormals.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ..formats import Format
from .words import FORMAT_LABELS, share, superscript

WIDTH, LEFT, RIGHT = 1064, 216, 12
ROW, WINDOW, TOP, FOOT = 17, 19, 8, 42
LEVELS = (0.0001, 0.001, 0.01, 0.03, 0.1, 0.3)
"""From this share of a layer's numbers on, an octave is drawn one step darker."""
LABEL_LIMIT = 29
"""Letters of a layer's name that fit beside its row; the last ones tell layers apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer."""

    label: str
    counts: Mapping[int, int]
    """Exponent -> numbers."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Exponents across the page."""

    low: int
    high: int
    """The last octave that is shown."""

    @property
    def octave(self) -> float:
        """Width of one."""
        return (WIDTH - RIGHT - LEFT) / (self.high + 1 - self.low)

    def __call__(self, exponent: float) -> float:
        """Where 2**exponent lies, held inside the plot."""
        return LEFT + (min(max(exponent, self.low), self.high + 1) - self.low) * self.octave


def scale_of(rows: Sequence[Row]) -> Scale | None:
    """The octaves that some row has at least the least share in, with a little room; None where none has."""
    seen = [e for row in rows for e, part in _shares(row) if part >= LEVELS[0]]
    return Scale(min(seen) - 2, max(seen) + 2) if seen else None


def heatmap(rows: Sequence[Row], formats: Sequence[Format], scale: Scale, *, title: str, about: str) -> str:
    """Rows in the order given, the windows of the formats above them."""
    first = TOP + WINDOW * len(formats) + 8
    end = first + ROW * len(rows)
    body = [_axis(scale, first, end)]
    body += [_row(row, first + i * ROW, scale) for i, row in enumerate(rows)]
    body += [_window(fmt, TOP + i * WINDOW, end, scale) for i, fmt in enumerate(formats)]
    name = escape(title.replace(" ", "-"))
    return (
        f'<svg class="heat" viewBox="0 0 {WIDTH} {end + FOOT}" role="img" '
        f'aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{escape(title)}</title><desc id="{name}-d">{escape(about)}</desc>'
        f"{''.join(body)}</svg>"
    )


def _shares(row: Row) -> Iterator[tuple[int, float]]:
    total = sum(row.counts.values())
    return ((e, n / total) for e, n in sorted(row.counts.items()) if n)


def _row(row: Row, top: float, scale: Scale) -> str:
    label = row.label if len(row.label) <= LABEL_LIMIT else f"…{row.label[1 - LABEL_LIMIT :]}"
    middle = top + ROW / 2
    paths: dict[int, list[str]] = {}
    for exponent, part in _shares(row):
        level = sum(part >= least for least in LEVELS)
        if level and scale.low <= exponent <= scale.high:
            paths.setdefault(level, []).append(f"M{scale(exponent):.1f} {middle:g}h{scale.octave:.2f}")
    cells = "".join(f'<path class="h{level}" d="{"".join(d)}"/>' for level, d in sorted(paths.items()))
    return (
        f'<g><title>{escape(_in_words(row))}</title><rect class="hit" x="0" y="{top:g}" width="{WIDTH}" '
        f'height="{ROW}"/><text class="layer" x="{LEFT - 10}" y="{middle + 4:g}" text-anchor="end">'
        f"{escape(label)}</text>{cells}</g>"
    )


def _in_words(row: Row) -> str:
    found = list(_shares(row))
    if not found:
        return f"{row.label}: all zero"
    below, low, high = 0.0, found[0][0], found[-1][0]
    for exponent, part in found:
        if below < 0.01 <= below + part:
            low = exponent
        if below < 0.99 <= below + part:
            high = exponent
        below += part
    return f"{row.label}: {share(0.98)} from 2{superscript(low)} to 2{superscript(high + 1)}"


def _window(fmt: Format, top: float, end: float, scale: Scale) -> str:
    least = fmt.min_exponent - fmt.mantissa_bits - 1
    borders = (least, fmt.min_exponent, math.log2(fmt.largest))
    a, b, c = map(scale, borders)
    middle = top + WINDOW / 2
    css = f"w-{fmt.name}"
    edges = "".join(
        f"M{x:.1f} {top + 3:g}V{end:g}" for e, x in ((borders[0], a), (borders[2], c)) if _inside(e, scale)
    )
    bars = f'<path class="sub" d="M{a:.1f} {middle:g}H{b:.1f}"/>' if b > a else ""
    bars += f'<path class="full" d="M{b:.1f} {middle:g}H{c:.1f}"/>' if c > b else ""
    span = f"2{superscript(least)} to {fmt.largest:.4g}"
    return (
        f'<g class="window {css}"><title>{FORMAT_LABELS[fmt.name]}: from {span}; all of its bits from '
        f'2{superscript(fmt.min_exponent)} on</title><text class="layer strong" x="{LEFT - 10}" '
        f'y="{middle + 4:g}" text-anchor="end">{FORMAT_LABELS[fmt.name]}</text>{bars}'
        + (f'<path class="edge" d="{edges}"/>' if edges else "")
        + "</g>"
    )


def _inside(exponent: float, scale: Scale) -> bool:
    return scale.low <= exponent <= scale.high + 1


def _axis(scale: Scale, first: float, end: float) -> str:
    step = next(s for s in (2, 4, 8, 16, 32, 64) if (scale.high + 1 - scale.low) / s <= 16)
    parts = []
    for e in range(-(-scale.low // step) * step, scale.high + 2, step):
        x = scale(e)
        parts.append(
            f'<path class="grid" d="M{x:.1f} {first - 4:g}V{end + 4:g}"/>'
            f'<text class="tick" x="{x:.1f}" y="{end + 19:g}" text-anchor="middle">2{superscript(e)}</text>'
        )
    parts.append(
        f'<text class="label" x="{WIDTH - RIGHT}" y="{end + 37:g}" text-anchor="end">magnitude</text>'
    )
    return "".join(parts)
