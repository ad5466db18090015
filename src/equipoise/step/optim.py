"""Optimizers: the one-kernel (fused) update, switched on in place and put back; their state, kept whole.

Enters: the user's optimizer. Leaves: the same object, whose ``step`` uses torch's fused kernel. Where: at the
end of a step. The fused kernel computes the same update and may differ from the loop over parameters in the
last digits. On the CPU it walks weight and state in memory order: state that lies otherwise than its weight
would be mixed up without a word (torch 2.13), so it is laid out alike before.

A state dict that leaves the optimizer has the user's own settings, and one that enters doesn't switch the
kernel.
Source: ``torch.optim`` (``fused=``, and the attributes that ``GradScaler`` reads from a fused optimizer).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import SessionError

_FUSABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
_SETTINGS = ("fused", "foreach")
_AMP_ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def inner_optimizer(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that keeps it as ``.optimizer``; itself otherwise."""
    seen = set()
    while not isinstance(optimizer, torch.optim.Optimizer) and id(optimizer) not in seen:
        seen.add(id(optimizer))
        optimizer = getattr(optimizer, "optimizer", optimizer)
    return optimizer


def distinct_optimizers(optimizers: Sequence[Any]) -> list[Any]:
    """Optimizers without repeats; a wrapper and its inner optimizer count as one (the wrapper).

    Raises:
        SessionError: something that is no optimizer.
    """
    kept: list[Any] = []
    for o in optimizers:
        if not (hasattr(o, "param_groups") and callable(getattr(o, "step", None))):
            raise SessionError(
                f"optimizer is {type(o).__name__}; a torch.optim optimizer or a list of them is needed"
            )
        same = [k for k in kept if inner_optimizer(k) is inner_optimizer(o)]
        if not same:
            kept.append(o)
        elif same[0] is inner_optimizer(o):
            kept[kept.index(same[0])] = o
    return kept


def can_fuse(optimizer: Any) -> bool:
    """Whether torch has a fused kernel for every parameter of this optimizer, and the user left the choice
    open.
    """
    optimizer = inner_optimizer(optimizer)
    if type(optimizer) not in _FUSABLE:
        return False
    for group in optimizer.param_groups:
        if group.get("fused") is not None:  # False is a choice too
            return False
        if any(group.get(key) for key in ("differentiable", "capturable", "foreach")):
            return False
        for p in group["params"]:
            if not (p.is_floating_point() and type(p.data) is torch.Tensor and p.layout is torch.strided):
                return False
            if p.device.type not in ("cpu", "cuda", "xpu", "mps"):
                return False
            if p.grad is not None and p.grad.layout is not torch.strided:
                return False
            if p.device.type != "cpu" and isinstance(optimizer, torch.optim.Adagrad):
                return False
    return True


class Fused:
    """The fused update switched on in one optimizer; :meth:`remove` restores every setting."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = inner_optimizer(optimizer)
        self._defaults = dict(self._optimizer.defaults)
        # By position: loading a state makes new groups, and groups are only ever added at the end.
        self._settings = [{k: group.get(k) for k in _SETTINGS} for group in self._optimizer.param_groups]
        self._attributes = {k: self._optimizer.__dict__.get(k) for k in _AMP_ATTRIBUTES}
        self._optimizer.defaults["fused"] = True  # groups that the user adds later
        for key in _AMP_ATTRIBUTES:
            setattr(self._optimizer, key, True)
        self._switch_on(self._optimizer)
        self._handles = [
            self._optimizer.register_load_state_dict_post_hook(self._switch_on),
            self._optimizer.register_state_dict_post_hook(self._leave_out),
        ]

    def _switch_on(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["fused"] = True
            group["foreach"] = False
        lay_out_state(optimizer)
        self._move_step_counts(to_device=True)

    def _leave_out(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        groups = [{**group, **self._own(i)} for i, group in enumerate(state["param_groups"])]
        return {**state, "param_groups": groups}

    def _own(self, index: int) -> dict[str, Any]:
        """The user's settings of a group; the optimizer's defaults for one added since."""
        if index < len(self._settings):
            return self._settings[index]
        return {k: self._defaults.get(k) for k in _SETTINGS}

    def _move_step_counts(self, *, to_device: bool) -> None:
        # The fused kernel wants the count beside the weights, the other updates want it on the host.
        for parameter, state in self._optimizer.state.items():
            count = state.get("step")
            if isinstance(count, torch.Tensor) and parameter.device.type != "cpu":
                state["step"] = count.to(parameter.device if to_device else "cpu", torch.float32)

    def remove(self) -> None:
        """Back to the user's own settings, for groups added since too."""
        for handle in self._handles:
            handle.remove()
        self._move_step_counts(to_device=False)
        self._optimizer.defaults["fused"] = self._defaults.get("fused")
        for i, group in enumerate(self._optimizer.param_groups):
            group.update(self._own(i))
        for key, value in self._attributes.items():
            if value is None:
                self._optimizer.__dict__.pop(key, None)
            else:
                setattr(self._optimizer, key, value)


def lay_out_state(optimizer: torch.optim.Optimizer) -> None:
    """Lay out each state tensor as its weight lies in memory; values stay."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if (
                type(value) is torch.Tensor
                and value.shape == parameter.shape
                and value.stride() != parameter.stride()
            ):
                state[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _cloned(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {k: _cloned(v) for k, v in value.items()}
    return [_cloned(v) for v in value] if isinstance(value, list) else value


def cloned_state(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    """Parameter -> a copy of its state, in memory of its own."""
    return {parameter: _cloned(state) for parameter, state in optimizer.state.items()}


def load_optimizer(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """``optimizer.load_state_dict`` that keeps each tensor's own dtype and this optimizer's kernel.

    Torch casts state to the weights' dtype, and takes ``fused`` and ``foreach`` from the state.
    """
    inner = inner_optimizer(optimizer)
    kernels = [{k: group[k] for k in _SETTINGS if k in group} for group in inner.param_groups]
    optimizer.load_state_dict(saved)
    for group, kernel in zip(inner.param_groups, kernels, strict=True):
        group.update(kernel)
    by_index = saved.get("state", {})
    parameters = [p for group in inner.param_groups for p in group["params"]]
    indices = [i for group in saved.get("param_groups", ()) for i in group["params"]]
    for parameter, index in zip(parameters, indices, strict=False):
        own = inner.state.get(parameter, {})
        for key, value in by_index.get(index, {}).items():
            if isinstance(value, torch.Tensor) and key in own and own[key].dtype != value.dtype:
                own[key] = value.detach().to(own[key].device, copy=True)
    lay_out_state(inner)
