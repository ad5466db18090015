"""A user's own autograd Functions: their backward runs in the autocast state that their forward ran in.

Enters: a ``torch.autograd.Function`` without ``custom_fwd`` and ``custom_bwd``, called under
``Session.autocast()``. Leaves: the same gradients, without "expected BFloat16 but found Float": its products
of half gradients with saved FP32 weights are cast as those of its forward were. Where: inside backward.

Torch makes a context object for each call of a Function, and asks the object's class for ``apply`` when
its turn comes in backward. Both are attributes of one Python class, which :func:`install` replaces. Torch's
own Functions (compiled regions, checkpoints) manage autocast by themselves and are left alone.

Source: ``torch/autograd/function.py`` of torch 2.13; ``torch.amp.custom_bwd`` for what is right.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

_APPLY = ("apply", "apply_boxed")
_STATE = "_equipoise_autocast"


def install(current: Callable[[], Any]) -> Callable[[], None]:
    """From now on each Function's backward runs under what ``current()`` gave at its forward.

    Args:
        current: called at each forward: a factory of the context for its backward, or None for none.

    Returns:
        what undoes it.
    """
    owner: Any = BackwardCFunction
    before = {name: owner.__dict__[name] for name in _APPLY if name in owner.__dict__}

    def remember(ctx: Any) -> None:
        if not ctx._forward_cls.__module__.startswith("torch."):
            ctx.__dict__[_STATE] = current()

    owner.__init__ = remember
    for name, own in before.items():
        setattr(owner, name, _under_forward_state(own))

    def remove() -> None:
        del owner.__init__
        for name, own in before.items():
            setattr(owner, name, own)

    return remove


def _under_forward_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(ctx: Any, *grads: Any) -> Any:
        context = ctx.__dict__.get(_STATE)
        # Under functorch and compiled autograd torch runs Functions by other ways.
        if context is None or torch.compiler.is_compiling():
            return own(ctx, *grads)
        with context():
            return own(ctx, *grads)

    return apply
