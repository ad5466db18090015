"""Memory format of weights, changed in place and put back.

Enters: a model. Leaves: the same parameters (same objects, same values) with 4-d ones laid out NHWC. Where:
before the first step of a plan; convolutions then pass NHWC activations on by themselves.
"""

from typing import Any

import torch
from torch import nn

from .optim import lay_out_state


def _is_conv_weight(parameter: torch.Tensor) -> bool:
    return parameter.dim() == 4 and type(parameter.data) is torch.Tensor


def has_conv_weights(model: nn.Module) -> bool:
    """Whether the model has 2-d convolutions, which is what a layout can speed up."""
    return any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())


class ChannelsLast:
    """4-d weights in ``channels_last``; :meth:`remove` restores each one's strides.

    Gradients and optimizer state that exist already are laid out alike, since an update over two layouts is
    slow. State that is saved leaves in the layout
    that the weight had, and state that is loaded gets the present one: torch's fused update needs them alike.
    """

    def __init__(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._before: list[tuple[nn.Parameter, bool]] = []
        for module in model.modules():
            if not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                continue
            for parameter in module._parameters.values():
                if parameter is not None and _is_conv_weight(parameter):
                    self._before.append((parameter, parameter.is_contiguous()))
                    self._lay_out(parameter, torch.channels_last)
        self._handles = [
            handle
            for optimizer in optimizers
            if isinstance(optimizer, torch.optim.Optimizer)
            for handle in (
                optimizer.register_state_dict_post_hook(self._as_it_was),
                optimizer.register_load_state_dict_post_hook(lay_out_state),
            )
        ]

    def _as_it_was(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        moved = {id(p) for p, contiguous in self._before if contiguous}
        state = dict(saved["state"])
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        indices = [i for group in saved["param_groups"] for i in group["params"]]
        for parameter, index in zip(parameters, indices, strict=False):
            if id(parameter) in moved and index in state:
                state[index] = {
                    key: value.contiguous()
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state[index].items()
                }
        return {**saved, "state": state}

    def _lay_out(self, parameter: nn.Parameter, memory_format: torch.memory_format) -> None:
        with torch.no_grad():
            parameter.data = parameter.data.contiguous(memory_format=memory_format)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous(memory_format=memory_format)
            for optimizer in self._optimizers:
                state = optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                        state[key] = value.contiguous(memory_format=memory_format)

    def remove(self) -> None:
        """Back to the layout each weight had."""
        for parameter, contiguous in self._before:
            if contiguous:
                self._lay_out(parameter, torch.contiguous_format)
        self._before.clear()
        for handle in self._handles:
            handle.remove()
