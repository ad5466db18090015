"""Numbers and findings in words, the way a person reads them.

Enters: plain numbers in SI units. Leaves: short texts with units. Where: after the run, for the report. A
value that is missing or not finite is "–": it is never replaced by a guess.
"""

import math
from collections.abc import Mapping
from typing import Any

NOTHING = "–"
"""What stands where a value is missing."""

ARM_LABELS = {"fp32": "FP32", "autocast": "Plain autocast", "plan": "Plan"}
FORMAT_LABELS = {
    "fp32": "FP32",
    "bf16": "bf16",
    "fp16": "FP16",
    "tf32": "TF32",
    "fp8-e4m3": "FP8 E4M3",
    "fp8-e5m2": "FP8 E5M2",
}
PART_LABELS = {
    "data_s": "Data",
    "forward_s": "Forward",
    "backward_s": "Backward",
    "optimizer_s": "Optimizer",
    "machinery_s": "Machinery",
}


def finite(value: Any) -> float | None:
    """The value as a finite float, else None (bool and text are not numbers)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def fixed(value: float | None, decimals: int) -> str:
    """``12,345.68``; a true minus sign; no minus zero."""
    if value is None:
        return NOTHING
    text = f"{value:,.{decimals}f}"
    if text.strip("-0.,") == "":
        text = text.lstrip("-")
    return text.replace("-", "−")


def number(value: float | None, digits: int = 3) -> str:
    """``digits`` significant digits with thousands separators; the very large and small as powers of ten."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value: 9.996 is 10.0
    if exponent >= 9 or exponent < -4:
        mantissa = f"{value / 10.0**exponent:.{digits - 1}f}".replace("-", "−")
        return f"{mantissa}·10{superscript(exponent)}"
    return fixed(value, max(0, digits - 1 - exponent))


def superscript(exponent: int) -> str:
    """``⁻¹²``."""
    return str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def signed(value: float | None, decimals: int) -> str:
    """With its sign, so that a difference can't be taken for a value."""
    if value is None:
        return NOTHING
    text = fixed(value, decimals)
    return text if text.startswith("−") or text.strip("0.,") == "" else f"+{text}"


def ratio(value: float | None) -> str:
    """``1.93×``."""
    if value is None:
        return NOTHING
    return f"{fixed(value, 2 if value < 20 else 1) if value >= 0.1 else number(value, 2)}×"


def duration(value_s: float | None) -> str:
    """``4.2 µs``, ``12.3 ms``, ``45.2 s``, ``5 min 40 s``, ``3 h 12 min``."""
    if value_s is None:
        return NOTHING
    size = abs(value_s)
    if size == 0:
        return "0\N{NO-BREAK SPACE}s"
    if size < 0.9995e-3:
        return f"{number(value_s * 1e6)}\N{NO-BREAK SPACE}µs"
    if size < 0.9995:
        return f"{number(value_s * 1e3)}\N{NO-BREAK SPACE}ms"
    if size < 119.95:
        return f"{number(value_s) if size < 10 else fixed(value_s, 1)}\N{NO-BREAK SPACE}s"
    minutes, seconds = divmod(round(value_s), 60)
    if minutes < 120:
        return (
            f"{minutes}\N{NO-BREAK SPACE}min {seconds}\N{NO-BREAK SPACE}s"
            if seconds
            else f"{minutes}\N{NO-BREAK SPACE}min"
        )
    hours, minutes = divmod(round(value_s / 60), 60)
    return (
        f"{hours:,}\N{NO-BREAK SPACE}h {minutes}\N{NO-BREAK SPACE}min"
        if minutes
        else f"{hours:,}\N{NO-BREAK SPACE}h"
    )


def memory(value_bytes: float | None) -> str:
    """Bytes as MiB or GiB (powers of 1,024)."""
    if value_bytes is None:
        return NOTHING
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value_bytes) >= size:
            return f"{number(value_bytes / size)}\N{NO-BREAK SPACE}{unit}"
    return f"{number(value_bytes)}\N{NO-BREAK SPACE}B"


def share(value: float | None) -> str:
    """``12 %``; below ten with one decimal."""
    if value is None:
        return NOTHING
    return f"{fixed(value * 100, 0 if abs(value) >= 0.0995 or value == 0 else 1)}\N{NO-BREAK SPACE}%"


def decimals_for(margin: float | None, *sizes: float | None) -> int:
    """Decimals at which three digits of the margin show, or two of the largest of ``sizes`` without one.

    A difference far below the margin is rounding: its digits would only hide the metric.
    """
    real = [abs(s) for s in sizes if s]
    size = margin / 10 if margin else max(real, default=0.0)
    return min(6, max(2, 1 - math.floor(math.log10(size)))) if size else 4


def plural(count: int, one: str, many: str | None = None) -> str:
    """``1 layer``, ``2 layers``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def capital(text: str) -> str:
    """The first letter large, the rest as it is."""
    return text[:1].upper() + text[1:]


def sentence(text: str) -> str:
    """With a large first letter and a full stop, as it stands among others."""
    text = capital(text.strip())
    return text if not text or text[-1] in ".!?…" else f"{text}."


def spoken(parts: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def layer_counts(formats: dict[str, int]) -> str:
    """``6 layers in bf16 and 2 in FP32``, the largest first."""
    ordered = sorted(((n, f) for f, n in formats.items() if n), key=lambda pair: -pair[0])
    texts = [f"{n:,} in {FORMAT_LABELS.get(f, f)}" for n, f in ordered]
    if texts:
        first, name = ordered[0]
        texts[0] = f"{plural(first, 'layer')} in {FORMAT_LABELS.get(name, name)}"
    return spoken(texts)


def speed_phrase(speedup: Mapping[str, Any] | None) -> str:
    """The speed in words: ``1.9× faster`` only where the whole interval lies on one side of 1."""
    median = (speedup or {}).get("median")
    if speedup is None or median is None:
        return "Speed not measured"
    if not speedup.get("trusted", True):
        return f"Speed unproven ({ratio(median)})"
    low, high = speedup.get("low"), speedup.get("high")
    if abs(median - 1) < 0.03:
        return f"As fast as FP32 ({ratio(median)})"
    if low is not None and high is not None and low < 1 < high:
        return f"No clear difference in speed ({ratio(median)})"
    return f"{ratio(median)} faster" if median > 1 else f"Slower than FP32 ({ratio(median)})"


def headline(verdict: str | None, speedup: Mapping[str, Any] | None) -> str:
    """The finding in one sentence; where the speed proves nothing, the quality comes first."""
    speed = speed_phrase(speedup)
    if speed.startswith("Speed"):
        quality = {"not-worse": "Not worse", "worse": "Worse", "inconclusive": "Not yet proven as good"}
        return f"{quality.get(verdict or '', 'No verdict without a margin')}; s{speed[1:]}."
    return {
        "not-worse": f"{speed}, not worse.",
        "worse": f"{speed}, but worse." if "faster" in speed else f"{speed}, and worse.",
        "inconclusive": f"{speed}; not yet proven as good.",
    }.get(verdict or "", f"{speed}; no verdict on quality without a margin.")


def metric_sentence(metric: Mapping[str, Any]) -> str:
    """Both values, and the difference with its interval."""
    fp32, plan = metric.get("fp32"), metric.get("plan")
    if fp32 is None or plan is None:
        return ""
    low, high, difference = (metric.get(k) for k in ("low", "high", "difference"))
    width = None if low is None or high is None else high - low
    digits = decimals_for(metric.get("margin"), difference, width)
    name = capital(metric["name"])
    better = f"{'higher' if metric.get('higher_is_better', True) else 'lower'} is better."
    if difference == low == high == 0:
        return f"{name} is {fixed(plan, digits)} with the plan and in FP32, equal for every seed; {better}"
    text = f"{name} is {fixed(plan, digits)} with the plan and {fixed(fp32, digits)} in FP32"
    if difference is not None:
        text += f", a difference of {signed(difference, digits)}"
    if width is not None:
        text += f" (95\N{NO-BREAK SPACE}% interval {signed(low, digits)} to {signed(high, digits)})"
    return f"{text}; {better}"
