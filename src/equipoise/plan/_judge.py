"""From readings to a verdict on each format, by measurement alone.

Enters: readings, claims and faults as the probe's child prints them. Leaves: a FormatVerdict for each
format.
Where: before the first step, in the probe's parent; pure, no torch.

A format pays when training does: for the largest shape at which all three directions were timed in both
formats, the times of forward, input gradient and weight gradient are added, and FP32's sum is divided by
the format's:

    ratio = (t_forward + t_input_gradient + t_weight_gradient)_fp32 / (...)_format

for square products and for 3x3 convolutions, each format in its better layout. The better of the two ratios
decides, since each layer is planned by itself later: ``use`` from 1.1 on, ``unusable`` below 1/3 or when
results are wrong, else ``not-worth-it``. Times are lower quartiles: what disturbs a timing only ever adds
to it.

Under foreign load a barrier waits for the thread that others keep out, and all threads prove nothing. One
thread, timed by its own processor time, still does: then its readings decide. Without them nothing is
claimed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..records import FormatVerdict
from ._host import NOISY_SHARE

Reading = Mapping[str, Any]

USE_RATIO = 1.1
"""Less than a tenth faster is lost to the casts at a layer's borders."""
UNUSABLE_RATIO = 1 / 3
"""So much slower only happens where the format is emulated number by number."""
SLOW_KERNEL_RATIO = 0.5
"""A kernel that takes twice as long as FP32's is named in the reason."""
SHORTEST_S = 1e-4
"""Where both formats are through sooner, the calls were timed and not the arithmetic: it proves nothing."""

FATAL = {"inexact": "wrong results", "crashed": "crashes", "hung": "hangs"}
"""Faults that no speed makes up for."""
CANT_TELL = "can't tell"
"""How the reason begins when nothing was proved."""
REFERENCE = "fp32"
ALWAYS = (REFERENCE, "bf16", "fp16")
"""Formats with a verdict on every machine, measured or not."""

_DIRECTIONS = ("forward", "input-gradient", "weight-gradient")
_CONVOLUTIONS = ("conv", "conv-nchw")
DECISIVE = ("gemm", "conv")
"""Operators that a verdict needs."""


@dataclass(frozen=True, slots=True)
class _Ratio:
    """A format against FP32 at one shape."""

    fp32_s: float
    format_s: float
    shape: str

    @property
    def value(self) -> float:
        """Above 1: the format is faster."""
        return self.fp32_s / self.format_s

    def __str__(self) -> str:
        value = self.value
        speed = f"{value:.2g}x FP32's speed" if value >= 0.995 else f"{1 / value:.2g}x slower than FP32"
        return f"{speed} ({self.format_s * 1e3:.3g} against {self.fp32_s * 1e3:.3g} ms at {self.shape})"


class _Table:
    """Readings of equal standing: one number of threads, nothing that foreign load has spoiled."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._times_s: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
        self._work: dict[tuple[str, str], float] = {}
        for r in readings:
            by_format = self._times_s.setdefault((r["op"], r["shape"]), {})
            by_format.setdefault(r["format"], {})[r["direction"]] = r["low_s"]
            self._work[r["op"], r["shape"]] = max(
                r.get("work", 0.0), self._work.get((r["op"], r["shape"]), 0.0)
            )

    def ratio(self, ops: Sequence[str], name: str, directions: Sequence[str] = _DIRECTIONS) -> _Ratio | None:
        """The format against FP32 at the largest shape with all ``directions`` in both, if that tells."""
        best: dict[str, tuple[float, float]] = {}
        works: dict[str, float] = {}
        for (op, shape), by_format in self._times_s.items():
            fp32, other = by_format.get(REFERENCE, {}), by_format.get(name, {})
            if op in ops and all(d in fp32 and d in other for d in directions):
                sums_s = sum(fp32[d] for d in directions), sum(other[d] for d in directions)
                known_s = best.get(shape, sums_s)
                best[shape] = min(sums_s[0], known_s[0]), min(sums_s[1], known_s[1])
                works[shape] = self._work[op, shape]
        if not best:
            return None
        shape = max(works, key=lambda s: works[s])
        return _Ratio(*best[shape], shape) if max(best[shape]) >= SHORTEST_S else None

    def slow_kernels(self, name: str) -> list[tuple[float, str]]:
        """(ratio, name) of the operators and directions where the format falls off a cliff, worst first."""
        pairs = {(op, d) for (op, _), by_format in self._times_s.items() for d in by_format.get(name, {})}
        ratios = {pair: self.ratio((pair[0],), name, (pair[1],)) for pair in pairs}
        return sorted(
            (r.value, f"{op} {direction} {r.shape}")
            for (op, direction), r in ratios.items()
            if r is not None and r.value < SLOW_KERNEL_RATIO
        )


@dataclass(frozen=True, slots=True)
class Evidence:
    """The readings that may decide."""

    table: _Table
    """For each operator those of all threads, or of one thread where foreign load spoiled those."""
    one_thread: bool
    """Whether a verdict has to rest on one thread."""
    spoiled: bool
    """Whether foreign load left nothing for any verdict."""
    foreign_share: float
    """What others kept from all threads while the decisive operators were timed, 0 to 1."""


def weigh(readings: Sequence[Reading]) -> Evidence:
    """Sort out what foreign load has spoiled; of a reading taken twice the quieter one counts."""
    quietest: dict[tuple[Any, ...], Reading] = {}
    for r in readings:
        key = tuple(r[k] for k in ("op", "shape", "direction", "format", "threads"))
        if key not in quietest or _share(r) <= _share(quietest[key]):
            quietest[key] = r
    most = max((r["threads"] for r in readings), default=1)
    by_op: dict[tuple[str, int], list[Reading]] = {}
    for r in quietest.values():
        by_op.setdefault((r["op"], r["threads"]), []).append(r)
    sound = {key for key, group in by_op.items() if all(_sound(r) for r in group)}
    # Fewer readings of all threads than of one: time ran out among them, the large sizes are missing.
    full = {key for key in sound if len(by_op[key]) >= len(by_op.get((key[0], 1), ()))}
    chosen = {op: most if (op, most) in full else 1 for op, _ in by_op}
    if chosen.get("conv-nchw") != chosen.get("conv"):
        chosen.pop("conv-nchw", None)  # layouts are compared, so they have to be of equal standing
    kept = [r for key in chosen.items() if key in sound for r in by_op[key]]
    shares = [_share(r) for op in DECISIVE for r in by_op.get((op, most), ())]
    return Evidence(
        table=_Table(kept),
        one_thread=most > 1 and any(chosen.get(op) == 1 for op in DECISIVE),
        spoiled=bool(readings) and not any(r["op"] in DECISIVE for r in kept),
        foreign_share=max(shares, default=0.0),
    )


def _share(reading: Reading) -> float:
    return float(reading.get("foreign_share", 0.0))


def _sound(reading: Reading) -> bool:
    return reading.get("clock") == "processor" or _share(reading) <= NOISY_SHARE


def judge(
    readings: Sequence[Reading],
    claims: Mapping[str, bool | None],
    faults: Mapping[str, Sequence[Mapping[str, Any]]],
) -> dict[str, FormatVerdict]:
    """The verdict on every format that was measured or claimed, and always on fp32, bf16 and fp16.

    Args:
        readings: each {op, shape, direction, format, threads, low_s, work, foreign_share, clock, ...}.
        claims: what the device or library says that it has; None when it says nothing.
        faults: for each format {fault, text} of what its results or its process did wrong.
    """
    evidence = weigh(readings)
    names = dict.fromkeys([*ALWAYS, *claims, *(r["format"] for r in readings)])
    return {
        name: _reference(readings, claims)
        if name == REFERENCE
        else _verdict(name, evidence, claims.get(name), faults.get(name, ()))
        for name in names
    }


def _reference(readings: Sequence[Reading], claims: Mapping[str, bool | None]) -> FormatVerdict:
    rates = [
        (r["work"], r["work"] / r["low_s"], r["shape"])
        for r in readings
        if r["op"] == "gemm" and r["format"] == REFERENCE and r["direction"] == "forward"
    ]
    measured = "; not measured in time"
    if rates:
        work = max(rates)[0]
        rate, shape = max((rate, shape) for w, rate, shape in rates if w == work)
        measured = f": {rate / 1e9:.3g} GFLOP/s in a {shape} product"
    return FormatVerdict(
        format=REFERENCE,
        verdict="use",
        reason=f"the reference{measured}",
        claimed=claims.get(REFERENCE, True),
        gemm_speedup=1.0 if rates else None,
        conv_speedup=1.0 if rates else None,
    )


def _verdict(
    name: str, evidence: Evidence, claimed: bool | None, faults: Sequence[Mapping[str, Any]]
) -> FormatVerdict:
    gemm = evidence.table.ratio(("gemm",), name)
    conv = evidence.table.ratio(_CONVOLUTIONS, name)
    forward = evidence.table.ratio(("gemm",), name, ("forward",))
    verdict, reason = _decide(gemm, conv, evidence, claimed, faults)
    remarks = [fault["text"] for fault in faults if fault["fault"] in ("subnormals", "accumulate")]
    if verdict != "unusable":
        slow = [
            f"{kernel} ({1 / ratio:.2g}x slower)" for ratio, kernel in evidence.table.slow_kernels(name)[:3]
        ]
        remarks += [f"kernels to leave in FP32: {', '.join(slow)}"] if slow and verdict == "use" else []
    return FormatVerdict(
        format=name,
        verdict=verdict,
        reason="; ".join([reason, *remarks]),
        claimed=claimed,
        emulated=gemm is not None and max(r.value for r in (gemm, conv) if r is not None) < UNUSABLE_RATIO,
        gemm_speedup=None if forward is None else round(forward.value, 3),
        conv_speedup=None if conv is None else round(conv.value, 3),
    )


def _decide(
    gemm: _Ratio | None,
    conv: _Ratio | None,
    evidence: Evidence,
    claimed: bool | None,
    faults: Sequence[Mapping[str, Any]],
) -> tuple[str, str]:
    """(verdict, reason) of one format other than FP32."""
    for fault in faults:
        if fault["fault"] in FATAL:
            return "unusable", f"{FATAL[fault['fault']]}: {fault['text']}"
        if fault["fault"] == "unsupported" and fault.get("op") == "gemm":
            return "unusable", f"no kernel for a product: {fault['text']}"
    if gemm is None and conv is None:
        if evidence.spoiled:
            return (
                "not-worth-it",
                f"{CANT_TELL}: other processes took {evidence.foreign_share:.0%} of the processors",
            )
        return "not-worth-it", f"{CANT_TELL}: nothing large enough was measured in time, forward and backward"
    figures = [
        f"{what} {ratio}" for what, ratio in (("products", gemm), ("convolutions", conv)) if ratio is not None
    ]
    missing = " and ".join(
        what for what, ratio in (("products", gemm), ("convolutions", conv)) if ratio is None
    )
    text = f"forward and backward, {', '.join(figures)}"
    text += f", {missing} not measured" if missing else ""
    text += ", timed on one thread" if evidence.one_thread else ""
    best = max(ratio.value for ratio in (gemm, conv) if ratio is not None)
    if best >= USE_RATIO:
        return "use", text
    if best < UNUSABLE_RATIO:
        said = "claimed, but emulated" if claimed else "emulated"
        return "unusable", f"{said}: {text}"
    return "not-worth-it", text


def trust(readings: Sequence[Reading], verdicts: Mapping[str, FormatVerdict]) -> tuple[bool, str]:
    """Whether the verdicts rest on something, and one sentence when something was noticed."""
    evidence = weigh(readings)
    if evidence.spoiled:
        return False, (
            f"other processes took {evidence.foreign_share:.0%} of the processors and nothing could be "
            f"timed beside them: the verdicts prove nothing; probe again on an idle machine"
        )
    unknown = [v.format for v in verdicts.values() if v.reason.startswith(CANT_TELL)]
    if unknown:
        return False, f"not measured in time: {', '.join(unknown)}"
    if evidence.one_thread:
        loaded = evidence.foreign_share > NOISY_SHARE
        why = (
            f"other processes took {evidence.foreign_share:.0%} of the processors"
            if loaded
            else "time ran out"
        )
        return (
            True,
            f"{why} before all threads were timed: the verdicts rest on one thread's own processor time",
        )
    return True, ""
