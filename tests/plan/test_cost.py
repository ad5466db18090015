"""The time of layers: on a copy, in a box, and a sentence where there is no time."""

import time

import pytest
import torch
from torch import nn

from equipoise.plan.cost import LayerCall, TensorSpec, gemm_volume, measure_layers, specs_of, time_layer

CPU = torch.device("cpu")
BOTH = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Slow(nn.Module):
    """A layer that takes its time, most of it in half."""

    half_calls = 0
    """Of all of them: what is timed is a copy."""

    def __init__(self, wide_s: float, half_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.wide_s, self.half_s = wide_s, half_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = x.dtype is torch.bfloat16
        Slow.half_calls += half
        time.sleep(self.half_s if half else self.wide_s)
        return x * self.weight


class Fails(nn.Module):
    """A layer without a kernel for half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise NotImplementedError("no kernel for BFloat16\nand a long tail of frames")
        return x * 2


def call(*shape: int, grad: bool = True) -> LayerCall:
    return LayerCall((TensorSpec.of(torch.ones(shape).requires_grad_(grad)),), {})


def test_a_layer_is_timed_in_turns_and_told_apart() -> None:
    timed = time_layer(Slow(0.001, 0.02), call(2), BOTH, CPU, box_s=0.2)
    assert timed["fp32"].low_s >= 0.001 and timed["bf16"].low_s >= 0.02
    assert timed["fp32"].median_s < timed["bf16"].median_s


def test_a_slow_kernel_costs_one_call_and_no_more() -> None:
    before = Slow.half_calls
    timed = time_layer(Slow(0.0, 0.1), call(2), BOTH, CPU, box_s=0.05)
    assert Slow.half_calls - before == 2  # one for the gradients' shapes, and one that is timed
    assert timed["bf16"].median_s >= 0.1 and timed["bf16"].rounds == 1


def test_a_budget_ends_the_measuring_with_the_largest_kinds_done() -> None:
    layers = {"small": nn.Linear(4, 4), "slow": Slow(0.2, 0.2), "large": nn.Linear(64, 64)}
    calls = {"small": call(2, 4), "slow": call(2), "large": call(2, 64)}
    costs = measure_layers(layers, calls, BOTH, CPU, budget_s=1e-9)
    assert costs == []
    names = [c.layer for c in measure_layers(layers, calls, BOTH, CPU, budget_s=0.2)]
    assert names[0] == "large"


def test_a_layer_that_raises_has_a_note_and_no_time() -> None:
    found = {c.format: c for c in measure_layers({"a": Fails()}, {"a": call(2)}, BOTH, CPU, 0.1)}
    wide, half = found["fp32"], found["bf16"]
    assert wide.time is not None and wide.note == ""
    assert half.time is None and half.note == "bf16 can't run this layer: no kernel for BFloat16"


def test_alike_layers_are_timed_once_and_share_the_figure() -> None:
    layers = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 4)}
    calls = {name: call(3, 8) for name in layers}
    costs = {(c.layer, c.format): c for c in measure_layers(layers, calls, BOTH, CPU, 1.0)}
    assert costs["a", "bf16"].time is costs["b", "bf16"].time
    assert costs["a", "fp32"].key == costs["b", "fp32"].key != costs["c", "fp32"].key
    other = measure_layers({"a": layers["a"]}, {"a": call(4, 8)}, BOTH, CPU, 0.1)
    assert other[0].key != costs["a", "fp32"].key


def test_the_layer_itself_is_not_touched() -> None:
    layer, seen = nn.BatchNorm1d(4), []
    layer.register_forward_hook(lambda *_: seen.append(1))
    state = {k: v.clone() for k, v in layer.state_dict().items()}
    time_layer(layer, call(8, 4), BOTH, CPU, 0.02)
    assert not seen and layer.weight.grad is None
    assert all(torch.equal(v, state[k]) for k, v in layer.state_dict().items())


def test_arguments_are_kept_by_their_kind() -> None:
    mask, half = torch.ones(2, dtype=torch.bool), torch.ones(4, 6).t()
    args, kwargs = specs_of((half, [mask, 3], None)), specs_of({"x": (half,), "flag": True})
    assert args[0] == TensorSpec((6, 4), (1, 6), False) and kwargs["x"][0] == args[0]
    assert args[1][1] == 3 and args[2] is None and kwargs["flag"] is True
    made = args[0].make(torch.bfloat16, CPU)
    assert (made.shape, made.stride(), made.dtype) == ((6, 4), (1, 6), torch.bfloat16)
    expanded = TensorSpec.of(torch.ones(1, 3).expand(5, 3)).make(torch.float32, CPU)
    assert expanded.shape == (5, 3)


@pytest.mark.parametrize(
    ("layer", "shape", "volume"),
    [
        (nn.Linear(8, 4), (3, 5, 8), 3 * 5 * 8 * 4),
        (nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), (3, 2, 8, 8), 3 * 4 * 4 * (4 * 2 * 9)),
    ],
)
def test_volume_is_the_multiplications_of_the_forward(layer: nn.Module, shape, volume: int) -> None:
    assert gemm_volume(layer, call(*shape)) == volume
