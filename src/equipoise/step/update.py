"""From gradients to new weights: unscale -> check -> agree -> clip -> update -> next scale.

Enters: optimizers whose parameters have gradients, scaled or not. Leaves: updated weights, or untouched ones
when a gradient was not finite; a flag which of the two it was, and the gradient norm. Where: inside a step,
after backward.

One decision a step: when any chosen optimizer's gradients are not finite on any rank, none of them moves.
Source: ``torch.amp.GradScaler.step`` for how a fused optimizer reads the flag on the device.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import ranks
from ..errors import SessionError, StallError
from . import gradients
from ._scaling import lacks_momentum
from .narrow import Narrow
from .optim import cloned_state, inner_optimizer
from .scaler import LossScaler, NullScaler


class Updater:
    """The end of a step for one session.

    Args:
        device: where the parameters are.
        alike: whether all ranks see the same gradients once backward ends: one process, or data-parallel.
    """

    def __init__(self, device: torch.device, *, alike: bool) -> None:
        self.use(NullScaler())
        self.unscaled = False
        """Whether this window's gradients have their true size."""
        self.check = gradients.FiniteCheck(device)
        """Whether the gradients are finite."""
        self._one = torch.ones((), device=device)
        self._alike = alike
        self.narrow: Narrow | None = None
        """What keeps weights or state narrow between steps."""
        self._factor: torch.Tensor | None = None

    def use(self, scaler: LossScaler | NullScaler) -> None:
        """The scaler from now on."""
        self.scaler = scaler
        self.scales = scaler.is_enabled()
        """Whether gradients carry a scale."""

    @property
    def plain(self) -> bool:
        """Whether a step neither scales nor narrows, nor waits for other ranks or a device."""
        return not self.scales and self.narrow is None and self._alike and self.check.on_host() is not None

    def unscale(self, optimizers: Sequence[Any]) -> None:
        """Bring gradients to their true size; nothing where no scale is used."""
        if self.scales:
            for optimizer in _with_gradients(optimizers):
                self.scaler.unscale_(optimizer)
        self.unscaled = True

    def check_and_clip(
        self,
        optimizers: Sequence[Any],
        parameters: Sequence[torch.Tensor],
        grads: list[torch.Tensor],
        max_grad_norm: float | None,
    ) -> torch.Tensor | None:
        """Set the flag, alike on all ranks, and clip; returns the norm before, None without a limit."""
        norm = None
        if max_grad_norm is not None:
            if not max_grad_norm > 0:
                raise SessionError(
                    f"max_grad_norm is {max_grad_norm}; it must be above 0, or None for no clipping"
                )
            if grads and self.narrow is None:
                norm = gradients.clip(parameters, grads, max_grad_norm)
            elif grads:  # bf16 gradients are multiplied once they are FP32
                norm = gradients.global_norm(grads)
                self._factor = gradients.clip_factor(norm, max_grad_norm)
        if norm is None:
            self.check(grads)
        else:
            self.check.of_norm(norm)
        if self.scales and grads:
            scaled = _with_gradients(optimizers)
            self.check.found.copy_(torch.maximum(self.check.found, self.scaler.found_inf(*scaled)))
            if not self._alike:
                ranks.agree_max(self.check.found)
            self.scaler.set_found_inf(self.check.found, *scaled)
        elif not self._alike:
            ranks.agree_max(self.check.found)
        return norm

    def update(self, optimizers: Sequence[Any]) -> bool | torch.Tensor:
        """Step each optimizer that has gradients unless the flag is up; returns the flag.

        On the CPU the flag is in host memory. Elsewhere a fused optimizer reads it on the device; any other
        costs one read.
        """
        skipped: bool | torch.Tensor | None = self.check.on_host()
        if skipped is None:
            skipped = self.check.found
        if skipped is False and len(optimizers) == 1 and self.narrow is None:
            optimizers[0].step()
            return False
        factor, self._factor = self._factor, None
        for optimizer in optimizers:
            if not _has_gradients(optimizer):
                continue
            inner = inner_optimizer(optimizer)
            if isinstance(skipped, torch.Tensor):
                # A fused SGD that skips its first step leaves its momentum unset: that step reads the flag.
                if getattr(inner, "_step_supports_amp_scaling", False) and not lacks_momentum(inner):
                    inner.grad_scale, inner.found_inf = None, skipped
                    try:
                        self._step(optimizer, factor)
                    finally:
                        del inner.grad_scale, inner.found_inf
                    continue
                skipped = bool(skipped.item())
            if not skipped:
                self._step(optimizer, factor)
        return skipped

    def _step(self, optimizer: Any, factor: torch.Tensor | None) -> None:
        if self.narrow is None:
            optimizer.step()
        else:
            self.narrow.step(optimizer, factor)

    def close(self, *, loud: bool = True) -> torch.Tensor:
        """Go to the next scale; returns the one that this window had, a copy on the device.

        Raises:
            StallError: the scaler has skipped at its floor for long, and ``loud``.
        """
        scale: torch.Tensor = self.scaler.scale(self._one)
        try:
            self.scaler.update()
        except StallError:  # its scale has moved already
            if loud:
                raise
        return scale

    def step_closure(
        self, optimizer: Any, evaluate: Callable[[], torch.Tensor], max_grad_norm: float | None
    ) -> bool:
        """A step whose optimizer evaluates the loss more than once, under one scale; returns the skip.

        Args:
            optimizer: calls the closure that it is given.
            evaluate: forward and backward from zeroed gradients; returns the loss.
            max_grad_norm: clips at each evaluation.
        """
        inner = inner_optimizer(optimizer)
        weights = [(p, p.detach().clone()) for group in inner.param_groups for p in group["params"]]
        state = cloned_state(inner)

        def closure() -> torch.Tensor:
            self.scaler.forget(optimizer)
            self.unscaled = False
            loss = evaluate()
            self.unscale([optimizer])
            parameters, grads = gradients.collect([optimizer])
            self.check_and_clip([optimizer], parameters, grads, max_grad_norm)
            if bool(self.check.found.item()):
                raise _NotFinite
            return loss

        try:
            optimizer.step(closure)
        except _NotFinite:
            with torch.no_grad():
                for parameter, value in weights:
                    parameter.copy_(value)
            inner.state.clear()
            inner.state.update(state)
            return True
        return False


class _NotFinite(Exception):
    """Leaves an optimizer's own loop of evaluations; never reaches the user."""


def _has_gradients(optimizer: Any) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _with_gradients(optimizers: Sequence[Any]) -> list[Any]:
    return [o for o in optimizers if _has_gradients(o)]
