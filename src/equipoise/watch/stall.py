"""Skipped steps in a row: when to look closer, when training stands still, and what to say then.

Enters: whether each step was skipped, and what a watched step saw. Leaves: a wish to watch the next step, and
the text of a stall with the layer and its likely cause. Where: at the end of a step; pure.
"""

from ..records import Origin

STALL_AFTER = 20
"""Skipped steps in a row that count as a stall."""

WATCH_AFTER = 2
"""Skipped steps in a row after which the next one is watched: one or two are how a loss scale is found."""


class StallWatch:
    """Counts skipped steps in a row and keeps what was seen of their cause."""

    def __init__(self) -> None:
        self.skips = 0
        """Skipped steps since the last one that was taken, as far as flags were read."""
        self.origin: Origin | None = None
        """What the last watched one of them saw."""

    def after(self, skipped: bool) -> bool:
        """Take a step; whether it is the one that makes a stall."""
        if not skipped:
            self.skips, self.origin = 0, None
            return False
        self.skips += 1
        return self.skips == STALL_AFTER

    @property
    def wants_to_see(self) -> bool:
        """Whether the next step shall be watched."""
        return WATCH_AFTER <= self.skips < STALL_AFTER


def layer_of(origin: Origin | None, parameter: str | None) -> str:
    """The layer to name: the origin's, else the one that owns the parameter; empty where neither is known."""
    if origin is not None and origin.module:
        return origin.module
    return (parameter or "").rpartition(".")[0]


def likely_cause(origin: Origin | None, parameter: str | None, scale: float) -> str:
    """What to say of gradients that aren't finite: what was seen, and what to do.

    Args:
        origin: what a watched step saw.
        parameter: the first one whose gradient isn't finite, as far as this rank knows.
        scale: the loss scale of the step.
    """
    seen = f"the gradient of {parameter or 'a parameter on another rank or outside the model'} is not finite"
    layer = layer_of(origin, parameter)
    if origin is None:
        advice = f"give this layer a wider format (precision='...; {layer}=fp32'), or " if layer else ""
        return f"{seen}. Its cause wasn't seen: {advice}look at the data and the loss"
    if origin.given == "input":
        advice = "look at the data"
    elif origin.given:
        advice = "the model has diverged: go back to an earlier checkpoint, with a smaller learning rate"
    elif origin.half and origin.backward:
        advice = (
            f"the loss scale is {scale:g} already: give {layer or 'it'!r} fp32 in the policy, or start with "
            "a smaller scale: scaler=LossScaler(init_scale=...)"
        )
    elif origin.half and origin.module is not None:
        advice = f"give {layer or 'the model'!r} fp32 in the policy"
    elif origin.half:
        advice = "widen its inputs by .float() there, or leave that part out of session.autocast()"
    else:
        advice = "no format would help: look for a division by zero, a log or a root of zero"
    return f"{seen}. Likely cause: {origin}; {advice}"
