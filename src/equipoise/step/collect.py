"""Everything that passes a layer, counted by exponent: hooks on a model in FP32 training; removable.

Enters: a model, its optimizer, and the steps that run inside :meth:`Collector.watching`. Leaves: for each
layer histograms of its weights, activations (the module's outputs), their gradients, weight gradients and
*updates* (weight after minus before the optimizer's step), and the share of updates that narrow weights would
swallow. Where: on sampled steps. Source: torch's module, tensor and optimizer hooks.

One pass over a sample of each tensor: every n-th number with an odd n (sizes of layers are even, so that all
rows and columns are met), another start in each step. A sampled number stands for n, so that a layer's small
tensors don't outweigh its large ones. The cost, about 0.1 ms a tensor on a CPU, is one histogram of at most
``sample`` numbers for each of the five kinds and layers, and a host sync in each; a step that isn't watched
pays one comparison a hook.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import SessionError
from .cast import dtype_of, layers
from .ranges import LOSSY, exponent_counts

KINDS = ("weights", "activations", "activation_gradients", "weight_gradients", "updates")
"""What is counted of a layer."""

SAMPLE = 1 << 14
"""Numbers looked at of each tensor: a share is then known to 0.004 (one standard deviation)."""


class Collector:
    """Histograms of one model's steps; :meth:`remove` takes its hooks away.

    Args:
        model: in FP32; its layers are the modules that own parameters, and the user's own modules without
            any inside.
        optimizers: those that update it.
        sample: most numbers looked at of a tensor in a step.

    Raises:
        SessionError: the model has no parameters, or ``sample`` is below 1.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, sample: int = SAMPLE
    ) -> None:
        if sample < 1:
            raise SessionError(f"sample is {sample}; at least 1 number of each tensor must be looked at")
        self._sample = sample
        self._on = False
        self.steps = 0
        """Steps watched."""
        self._counts: dict[tuple[str, str], torch.Tensor] = {}
        self._swallowed: dict[tuple[str, str], tuple[int, int]] = {}
        self._owners: dict[nn.Parameter, str] = {}  # a shared weight belongs to the first layer that has it
        self._before: dict[nn.Parameter, torch.Tensor] = {}
        self._handles: list[Any] = []
        self.layers = [name for name, _ in watched_layers(model)]
        """Names of the layers, in the model's order."""
        for name, module in watched_layers(model):
            for p in module._parameters.values():
                if p is not None:
                    self._owners.setdefault(p, name)
        if not self._owners:
            raise SessionError(
                f"the model ({type(model).__name__}) has no parameters; give the model that the optimizer "
                "updates: there is nothing else to look at"
            )
        for name, module in watched_layers(model):
            self._handles.append(module.register_forward_hook(partial(self._forward, name)))
        for p, name in self._owners.items():
            if p.requires_grad:
                hook = partial(self._weight_gradient, name)
                self._handles.append(
                    p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                )
        for optimizer in optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what happens inside: one whole step. Compiled regions run eagerly meanwhile."""
        self._on = True
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            self._on = False
            self.steps += 1
            self._before.clear()

    def remove(self) -> None:
        """Take the hooks away; what was counted stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def histograms(self) -> dict[str, dict[str, torch.Tensor]]:
        """Layer -> kind -> counts as of ``exponent_counts``, on the CPU; one that never came is absent."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name in self.layers:
            kinds = {k: self._counts[name, k].cpu() for k in KINDS if (name, k) in self._counts}
            if kinds:
                found[name] = kinds
        return found

    def swallowed(self) -> dict[str, dict[str, float]]:
        """Layer -> format -> share of the updates, zeros aside, that weights in this format don't feel."""
        found: dict[str, dict[str, float]] = {}
        for (name, fmt), (lost, of) in self._swallowed.items():
            if of:
                found.setdefault(name, {})[fmt] = lost / of
        return found

    # -- the hooks, in a step's order

    def _forward(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if not self._on:
            return
        for tensor in _floating(out):
            self._count(name, "activations", tensor)
            if tensor.requires_grad:
                tensor.register_hook(partial(self._activation_gradient, name))  # type: ignore[no-untyped-call]

    def _activation_gradient(self, name: str, grad: torch.Tensor) -> None:
        if self._on:
            self._count(name, "activation_gradients", grad)

    def _weight_gradient(self, name: str, p: torch.Tensor) -> None:
        if self._on and p.grad is not None:
            self._count(name, "weight_gradients", p.grad)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._on:
            return
        for p in _parameters(optimizer):
            if p in self._owners and p not in self._before:
                self._before[p] = self._sampled(p).clone()

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not self._on:
            return
        for p in _parameters(optimizer):
            before = self._before.pop(p, None)
            if before is None:
                continue
            name = self._owners[p]
            update = self._sampled(p) - before
            self._add(name, "weights", before, p)
            self._add(name, "updates", update, p)
            self._count_swallowed(name, before, update)

    # -- counting

    def _count(self, name: str, kind: str, tensor: torch.Tensor) -> None:
        self._add(name, kind, self._sampled(tensor), tensor)

    def _add(self, name: str, kind: str, sampled: torch.Tensor, whole: torch.Tensor) -> None:
        counts = exponent_counts(sampled) * self._stride(_numbers(whole))
        key = name, kind
        if key in self._counts:
            self._counts[key] += counts.to(self._counts[key].device)
        else:
            self._counts[key] = counts

    def _sampled(self, tensor: torch.Tensor) -> torch.Tensor:
        numbers = _numbers(tensor)
        stride = self._stride(numbers)
        return numbers.reshape(-1)[self.steps % stride :: stride]

    def _stride(self, numbers: torch.Tensor) -> int:
        return -(-numbers.numel() // self._sample) | 1

    def _count_swallowed(self, name: str, before: torch.Tensor, update: torch.Tensor) -> None:
        moved = update != 0
        for fmt in LOSSY:
            dtype = dtype_of(fmt)
            narrow = before.to(dtype).float()
            lost = ((narrow + update).to(dtype).float() == narrow) & moved
            old, of = self._swallowed.get((name, fmt), (0, 0))
            self._swallowed[name, fmt] = old + int(lost.sum()), of + int(moved.sum())


def watched_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own parameters, and modules without any inside that aren't torch's own, in order.

    Torch's own modules without parameters (activations, pooling, dropout) pass on or bound what a layer made.
    """
    own = dict(layers(model))
    for name, module in model.named_modules():
        leaf = next(module.children(), None) is None
        if name in own or (leaf and not type(module).__module__.startswith("torch.nn.")):
            yield name, module


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _floating(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        yield from _floating(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _floating(v)
