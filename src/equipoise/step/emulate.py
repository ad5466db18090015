"""Half formats by casts there and back: FP16's numbers on a CPU whose FP16 kernels are slow or missing.

Enters: an operator of autocast's half list, called while emulation is on. Leaves: its result in half,
computed in FP32 from inputs that were rounded to half; the gradients of its inputs are rounded as well.
Where: inside a step, in place of the device's own half kernel. It is for study: whether a model trains in
FP16 can be found out where FP16 is no use. Time and memory are not FP16's.

Every rounding that mixed precision makes is made, overflow to infinity and flushing to zero included, in
forward and backward; products are summed in FP32, as matrix units do. Operators outside of the list run in
half by themselves. Source: ``torch.autocast``'s casts, made twice.
"""

from collections.abc import Callable
from typing import Any

import torch

_SIGN = "ipu"
"""The device type whose autocast dtype is FP32 while this thread emulates: see ``operators.py``."""


def is_on() -> bool:
    """Whether this thread emulates."""
    return torch.get_autocast_dtype(_SIGN) is torch.float32


class Emulation:
    """Switches emulation on, on this thread; a context."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before = torch.bfloat16

    def __enter__(self) -> None:
        self._before = torch.get_autocast_dtype(_SIGN)
        torch.set_autocast_dtype(_SIGN, torch.float32)

    def __exit__(self, *error: Any) -> None:
        torch.set_autocast_dtype(_SIGN, self._before)


def kernel(op: Any, keys: Any, device: str) -> Callable[..., Any]:
    """An operator of the half list by casts there and back.

    Args:
        op: the torch operator.
        keys: autocast's dispatch keys, left out inside.
        device: torch device type, whose autocast dtype is emulated.
    """
    excluded: Any = torch._C._ExcludeDispatchKeyGuard

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        rounded = [_rounded(a, dtype) for a in args]
        with excluded(keys):
            out = op(*rounded, **{k: _rounded(v, dtype) for k, v in kwargs.items()})
        return _narrowed(out, dtype)

    return run


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not torch.float64 else value
    if isinstance(value, (list, tuple)):
        return type(value)(_narrowed(v, dtype) for v in value)
    return value


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        narrow = _narrowed(value, dtype)
        return narrow.float() if narrow.dtype is dtype else narrow
    if isinstance(value, (list, tuple)):
        return type(value)(_rounded(v, dtype) for v in value)
    return value
