"""Regions under ``torch.compile``: their borders, so that a policy holds in their backward too.

Enters: the user's models, some of whose modules were compiled by the user. Leaves: the same, with each border
between eager and compiled code leaving autocast behind. Where: inside a step, around a compiled forward.

The backward of a compiled region is traced together with its forward, in the autocast state from *outside*
the region: under an outer autocast the products of a layer kept in FP32 run their backward in half
(torch 2.13; docs/LOG.md has the experiment). So a border switches the outer autocast off and raises a flag,
and the region's first module enters the policy's format inside, where torch records it in the graph and
leaves it before backward. The flag is autocast state, which guards compiled code: outside of
``Session.autocast()`` the same model compiles, once, to its own FP32 code.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .operators import REGION


def regions(models: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Each border in the models: its owner, the attribute that calls compiled code, the module inside."""
    seen: set[int] = set()
    for model in models:
        for module in model.modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            inner = module._modules.get("_orig_mod")
            if inner is not None and "dynamo_ctx" in module.__dict__:
                yield module, "forward", inner
            elif module._compiled_call_impl is not None:
                yield module, "_compiled_call_impl", module


class Borders:
    """Autocast left behind at every border; :meth:`remove` takes that away."""

    def __init__(self, models: Sequence[nn.Module], device: str) -> None:
        self._before: list[tuple[nn.Module, str, Any]] = []
        self.inside: list[nn.Module] = []
        """The first module of each region."""
        for owner, attribute, inner in regions(models):
            compiled = getattr(owner, attribute)
            self._before.append((owner, attribute, compiled))
            object.__setattr__(owner, attribute, _leaving_autocast(compiled, device))
            self.inside.append(inner)

    def remove(self) -> None:
        """Give each owner its own call back."""
        for owner, attribute, compiled in self._before:
            object.__setattr__(owner, attribute, compiled)
        self._before.clear()


def _leaving_autocast(compiled: Callable[..., Any], device: str) -> Callable[..., Any]:
    def enter_region(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_autocast_enabled(device) or torch.compiler.is_compiling():
            return compiled(*args, **kwargs)
        torch.clear_autocast_cache()  # a weight changed by hand inside a context must be seen
        before = torch.is_autocast_enabled(REGION)
        torch.set_autocast_enabled(REGION, True)
        try:
            with torch.autocast(device, enabled=False):
                return compiled(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(REGION, before)

    return enter_region
