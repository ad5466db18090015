"""What a loss scaler does beyond torch's rule: patience with overflows, caps that change, prediction, groups.

Enters: a move of the scale that torch's rule made, or a module. Leaves: the scale held back, capped or
predicted, or a module whose gradients carry a factor of their own. Where: inside ``LossScaler.update`` and
``unscale_``.

Source: the hysteresis of Megatron-LM (``megatron/core/optimizer/grad_scaler.py``): only the last of
``hysteresis`` overflows backs off, and patience comes back with the next growth.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn

from .. import ranks
from ..errors import SessionError
from ._scaling import Move, largest_gradient, read
from .prediction import ScalePredictor


class Hysteresis:
    """Overflows that are skipped without backing off, counted on the device.

    Args:
        patience: the back-off comes with this overflow since the last growth; 1 is torch's rule.
    """

    def __init__(self, patience: int) -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise SessionError(f"hysteresis is {patience!r}; allowed is a whole number of at least 1")
        self.patience = patience
        self.left: torch.Tensor | int = patience
        """Overflows until the scale backs off."""
        self._before: torch.Tensor | int = patience

    def after(self, move: Move, scale: torch.Tensor, tracker: torch.Tensor, *, again: bool) -> None:
        """Take a move that torch's rule has made; undo its back-off while there is patience.

        Args:
            move: what it started from.
            scale: the scale after it, 0-d; changed in place.
            tracker: clean steps in a row after it, 0-d.
            again: whether it is the same window's move once more.
        """
        if self.patience == 1:
            return
        before = self._before if again else self.left
        self._before = before
        found = move.found > 0
        left = before - found.to(torch.int32)
        scale.copy_(torch.where(found & (left > 0), move.scale, scale))
        grown = ~found & (tracker == 0)
        self.left = torch.where(grown, self.patience, left.clamp(min=0))


class Caps:
    """A cap that changes with the number of steps.

    Args:
        schedule: (first step, cap) pairs with rising steps from 0 on; none: one cap for ever.
        low: the floor.
        high: the largest cap.
    """

    def __init__(self, schedule: Sequence[tuple[int, float]], low: float, high: float) -> None:
        self.schedule = [(int(step), float(cap)) for step, cap in schedule]
        steps = [step for step, _ in self.schedule]
        if self.schedule and (steps[0] != 0 or any(b <= a for a, b in pairwise(steps))):
            raise SessionError(f"caps begin at steps {steps}; allowed are rising steps, the first of them 0")
        for step, cap in self.schedule:
            if not low <= cap <= high:
                raise SessionError(f"the cap from step {step} on is {cap!r}; allowed is {low:g} to {high:g}")
        self.steps = 0
        """Moves of the scale so far."""
        self._high = high

    def now(self) -> float:
        """The cap of this step."""
        return next((cap for step, cap in reversed(self.schedule) if step <= self.steps), self._high)


class Prediction:
    """A predictor at work: when it looks, what it saw, and the scale that it sets.

    Args:
        bound: probability of an overflow in a step, at most.
        init_scale: the scale until it has seen a gradient.
        every: look at every n-th step; the first hundred are all looked at.
    """

    FIRST = 100

    def __init__(self, bound: float, init_scale: float, every: int) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise SessionError(f"predict_every is {every!r}; allowed is a whole number of at least 1")
        self.every = every
        self.predictor = ScalePredictor(bound, init_scale=init_scale)
        self.steps = 0
        """Windows so far."""
        self.told = False
        """Whether someone outside tells the largest gradient; then none is measured here."""
        self._amax: torch.Tensor | None = None
        self._overflowed = False  # the present window, as far as the predictor was told

    def looks(self) -> bool:
        """Whether the gradients of this window are looked at."""
        return not self.told and (self.steps < self.FIRST or self.steps % self.every == 0)

    def look(self, optimizer: torch.optim.Optimizer, scale: torch.Tensor | None) -> None:
        """Measure the largest gradient of an optimizer; ``scale`` is what they still carry, None: none."""
        amax = largest_gradient(optimizer)
        if amax is not None:
            self.take(amax if scale is None else amax / scale.to(amax.device, non_blocking=True))

    def take(self, amax: torch.Tensor) -> None:
        """A magnitude, one number; the largest of a window counts."""
        amax = amax.detach().to(torch.float32).reshape(()).nan_to_num(nan=math.inf, posinf=math.inf)
        if self._amax is not None:
            amax = torch.maximum(self._amax.to(amax.device, non_blocking=True), amax)
        self._amax = amax

    def after(self, move: Move, scale: torch.Tensor, *, again: bool) -> float | None:
        """Take a move that torch's rule has made, and set the scale instead.

        Where a window was not looked at and the host doesn't know whether it was skipped, nothing is read:
        the rule's back-off stays, its growth does not. Else at most three numbers are read.

        Args:
            move: what it started from.
            scale: the scale after it, 0-d; changed in place.
            again: whether it is the same window's move once more, which tells of an overflow alone; what was
                measured counts with the next window.

        Returns:
            the scale that was set; None where the rule's stayed.
        """
        amax = None
        if not again:
            amax = self._agreed(scale.device) if self.looks() or self._amax is not None else None
            self.steps += 1
            self._overflowed = False
        skip = read(move.found) != 0.0 if move.skip is None and amax is not None else move.skip
        if skip is not None and not (again and (self._overflowed or not skip)):
            self.predictor.observe(_log2(amax), skip, math.log2(read(move.scale)) if skip else None)
            self._overflowed = skip
        if skip is None or not (self.predictor.seen or skip):
            torch.minimum(scale, move.scale, out=scale)
            if again and self.predictor.seen:
                scale.clamp_(max=self.predictor.scale())
            return None
        scale.fill_(self.predictor.scale())
        return self.predictor.scale()

    def _agreed(self, device: torch.device) -> torch.Tensor:
        """The window's largest magnitude over all ranks; 0 where there was no gradient."""
        amax = torch.zeros((), device=device) if self._amax is None else self._amax
        self._amax = None
        return ranks.agree_max(amax)

    def state_dict(self) -> dict[str, Any]:
        """What was learned, and where it stands."""
        return {"steps": self.steps, "told": self.told, "predictor": self.predictor.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken."""
        self.predictor.load_state_dict(state["predictor"])
        self.steps, self.told, self._amax = int(state["steps"]), bool(state["told"]), None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_amax": None}


def _log2(amax: torch.Tensor | None) -> float | None:
    """Of a magnitude that may be 0 or infinite; None stays."""
    if amax is None:
        return None
    value = read(amax)
    return math.log2(value) if value > 0.0 else -math.inf


class _Boundary(torch.autograd.Function):
    """The identity, half widened to FP32 on request; its gradient is multiplied by a constant."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, factor: float, wide: bool) -> torch.Tensor:
        return x.float() if wide and x.dtype.itemsize < 4 else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dtype, ctx.factor = inputs[0].dtype, inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return (grad * ctx.factor).to(ctx.dtype), None, None


def _through(value: Any, factor: float, wide: bool) -> Any:
    if isinstance(value, torch.Tensor):
        if not (value.requires_grad and value.is_floating_point()):
            return value
        return _Boundary.apply(value, factor, wide)  # type: ignore[no-untyped-call]
    if isinstance(value, dict):
        return {k: _through(v, factor, wide) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_through(v, factor, wide) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Groups:
    """Modules whose gradients carry a factor beside the scale, exact since both are powers of two."""

    def __init__(self) -> None:
        self.on = True
        """Whether forwards add the factors; off where no loss is scaled, since nothing would undo them."""
        self._factors: dict[int, float] = {}
        self._modules: list[tuple[nn.Module, float]] = []
        self._handles: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._modules)

    def add(self, module: nn.Module, factor: float) -> None:
        """Give a module's gradients a factor: on at its output, off at its input and at its weights."""
        if not isinstance(module, nn.Module):
            raise SessionError(f"a scale group is a module, not {type(module).__name__}")
        if not (2.0**-48 <= factor <= 2.0**48 and math.frexp(factor)[0] == 0.5):
            raise SessionError(
                f"the factor of a scale group is {factor!r}; allowed are powers of two from 2**-48 to 2**48, "
                "which change no digit"
            )
        if any(m is module for m, _ in self._modules):
            raise SessionError(f"this {type(module).__name__} is a scale group already")
        self._modules.append((module, factor))
        for p in module.parameters():
            self._factors[id(p)] = self._factors.get(id(p), 1.0) * factor

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            inverse = 1.0 / factor
            return (_through(args, inverse, False), _through(kwargs, inverse, False)) if self.on else None

        def leave(module: nn.Module, args: Any, out: Any) -> Any:
            # Wide: a gradient that only fits with the factor would be flushed before it got it.
            return _through(out, factor, True) if self.on else None

        # Boundaries stand outside of what other hooks see: first before forward, last after it.
        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        self._handles.append(module.register_forward_hook(leave))

    def check(self, model: nn.Module) -> None:
        """Refuse a weight that is used inside and outside of a group: its gradient would carry two scales.

        Raises:
            SessionError: there is such a weight.
        """
        for module, _ in self._modules:
            inside = {id(m) for m in module.modules()}
            own = {id(p) for p in module.parameters()}
            for name, other in model.named_modules():
                if id(other) not in inside and any(id(p) in own for p in other._parameters.values()):
                    raise SessionError(
                        f"a weight of a scale group is shared with {name or 'the model'!r} outside of it; "
                        "make one group of both, or none"
                    )

    def undo(self, parameters: Iterator[nn.Parameter]) -> None:
        """Divide the gradients of these parameters by the factors of their groups, in place."""
        by_factor: dict[float, list[torch.Tensor]] = {}
        for p in parameters:
            factor = self._factors.get(id(p), 1.0)
            if p.grad is not None and factor != 1.0:
                grad = p.grad._values() if p.grad.is_sparse else p.grad
                by_factor.setdefault(factor, []).append(grad)
        for factor, grads in by_factor.items():
            for grad in grads:
                cast(Any, grad.mul_)(1.0 / factor)

    def has(self, parameters: Iterator[nn.Parameter]) -> bool:
        """Whether one of these parameters is in a group."""
        return bool(self._factors) and any(id(p) in self._factors for p in parameters)

    def remove(self) -> None:
        """Take the boundaries away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._modules.clear()
        self._factors.clear()
