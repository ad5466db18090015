"""Charts as inline SVG, drawn by hand: a few kilobytes each, text stays text, colours come from the page.

Enters: plain numbers. Leaves: SVG markup, every text escaped. Where: after the run, called by ``report.py``.

Hand-drawn, not by matplotlib: the page's CSS gives colours (light, dark, print) and a larger letter on a
phone; a chart weighs 2-20 kB and needs no import of 1.4 s. Arms differ by colour (Okabe and Ito's palette,
safe for the colour blind), by dash and by marker. A value that isn't finite breaks its line: nothing is
drawn across a gap.
"""

import itertools
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from .words import fixed, number

Point = tuple[float, float | None]

WIDTH, HEIGHT = 480, 290
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 30, 40
_DRAWN_FIRST = {"plan": 0, "autocast": 1, "fp32": 2}
_SIZES = {"plan": 4.4, "autocast": 3.6, "fp32": 2.6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart."""

    arm: str
    """Gives colour, dash and marker: ``fp32``, ``autocast`` or ``plan``."""
    label: str
    points: Sequence[Point]
    """(x, y) in order of x; y None where nothing finite was read."""
    faint: Sequence[Sequence[Point]] = field(default_factory=tuple)
    """Thin lines behind, one for each seed."""
    markers: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    """Pixel of ``low``."""
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            value, low, high = (math.log10(v) for v in (value, self.low, self.high))
        else:
            low, high = self.low, self.high
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about ``wanted`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, wanted)
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    span = math.log10(high / low)
    steps = (1, 2, 5) if span < 1.3 else (1, 3) if span < 2.6 else (1,)
    return [m * 10.0**e for e in decades for m in steps if low <= m * 10.0**e <= high]


def tick_text(value: float, values: Sequence[float]) -> str:
    """A tick's label: as many decimals as the ticks need to differ, thousands as ``20k``."""
    largest = max(abs(v) for v in values)
    if largest >= 10_000:
        scale, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k")
        return f"{value / scale:g}".replace("-", "−") + (suffix if value else "")
    gaps = [abs(b - a) for a, b in itertools.pairwise(values) if a != b]
    smallest = min(gaps) if gaps else abs(value) or 1
    if smallest < 1e-5:
        return number(value, 2)
    decimals = next(d for d in range(8) if abs(round(smallest, d) - smallest) < smallest * 1e-6 or d == 7)
    return fixed(value, decimals)


def _y_range(values: list[float], log: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if log:
        return low / 1.1, high * 1.1
    pad = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return (0.0 if 0 <= low < (high - low) * 0.15 else low - pad), high + pad


def _path(points: Iterable[Point], x: _Axis, y: _Axis) -> str:
    parts, pen_down = [], False
    for px, py in points:
        if py is None:
            pen_down = False
            continue
        parts.append(f"{'L' if pen_down else 'M'}{x(px):.1f} {y(py):.1f}")
        pen_down = True
    return "".join(parts)


def marker(arm: str, x: float, y: float, size: float = 4) -> str:
    """Square for FP32, triangle for autocast, disc for the plan."""
    if arm == "fp32":
        corner = f'x="{x - size:.1f}" y="{y - size:.1f}"'
        return f'<rect class="m m-fp32" {corner} width="{2 * size}" height="{2 * size}"/>'
    if arm == "autocast":
        return (
            f'<path class="m m-autocast" d="M{x:.1f} {y - size * 1.2:.1f}L{x + size * 1.2:.1f} {y + size:.1f}'
            f'L{x - size * 1.2:.1f} {y + size:.1f}Z"/>'
        )
    return f'<circle class="m m-plan" cx="{x:.1f}" cy="{y:.1f}" r="{size * 1.1:.1f}"/>'


def _svg(body: str, *, height: float, title: str, about: str, extra: str = "") -> str:
    name = f"c{zlib.crc32((title + about + body).encode()):08x}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-labelledby="{name}t {name}d"{extra}>'
        f'<title id="{name}t">{escape(title)}</title><desc id="{name}d">{escape(about)}</desc>{body}</svg>'
    )


def _frame(x: _Axis, y: _Axis, x_label: str, y_label: str) -> str:
    """Grid, ticks and the labels of both axes; the vertical axis' label stands level, above the plot."""
    y_ticks = _log_ticks(y.low, y.high) if y.log else ticks(y.low, y.high, 5)
    if y.log and len(y_ticks) < 2:
        y_ticks = [y.low, y.high]
    parts = []
    for value in y_ticks:
        at = y(value)
        text = (
            number(value, 1 if value in _log_ticks(y.low, y.high) else 2)
            if y.log
            else tick_text(value, y_ticks)
        )
        parts.append(
            f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="tick" x="{LEFT - 7}" y="{at + 4:.1f}" text-anchor="end">{text}</text>'
        )
    x_ticks = ticks(x.low, x.high, 5)
    for value in x_ticks:
        parts.append(
            f'<path class="axis" d="M{x(value):.1f} {HEIGHT - BOTTOM}v4"/>'
            f'<text class="tick" x="{x(value):.1f}" '
            f'y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{tick_text(value, x_ticks)}</text>'
        )
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(
        f'<text class="label" x="2" y="13">{escape(y_label)}{" (log scale)" if y.log else ""}</text>'
    )
    parts.append(
        f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 5}" text-anchor="end">{escape(x_label)}</text>'
    )
    return "".join(parts)


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str, title: str, about: str) -> str:
    """Lines of all arms over steps or time; ``""`` where fewer than two points can be drawn.

    Logarithmic upright when positive values span more than a factor of 30.
    """
    drawn = [p for s in series for line in (s.points, *s.faint) for p in line]
    xs = [px for px, py in drawn if py is not None]
    ys = [py for _, py in drawn if py is not None]
    if len(ys) < 2 or max(xs) <= min(xs):
        return ""
    log = min(ys) > 0 and max(ys) / min(ys) > 30
    x = _Axis(min(0.0, *xs), max(xs), LEFT, WIDTH - RIGHT)
    y = _Axis(*_y_range(ys, log), HEIGHT - BOTTOM, TOP, log)
    body = [_frame(x, y, x_label, y_label)]
    # The dashed lines over the solid one: where arms agree, all of them stay visible.
    ordered = sorted(series, key=lambda s: _DRAWN_FIRST.get(s.arm, 0))
    for s in ordered:
        css = "line faint" if s.points else "line"
        body += [f'<path class="{css} s-{s.arm}" d="{_path(line, x, y)}"/>' for line in s.faint]
    for s in ordered:
        body.append(f'<path class="line s-{s.arm}" d="{_path(s.points, x, y)}"/>')
        ends = [(px, py) for px, py in s.points if py is not None]
        shown = ends if s.markers and len(ends) <= 40 else ends[-1:]
        body += [marker(s.arm, x(px), y(py), _SIZES.get(s.arm, 3.4)) for px, py in shown]
        if not s.points:
            lasts = [[p for p in line if p[1] is not None][-1:] for line in s.faint]
            body += [marker(s.arm, x(px), y(py), 3.4) for last in lasts for px, py in last if py is not None]
    body.append(f'<path class="cross" d="M0 {TOP}V{HEIGHT - BOTTOM}" visibility="hidden"/>')
    extra = f' class="lines" data-chart="{escape(_hover_data(series, x, x_label))}"'
    return _svg("".join(body), height=HEIGHT, title=title, about=about, extra=extra)


def _hover_data(series: Sequence[Series], x: _Axis, x_label: str) -> str:
    """What the page's script shows under the pointer: the very values that are drawn."""
    lines = [
        {
            "label": s.label,
            "arm": s.arm,
            "points": [[float(f"{px:.6g}"), float(f"{py:.5g}")] for px, py in s.points if py is not None],
        }
        for s in series
    ]
    domain = [x.low, x.high, LEFT, WIDTH - RIGHT]
    return json.dumps({"x": domain, "label": x_label, "lines": lines}, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One arm's row of a bar chart."""

    arm: str
    label: str
    value_text: str
    value: float
    low: float | None = None
    high: float | None = None
    dots: Sequence[float] = ()
    segments: Sequence[tuple[str, float, str]] = ()
    """(class, size, text inside) of a stacked bar."""


ROW, BAR = 62, 18


def bar_chart(bars: Sequence[Bar], *, x_label: str, title: str, about: str) -> str:
    """Level bars from 0, one row an arm: whiskers for the interval, ticks for readings, or segments."""
    if not bars:
        return ""
    high = max(max([b.value, b.high or 0.0, *b.dots]) for b in bars)
    if high <= 0:
        return ""
    right = WIDTH - 10
    x = _Axis(0.0, high * 1.02, 2, right)
    foot = len(bars) * ROW + 6
    marks = ticks(0.0, high * 1.02, 5)
    body = []
    for value in marks:
        anchor = "start" if value == 0 else "end" if x(value) > right - 14 else "middle"
        body.append(
            f'<path class="grid" d="M{x(value):.1f} 4V{foot}"/><text class="tick" x="{x(value):.1f}" '
            f'y="{foot + 16}" text-anchor="{anchor}">{tick_text(value, marks)}</text>'
        )
    for row, bar in enumerate(bars):
        body.append(_bar_row(bar, row * ROW, x))
    body.append(f'<text class="label" x="{right}" y="{foot + 34}" text-anchor="end">{escape(x_label)}</text>')
    return _svg("".join(body), height=foot + 40, title=title, about=about)


def _bar_row(bar: Bar, top: float, x: _Axis) -> str:
    bar_top = top + 26
    middle = bar_top + BAR / 2
    parts = [
        f'<text class="name" x="2" y="{top + 18}">{escape(bar.label)}<tspan class="value" dx="8">'
        f"{escape(bar.value_text)}</tspan></text>"
    ]
    if bar.segments:
        start = 0.0
        for css, size, text in bar.segments:
            width = x(start + size) - x(start)
            inside = ""
            if width > 9 * len(text) + 6:
                inside = (
                    f'<text class="on {css}" x="{x(start) + width / 2:.1f}" y="{middle + 4.5}" '
                    f'text-anchor="middle">{escape(text)}</text>'
                )
            parts.append(
                f'<rect class="seg {css}" x="{x(start):.2f}" y="{bar_top}" '
                f'width="{max(width, 0.6):.2f}" height="{BAR}"/>{inside}'
            )
            start += size
        return "".join(parts)
    parts.append(
        f'<rect class="bar b-{bar.arm}" x="{x(0):.1f}" y="{bar_top}" '
        f'width="{x(bar.value) - x(0):.1f}" height="{BAR}" rx="2"/>'
    )
    marks = "".join(f"M{x(value):.1f} {bar_top + BAR + 4}v7" for value in bar.dots[:200])
    parts.append(f'<path class="rug" d="{marks}"/>' if marks else "")
    if bar.low is not None and bar.high is not None:
        a, b = x(bar.low), x(bar.high)
        parts.append(
            f'<path class="whisker" d="M{a:.1f} {middle}H{b:.1f}'
            f'M{a:.1f} {middle - 5}v10M{b:.1f} {middle - 5}v10"/>'
        )
    return "".join(parts)


def interval_chart(
    *,
    difference: float,
    low: float | None,
    high: float | None,
    margin: float | None,
    higher_is_better: bool,
    metric: str,
    decimals: int,
    tone: str,
) -> str:
    """The difference of the metric with its interval, on a scale that marks zero and the margin.

    The worse side stands on the left, whatever the metric's direction: the axis turns round where lower is
    better.
    """
    known = low is not None and high is not None
    sizes = [abs(v) for v in (difference, low or 0.0, high or 0.0)] + ([margin * 1.5] if margin else [])
    span = (max(sizes) or 1.0) * 1.15
    left, right = (-span, span) if higher_is_better else (span, -span)
    x = _Axis(left, right, 12, WIDTH - 12)
    top, bottom, middle = 34, 104, 69
    body = []
    if margin:
        edge = x(-margin if higher_is_better else margin)
        body.append(
            f'<rect class="zone-bad" x="12" y="{top}" width="{edge - 12:.1f}" height="{bottom - top}"/>'
            f'<rect class="zone-good" x="{edge:.1f}" y="{top}" '
            f'width="{WIDTH - 12 - edge:.1f}" height="{bottom - top}"/>'
            f'<path class="edge" d="M{edge:.1f} {top - 6}V{bottom}"/>'
            f'<text class="label" x="{edge:.1f}" y="{top - 12}" text-anchor="middle">margin</text>'
        )
    else:
        body.append(
            f'<rect class="zone-none" x="12" y="{top}" width="{WIDTH - 24}" height="{bottom - top}"/>'
        )
    body.append(
        f'<path class="zero" d="M{x(0):.1f} {top - 6}V{bottom}"/>'
        f'<text class="label" x="{x(0):.1f}" y="{top - 12}" text-anchor="middle">same as FP32</text>'
    )
    if low is not None and high is not None:
        a, b = sorted((x(low), x(high)))
        body.append(
            f'<path class="interval t-{tone}" d="M{a:.1f} {middle}H{b:.1f}M{a:.1f} {middle - 9}v18'
            f'M{b:.1f} {middle - 9}v18"/>'
        )
    body.append(f'<circle class="interval-dot t-{tone}" cx="{x(difference):.1f}" cy="{middle}" r="6"/>')
    marks = ticks(-span, span, 4)
    body += [
        f'<text class="tick" x="{min(max(x(v), 24), WIDTH - 24):.1f}" y="{bottom + 17}" text-anchor="middle">'
        f"{'+' if v > 0 else ''}{tick_text(v, marks)}</text>"
        for v in marks
    ]
    body.append(
        f'<text class="label" x="12" y="{bottom + 38}">← plan worse</text>'
        f'<text class="label" x="{WIDTH - 12}" '
        f'y="{bottom + 38}" text-anchor="end">plan better →</text>'
    )
    about = (
        f"{metric}: plan minus FP32 is {fixed(difference, decimals)}, "
        + (f"interval {fixed(low, decimals)} to {fixed(high, decimals)}" if known else "no interval")
        + (f", margin {fixed(margin, decimals)}" if margin else ", no margin")
    )
    return _svg(
        "".join(body), height=bottom + 46, title=f"Difference in {metric}, plan minus FP32", about=about
    )
