"""Tools of the loss scaler: gradients checked and multiplied, flags read, what a window leaves behind.

Enters: an optimizer's gradients and factors on the device. Leaves: the same gradients, multiplied, and on
each device a flag that says whether one was not finite. Where: inside ``LossScaler.unscale_`` and ``step``.
Source: ``torch/amp/grad_scaler.py`` of torch 2.13 (``_unscale_grads_``).
"""

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import FormatError, SessionError

STALL_SKIPS = 20
"""Skips in a row at the floor after which a bare scaler raises."""

_SAFE = 2.0**126
"""Between 1/_SAFE and _SAFE both a scale and its reciprocal are normal FP32 numbers."""


@dataclass(slots=True)
class Mark:
    """Recognises a gradient that no backward pass has touched since."""

    grad: "weakref.ref[torch.Tensor]"
    version: int

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer | None) -> "Mark | None":
        """The mark of the optimizer's first gradient; None when it has none."""
        for group in optimizer.param_groups if optimizer is not None else ():
            for param in group["params"]:
                if param.grad is not None:
                    return cls(weakref.ref(param.grad), param.grad._version)
        return None

    def same(self, other: "Mark") -> bool:
        """Whether both mark one gradient with one content."""
        grad = self.grad()
        return grad is not None and grad is other.grad() and self.version == other.version


@dataclass(slots=True)
class FloorWatch:
    """Counts skips in a row at the floor: exact on the device, bounds on the host."""

    least: float
    """The scale is at least this."""
    most: int = 0
    """At most so many skips in a row were at the floor."""
    skips: torch.Tensor | int = 0
    """That number; counted from when the floor comes within reach of ``least``."""

    def copy(self) -> "FloorWatch":
        """As it is now."""
        return FloorWatch(self.least, self.most, self.skips)

    def after(self, move: "Move", scale: torch.Tensor, floor: float, backoff: float) -> int:
        """Take a move of the scale; the skips in a row at the floor, once they are a stall, else 0."""
        if move.skip is False:
            self.skips = self.most = 0
            return 0
        if self.least > floor:
            # the margin keeps it a lower bound though the scale is rounded to FP32
            self.least = max(self.least * backoff * (1.0 - 2.0**-20), floor)
            if move.skip and self.least < 1.0:
                self.least = read(scale)
            return 0
        self.skips = (self.skips + 1) * ((move.found > 0) & (move.scale <= floor))
        self.most += 1
        if self.most >= STALL_SKIPS:
            self.least, self.most = read(scale), int(read(self.skips))
        return self.most if self.most >= STALL_SKIPS else 0


@dataclass(slots=True)
class Move:
    """One move of the scale and what it started from: later checks of the window make it again."""

    found: torch.Tensor
    skip: bool | None
    """What the host knows of ``found``; None: nothing."""
    scale: torch.Tensor
    tracker: torch.Tensor
    floor: "FloorWatch"
    """As it was before the move."""


@dataclass(slots=True)
class Closed:
    """What a window leaves for optimizers that step after its ``update()``."""

    update: Move | None = None
    """None after ``update(new_scale)``, or when no optimizer had a gradient."""
    unscaled: dict[int, dict[str, Any]] = field(default_factory=dict)
    stepped: dict[int, tuple[torch.optim.Optimizer | None, Mark | None]] = field(default_factory=dict)


def unscale_gradients(
    optimizer: torch.optim.Optimizer,
    inv_scale: torch.Tensor,
    found_inf: torch.Tensor,
    *,
    allow_fp16: bool,
    twice: bool,
) -> dict[torch.device, torch.Tensor]:
    """Check all gradients of an optimizer and multiply them in place.

    Args:
        optimizer: owner of the gradients.
        inv_scale: the factor, 0-d.
        found_inf: 0, on the scale's device.
        allow_fp16: accept FP16 gradients (a check alone, the factor is 1).
        twice: check the products too, where they can overflow.

    Returns:
        for each device that holds gradients a flag: 1 where one is not finite.
    """
    found: dict[torch.device, torch.Tensor] = {}
    with torch.no_grad():
        groups, sparse = _gradients_by_kind(optimizer, allow_fp16)
        one = torch.ones_like(inv_scale) if sparse or twice else inv_scale
        for (device, _, _), grads in groups.items():
            if device not in found:
                found[device] = found_inf.to(device, non_blocking=True, copy=True)
            _check_and_multiply(grads, found[device], inv_scale)
            if twice:
                _check_and_multiply(grads, found[device], one)
        for param in sparse:  # finite values of one index may have an infinite sum
            param.grad = param.grad.coalesce()  # type: ignore[union-attr]
            summed = _numbers(param.grad)
            _check_and_multiply([summed], found[summed.device], one)
    return found


def _gradients_by_kind(
    optimizer: torch.optim.Optimizer, allow_fp16: bool
) -> tuple[dict[tuple[Any, ...], list[torch.Tensor]], list[torch.Tensor]]:
    """The numbers of all gradients by device, type and class; and the parameters whose gradient is sparse."""
    groups: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    sparse: list[torch.Tensor] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.dtype is torch.float16 and not allow_fp16:
                raise _fp16_gradients(param)
            if grad.is_sparse:
                param.grad = grad = _own_values(grad)
                sparse.append(param)
            values = _numbers(grad)
            # distributed tensors have a kernel of their own, which doesn't take plain ones in one call
            key = (values.device, values.dtype, type(values))
            if key in groups:
                groups[key].append(values)
            else:
                groups[key] = [values]
    return groups, sparse


def check_quotients(
    optimizer: torch.optim.Optimizer, scale: torch.Tensor, found: dict[torch.device, torch.Tensor]
) -> None:
    """Set ``found`` where a gradient divided by a scale below 1 overflows; the gradients stay as they are."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                values = _numbers(param.grad.detach())
                values = values.to_local() if hasattr(values, "to_local") else values
                largest = torch.linalg.vector_norm(values, torch.inf, dtype=torch.float64)
                quotient = (largest / scale.to(values.device, non_blocking=True)).float()
                flag = found[values.device]
                flag.copy_(torch.maximum(flag, (~torch.isfinite(quotient)).float()))


def largest_gradient(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """The largest magnitude among the gradients of an optimizer, 0-d; NaN where one is; None without any.

    A pass over the gradients and a few small kernels for each.
    """
    found: dict[torch.device, list[torch.Tensor]] = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                values = _numbers(param.grad.detach())
                values = values.to_local() if hasattr(values, "to_local") else values
                if values.numel():
                    low, high = torch.aminmax(values)
                    found.setdefault(values.device, []).append(torch.maximum(high, -low).float())
    if not found:
        return None
    first = next(iter(found))
    return torch.stack([torch.stack(v).amax().to(first, non_blocking=True) for v in found.values()]).amax()


def _numbers(grad: torch.Tensor) -> torch.Tensor:
    """The memory that a gradient's numbers lie in: values of a sparse one, real pairs of a complex one."""
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values


def _check_and_multiply(grads: list[torch.Tensor], found: torch.Tensor, factor: torch.Tensor) -> None:
    """Set ``found`` to 1 where a value is not finite, then multiply all by ``factor``; one pass."""
    factor = factor.to(found.device, non_blocking=True)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor)


def _own_values(grad: torch.Tensor) -> torch.Tensor:
    """A sparse gradient in memory of its own: embeddings that are summed share their gradients' values."""
    return torch.sparse_coo_tensor(
        grad._indices(),
        grad._values().clone(),
        grad.shape,
        check_invariants=False,
        is_coalesced=grad.is_coalesced(),
    )


def lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this is a fused SGD before its first step with momentum.

    Its kernel leaves the new momentum buffer uninitialised when it skips, and the next step reads it
    (torch 2.13).
    """
    if not isinstance(optimizer, torch.optim.SGD) or not getattr(
        optimizer, "_step_supports_amp_scaling", False
    ):
        return False
    for group in optimizer.param_groups:
        if group["momentum"] != 0:
            first = next((p for p in group["params"] if p.grad is not None), None)
            if first is not None and optimizer.state.get(first, {}).get("momentum_buffer") is None:
                return True
    return False


def any_of(flags: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The largest of some 0-d flags, on ``device``."""
    if not flags:
        return torch.zeros((), device=device)
    there = [flag.to(device, non_blocking=True) for flag in flags]
    return there[0] if len(there) == 1 else torch.stack(there).amax()


def known(found: torch.Tensor, states: list[dict[str, Any]]) -> bool | None:
    """What the host knows of ``found`` without waiting for a device."""
    if found.device.type == "cpu":
        return read(found) != 0.0
    answers = [state.get("skip") for state in states]
    return None if None in answers else any(answers)


def read(value: torch.Tensor | float) -> float:
    """A 0-d tensor as a number: a host read on an accelerator, a look into memory on a CPU."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    return float(value.numpy()) if value.device.type == "cpu" else float(value.item())


def bounds(min_scale: float, max_scale: float) -> tuple[float, float]:
    """Floor and cap as the FP32 numbers that the scale can reach."""
    if not 1.0 / _SAFE <= min_scale <= max_scale <= _SAFE:
        raise SessionError(
            f"min_scale={min_scale!r} and max_scale={max_scale!r} were given; allowed is 2**-126 <="
            " min_scale <= max_scale <= 2**126, so that the scale and its reciprocal are both finite."
        )
    low, high = torch.tensor([min_scale, max_scale], dtype=torch.float32).tolist()
    return low, high


def check_settings(growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    """Raise where the scale could not move as it should."""
    if not (growth_factor > 1.0 and 0.0 < backoff_factor < 1.0 and growth_interval >= 1):
        raise SessionError(
            f"growth_factor={growth_factor!r}, backoff_factor={backoff_factor!r} and"
            f" growth_interval={growth_interval!r} were given; allowed is above 1, between 0 and 1, and at"
            " least 1."
        )


def default_device() -> str:
    """Type of the accelerator that is there, else ``cpu``."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def _fp16_gradients(param: torch.Tensor) -> FormatError:
    return FormatError(
        f"a gradient of shape {tuple(param.shape)} is float16, and unscaling it in place would lose what"
        " scaling saved. FP16 is mixed precision: keep the parameters in float32 (don't call model.half())"
        " and run the forward pass under autocast."
    )
