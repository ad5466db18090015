"""What each layer costs in each format on this machine, measured on the layer itself.

Enters: layers with the shapes that a real batch gave them. Leaves: a LayerCost for each layer and format,
forward and both backward directions together, the cast of the weight included (autocast casts it every step);
inputs arrive in the format itself, as they do in a chain of layers. Where: before the first planned step.

Layers alike to the clock (type, settings, shapes) are timed once. Each timing is boxed: a kernel that falls
off a cliff (the probe names some: a depthwise stride-2 input gradient in bf16) costs one call, and no more.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..records import LayerCost, Timing

MIN_ROUNDS = 3
MAX_ROUNDS = 15
CHUNK_S = 2e-3
"""A reading lasts at least this long, so that the clock and a thread's start don't decide."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and strides of a floating tensor that a layer was given."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorSpec":
        """What is needed to make a tensor of the same kind."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.requires_grad)

    def make(self, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Random numbers of this shape and layout."""
        values = torch.empty_strided(self.shape, self.strides, dtype=torch.float32, device=device)
        if 0 not in self.strides:  # an expanded tensor's memory is shared: leave it as it is
            values.normal_()
        return values.to(dtype).requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's first call in a real step: arguments with TensorSpec in place of floating tensors."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def key(self, layer: nn.Module) -> str:
        """What two layers must share to cost the same."""
        named = {k: _describe(v) for k, v in self.kwargs.items()}
        return f"{layer!r} {[_describe(a) for a in self.args]} {named}"


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    return [_describe(v) for v in value] if isinstance(value, (list, tuple)) else value


def specs_of(value: Any) -> Any:
    """Arguments with floating tensors replaced by their specs; masks, indices and numbers as they are."""
    if isinstance(value, torch.Tensor):
        plain = value.is_floating_point() and value.layout is torch.strided
        return TensorSpec.of(value) if plain else value.detach()
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(specs_of(v) for v in value)
    return {k: specs_of(v) for k, v in value.items()} if type(value) is dict else value


def _made(value: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(value, TensorSpec):
        return value.make(dtype, device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(_made(v, dtype, device) for v in value)
    return {k: _made(v, dtype, device) for k, v in value.items()} if type(value) is dict else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return [t for v in value.values() for t in _tensors(v)] if isinstance(value, dict) else []


def _runner(
    layer: nn.Module, call: LayerCall, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """One forward and backward of ``layer`` in ``dtype`` on inputs that arrive in it."""
    args, kwargs = _made(call.args, dtype, device), _made(dict(call.kwargs), dtype, device)
    leaves = [t for t in _tensors((args, kwargs)) if t.requires_grad] + [
        p for p in layer.parameters() if p.requires_grad
    ]
    half = dtype is not torch.float32

    def forward() -> list[torch.Tensor]:
        with torch.autocast(device.type, dtype=dtype if half else torch.bfloat16, enabled=half):
            return [t for t in _tensors(layer(*args, **kwargs)) if t.requires_grad]

    grads = [torch.randn_like(t) for t in forward()]

    def run() -> None:
        outputs = forward()
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return run


def _chunk(run: Callable[[], None], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


def time_layer(
    layer: nn.Module, call: LayerCall, formats: Mapping[str, torch.dtype], device: torch.device, box_s: float
) -> dict[str, Timing | str]:
    """Time of forward and backward in each format, interleaved; where one failed, a sentence instead.

    Args:
        layer: measured on a copy without hooks; the layer itself isn't touched.
        call: arguments of a real call.
        formats: format name -> dtype; FP32 first.
        device: where the layer lives.
        box_s: seconds for this layer; every format gets at least one call.
    """
    runners: dict[str, Callable[[], None]] = {}
    times: dict[str, list[float]] = {}
    answer: dict[str, Timing | str] = {}
    calls = 1
    # A process' first backward from given gradients imports part of torch (0.3 s), which is no layer's time.
    x = torch.ones((), device=device, requires_grad=True)
    torch.autograd.grad(x * x, x, torch.ones_like(x))
    began = time.perf_counter()
    try:
        copied = _bare_copy(layer)
    except Exception as error:  # a layer of the user's own may hold anything
        return {name: f"this layer can't be copied: {first_line(error)}" for name in formats}
    for name, dtype in formats.items():
        try:
            run = _runner(copied, call, dtype, device)
            once = _chunk(run, 1)
        except Exception as error:  # whatever a kernel or the layer's own code says
            answer[name] = f"{name} can't run this layer: {first_line(error)}"
            continue
        runners[name], times[name] = run, [once]
        calls = max(1, min(200, int(CHUNK_S / once))) if name == "fp32" else calls
    while runners and len(next(iter(times.values()))) <= MAX_ROUNDS:
        spent = time.perf_counter() - began
        rounds = len(next(iter(times.values()))) - 1
        if spent > box_s or (rounds >= MIN_ROUNDS and spent > box_s / 2 and _told_apart(times)):
            break
        for name, run in runners.items():
            times[name].append(_chunk(run, calls if times[name][0] * calls < 10 * CHUNK_S else 1))
    for name, readings in times.items():
        answer[name] = Timing.of(readings[1:] or readings)
    return answer


def _told_apart(times: Mapping[str, Sequence[float]]) -> bool:
    timings = [Timing.of(t[1:]) for t in times.values()]
    return all(
        a.high_s < b.low_s or b.high_s < a.low_s for i, a in enumerate(timings) for b in timings[i + 1 :]
    )


def first_line(error: Exception) -> str:
    """What went wrong, in one short line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _bare_copy(layer: nn.Module) -> nn.Module:
    # deepcopy refuses what was computed from parameters (weight_norm keeps its weight as such a tensor).
    computed = [v for m in layer.modules() for v in vars(m).values() if isinstance(v, torch.Tensor)]
    memo: dict[int, Any] = {
        id(v): v.detach().clone().requires_grad_(v.requires_grad) for v in computed if not v.is_leaf
    }
    copied = copy.deepcopy(layer, memo)
    for module in copied.modules():
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            getattr(module, hooks).clear()
    return copied


def measure_layers(
    layers: Mapping[str, nn.Module],
    calls: Mapping[str, LayerCall],
    formats: Mapping[str, torch.dtype],
    device: torch.device,
    budget_s: float,
) -> list[LayerCost]:
    """Costs of all layers that were called, the kinds with most copies first, within ``budget_s`` seconds.

    A kind that the budget didn't reach has no cost: whoever decides leaves it at the default.
    """
    kinds: dict[str, list[str]] = {}
    for name, call in calls.items():
        kinds.setdefault(call.key(layers[name]), []).append(name)
    began = time.perf_counter()
    costs: list[LayerCost] = []
    ordered = sorted(
        kinds.items(), key=lambda kind: -len(kind[1]) * gemm_volume(layers[kind[1][0]], calls[kind[1][0]])
    )
    for position, (key, names) in enumerate(ordered):
        left = budget_s - (time.perf_counter() - began)
        if left <= 0:
            break
        box_s = max(0.02, min(0.5, 2 * left / (len(ordered) - position)))
        timed = time_layer(layers[names[0]], calls[names[0]], formats, device, box_s)
        for name in names:
            for fmt, result in timed.items():
                costs.append(
                    LayerCost(
                        layer=name,
                        key=key,
                        format=fmt,
                        time=result if isinstance(result, Timing) else None,
                        note="" if isinstance(result, Timing) else result,
                    )
                )
    return costs


def gemm_volume(layer: nn.Module, call: LayerCall) -> float:
    """Multiplications of the layer's forward, from its weights and the shape of its first input."""
    weights = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    first = next((a for a in call.args if isinstance(a, TensorSpec)), None)
    if first is None or not first.shape:
        return float(weights)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        positions = first.shape[0]
        spatial = zip(first.shape[2:], layer.stride, strict=False)
        for extent, stride in spatial:
            positions *= max(1, int(extent) // int(stride))
        return float(weights * positions)
    rows = 1
    for extent in first.shape[:-1]:
        rows *= extent
    return float(weights * rows)
