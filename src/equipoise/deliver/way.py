"""The data's way through one step of the plan, as stations for the page.

Enters: the figures of ``figures.py``. Leaves: stations in the order in which a batch meets them, and what
became of steps that were skipped. Where: after the run; no torch. What was not recorded is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from . import words


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """One stage that a batch passes in a step."""

    name: str
    what: str
    detail: str
    time: str = ""
    format: str = ""
    """A format's name, ``mixed``, or empty: the colour of the station."""


def stations(figures: Mapping[str, Any]) -> list[Station]:
    """Batch, layers, loss, backward, check, optimizer; none when neither formats nor times are known."""
    step, plan, formats = figures["step"], figures["plan"] or {}, figures["formats"]
    if not formats and not step["parts"]:
        return []
    parts = step["parts"] or {}
    time = {part: words.duration(parts[part]) if part in parts else "" for part in words.PART_LABELS}
    mixed = "mixed" if len(formats) > 1 else next(iter(formats), "")
    backward, why, scaled = _backward(step["scale"], formats)
    value = (
        f"value {words.number(step['loss'], 4)}" if step["loss"] is not None else "PyTorch’s losses widen"
    )
    norm = f"norm {words.number(step['grad_norm'])}, " if step["grad_norm"] is not None else ""
    return [
        Station(name="Batch", what=f"{step['batch']:,.4g} samples" if step["batch"] else "one batch",
                detail="read and moved to the device", time=time["data_s"]),
        Station(name="Layers", what=words.layer_counts(formats) or "formats not recorded",
                detail="operators as PyTorch’s autocast lists them", time=time["forward_s"], format=mixed),
        Station(name="Loss", what="in FP32", detail=value, format="fp32"),
        Station(name="Backward", what=backward, detail=why, time=time["backward_s"], format=mixed),
        Station(name="Check", what="gradients finite?", time=time["machinery_s"], format="fp32",
                detail=f"{norm}{'unscaled first; ' if scaled else ''}if not, the step is skipped"),
        Station(name="Optimizer", what="FP32 master weights", time=time["optimizer_s"], format="fp32",
                detail="one fused kernel" if plan.get("fused_optimizer") else "as the user made it"),
    ]  # fmt: skip


def _backward(scale: float | None, formats: Mapping[str, int]) -> tuple[str, str, bool]:
    """What is propagated, why, and whether it is scaled."""
    if "fp16" in formats or (scale is not None and scale != 1):
        size = "" if scale is None else f"{scale:,.0f}" if scale >= 1 else words.number(scale)
        what = f"loss × {size}" if size else "the scaled loss"
        return what, "small gradients stay above FP16’s smallest number", True
    reaches = "bf16" if "bf16" in formats else "FP32"
    return "loss as it is", f"{reaches} reaches small gradients without scaling", False


def skips(figures: Mapping[str, Any]) -> str:
    """How many steps were skipped, as a sentence; empty when not recorded."""
    skipped, steps = figures["step"]["skipped"], figures["step"]["steps"]
    if skipped is None:
        return ""
    if not skipped:
        among = f" of the {steps:,} steps" if steps else ""
        return f"No step{among} was skipped: every gradient was finite."
    among = f" of {steps:,} steps" if steps else ""
    return (f"{skipped:,}{among} skipped: a gradient was not finite, so weights and schedule stayed as they "
            "were.")  # fmt: skip
