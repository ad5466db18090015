"""Values that cross the borders between the parts: frozen, plain, no torch.

Enters: what one part measured or decided. Leaves: the same, to another part, a file or a person.
Where: everywhere; each record says who makes it and who reads it.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from html import escape
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A time that was measured more than once. Made by the probe, the costs and the race."""

    median_s: float
    low_s: float
    """25 % quantile, seconds."""
    high_s: float
    """75 % quantile, seconds."""
    rounds: int

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Timing":
        """Median and quartiles of at least one time in seconds."""
        ordered = sorted(times_s)
        last = len(ordered) - 1
        return cls(
            median_s=statistics.median(ordered),
            low_s=ordered[round(last * 0.25)],
            high_s=ordered[round(last * 0.75)],
            rounds=len(ordered),
        )

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a share of the median."""
        return (self.high_s - self.low_s) / self.median_s if self.median_s else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatVerdict:
    """What the probe says of one format on this machine."""

    format: str
    verdict: str
    """``use``, ``not-worth-it`` or ``unusable``."""
    reason: str
    """One sentence with the measured figures that decided."""
    claimed: bool | None
    """What the device or library says of itself; None when it says nothing."""
    emulated: bool = False
    """Computes, but slower than FP32: there are no units for it."""
    gemm_speedup: float | None = None
    """FP32 time / this format's time of the largest square product, forward; None when not measured."""
    conv_speedup: float | None = None
    """The same for a 3x3 convolution, forward and both backward directions together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this machine claims and measurably does. Made by the probe; read by the planner and the report."""

    fingerprint: str
    """Changes with whatever changes the answer: torch, driver, cores, quota, threads, ISA limits."""
    device: str
    """``cpu``, ``cuda``, ``xpu``, ``mps``."""
    name: str
    formats: Mapping[str, FormatVerdict]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Cores, threads, memory, CPU features, versions, driver, accelerators seen: for people and the
    report."""
    readings: Sequence[Mapping[str, Any]] = ()
    """Each {op, shape, direction, format, threads, median_s, low_s, high_s, rounds, work, rate, unit, clock,
    foreign_share}."""
    trusted: bool = True
    """False when foreign load made the measurement prove nothing."""
    note: str = ""
    """One sentence when something was noticed: foreign load, a format that ran out of time."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)

    def _repr_html_(self) -> str:
        """The verdicts as a table for a notebook."""
        rows = "".join(
            f"<tr><td>{escape(v.format)}</td><td>{escape(v.verdict)}</td><td>{escape(v.reason)}</td></tr>"
            for v in self.formats.values()
        )
        head = "<tr><th>format</th><th>verdict</th><th>reason</th></tr>"
        note = f"<p>{escape(self.note)}</p>" if self.note else ""
        return f"<p><b>{escape(self.name)}</b> ({escape(self.device)})</p><table>{head}{rows}</table>{note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One thing a plan decided, with the reason and the evidence."""

    what: str
    """``format``, ``memory_format``, ``optimizer`` or ``race``."""
    where: str
    """Dotted module name, or ``*`` for the whole model."""
    choice: str
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Measured figures: seconds end in ``_s``, ratios in ``_ratio``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a number first stopped being finite in a watched step. Made by ``step.overflow``."""

    module: str | None
    """Dotted name of the module that computed it, the root ``""``; None outside of the model: the loss."""
    operator: str
    """Torch's name of the operator, such as ``addmm``."""
    backward: bool
    """In backward, where the loss scale counts; else in forward."""
    half: bool
    """Finite inputs, and a result in FP16 or bf16 that its range can't hold."""
    largest: float
    """Largest magnitude among the operator's inputs; inf where they were not finite."""
    format: str
    """Format of the result, such as ``fp16``."""
    given: str = ""
    """What came into the model not finite: ``input``, or ``weight NAME``; empty when it was computed."""

    def __str__(self) -> str:
        """One phrase for a message."""
        where = "the loss" if self.module is None else f"layer {self.module or '(root)'!r}"
        if self.given == "input":
            return f"the input of {where} holds an inf or a NaN"
        if self.given:
            return f"{self.given} holds an inf or a NaN"
        way = "backward" if self.backward else "forward"
        what = "the cast" if self.operator == "_to_copy" else self.operator
        if self.half:
            return (
                f"{what} in {where} ({way}) leaves the range of {self.format}: its inputs are at "
                f"most {self.largest:.6g}"
            )
        return f"{self.operator} in {where} ({way}) makes an inf or a NaN of inputs up to {self.largest:.6g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Something that was changed or found while training. Made by the Session; read by people and runs."""

    step: int
    """The step after which it was taken."""
    what: str
    """``widen`` (a layer went to FP32) or ``stall`` (training stands still)."""
    where: str
    """Dotted module name; empty for the root or where nothing could be named."""
    choice: str
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Figures that decided, plain data."""

    def as_dict(self) -> dict[str, Any]:
        """A row of ``decisions.jsonl``."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranges:
    """What one format would lose of some numbers. Made by ``step.ranges`` from a histogram of exponents."""

    format: str
    values: int
    """Numbers that are finite and not zero; shares are shares of these."""
    underflow: float
    """Share that rounds to zero."""
    overflow: float
    """Share that rounds past the format's largest number."""
    subnormal: float
    """Share that is kept with fewer bits than the format has."""
    sqnr_db: float | None
    """Signal to quantisation noise, decibels; what overflows counts as cut to the largest number. None where
    there is no signal."""
    scale: float = 1.0
    """The smallest power of two to multiply by first that loses hardly more than the best does; the largest
    number stays below the format's last octave."""
    scaled_underflow: float = 0.0
    """Share that rounds to zero after that."""
    scaled_sqnr_db: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """Measured time of one layer in one format, all directions, casts included. Made by ``plan.cost``."""

    layer: str
    """Dotted module name."""
    key: str
    """What makes two layers the same to the clock: type, sizes, input shapes."""
    format: str
    time: Timing | None
    """Forward and backward together; None when the format was stopped at its time box."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where a sampled step's time went, seconds. Made by the Session on sampled steps."""

    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    machinery_s: float
    """Everything that is ours: checks, scaling, reports."""


PARTS = tuple(part.name for part in fields(StepParts))
"""The parts of a step, in the order in which a batch meets them."""


class StepReport:
    """What one step did. Reading ``loss`` or ``grad_norm`` is the documented host sync; the rest is free."""

    __slots__ = ("_grad_norm", "_loss", "_scale", "_skipped", "parts", "step")

    def __init__(
        self,
        step: int,
        loss: Any,
        skipped: Any,
        scale: Any = 1.0,
        grad_norm: Any = None,
        parts: StepParts | None = None,
    ) -> None:
        self.step = step
        self._loss = loss
        self._skipped = skipped
        self._scale = scale
        self._grad_norm = grad_norm
        self.parts = parts

    @property
    def loss(self) -> float | None:
        """The unscaled loss; None when the step was given none. Reads from the device."""
        return None if self._loss is None else float(self._loss)

    @property
    def skipped(self) -> bool:
        """Whether the optimizer left the weights alone. Reads from the device if the answer lies there."""
        return bool(self._skipped)

    @property
    def scale(self) -> float:
        """The loss scale of this step; 1 where none is needed. Reads from the device."""
        return float(self._scale)

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm before clipping; None without ``max_grad_norm``. Reads from the device."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def as_dict(self) -> dict[str, Any]:
        """A row of ``steps.jsonl``."""
        row: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "skipped": self.skipped,
            "scale": self.scale,
        }
        if self._grad_norm is not None:
            row["grad_norm"] = self.grad_norm
        if self.parts is not None:
            row["parts"] = asdict(self.parts)
        return row

    def __repr__(self) -> str:
        return f"StepReport(step={self.step})"


ReportSink = Callable[[dict[str, Any]], None]
"""``on_report=``: gets flat scalars on sampled steps."""


def finite_only(value: Any) -> Any:
    """Plain data with None for numbers that are not finite: JSON has none."""
    if isinstance(value, Mapping):
        return {str(k): finite_only(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_only(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
