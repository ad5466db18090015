"""Autocast in backward: users' own autograd Functions, and forwards that a checkpoint computes again.

Enters: a ``torch.autograd.Function`` without ``custom_fwd`` and ``custom_bwd``, called under
``Session.autocast()``. Leaves: the same gradients, without "expected BFloat16 but found Float": its products
of half gradients with saved FP32 weights are cast as those of its forward were. Where: inside backward.

Torch makes a context object for each call of a Function, and asks the object's class for ``apply`` when
its turn comes in backward. Both are attributes of one Python class, which :func:`install` replaces. Torch's
own Functions (compiled regions) manage autocast by themselves and are left alone.

A checkpoint enters autocast again by itself, but knows nothing of our table. So what it computes again runs
with the flags of its first time, whoever calls backward: a gradient penalty's ``torch.autograd.grad`` too.

Source: ``torch/autograd/function.py`` and ``torch/utils/checkpoint.py`` of torch 2.13;
``torch.amp.custom_bwd`` for what is right.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.utils import checkpoint

_APPLY = ("apply", "apply_boxed")
_STATE = "_equipoise_autocast"
_REENTRANT = "CheckpointFunction"
_NOT_REENTRANT = "_checkpoint_without_reentrant_generator"


def install(current: Callable[[], Any], flags: Callable[[], Any]) -> Callable[[], None]:
    """From now on each Function's backward runs under what ``current()`` gave at its forward.

    Args:
        current: called at each forward: a factory of the context for its backward, or None for none.
        flags: the same for a forward that a checkpoint computes again.

    Returns:
        what undoes it.
    """
    owner: Any = BackwardCFunction
    before = {name: owner.__dict__[name] for name in _APPLY if name in owner.__dict__}
    reentrant = getattr(checkpoint, _REENTRANT)
    generator = getattr(checkpoint, _NOT_REENTRANT)

    def remember(ctx: Any) -> None:
        function = ctx._forward_cls
        if function is reentrant:
            ctx.__dict__[_STATE] = flags()
        elif not function.__module__.startswith("torch."):
            ctx.__dict__[_STATE] = current()

    @wraps(generator)
    def carrying(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return generator(_under(flags(), function), *args, **kwargs)

    owner.__init__ = remember
    for name, own in before.items():
        setattr(owner, name, _under_forward_state(own))
    setattr(checkpoint, _NOT_REENTRANT, carrying)

    def remove() -> None:
        del owner.__init__
        for name, own in before.items():
            setattr(owner, name, own)
        setattr(checkpoint, _NOT_REENTRANT, generator)

    return remove


def _under(context: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    if context is None:
        return function

    def under(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return under


def _under_forward_state(own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(ctx: Any, *grads: Any) -> Any:
        context = ctx.__dict__.get(_STATE)
        # Under functorch and compiled autograd torch runs Functions by other ways.
        if context is None or torch.compiler.is_compiling():
            return own(ctx, *grads)
        with context():
            return own(ctx, *grads)

    return apply
