"""A watched step names the module, the direction and the operator where a number stopped being finite."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from equipoise.records import Origin
from equipoise.step.overflow import Probe

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def watched(model: nn.Module, x: torch.Tensor = X, factor: float = 1.0) -> Origin | None:
    probe = Probe(model)
    with probe:
        loss = model(x).float().sum() * factor
        loss.backward()
    probe.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    return probe.origin


class Block(nn.Module):
    """A linear layer, then whatever its function does, by the block itself."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.function(self.first(x)))


def model(function) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(function), nn.Linear(8, 2))


def test_a_sound_step_has_no_origin() -> None:
    assert watched(model(torch.relu)) is None


@pytest.mark.parametrize("again", [False, True])
def test_forward_names_the_module_whose_own_code_it_is(again: bool) -> None:
    def overflow(h: torch.Tensor) -> torch.Tensor:
        return (h.half() * 0 + 300).square().float()

    origin = watched(model((lambda h: checkpoint(overflow, h, use_reentrant=False)) if again else overflow))
    assert origin is not None
    assert (origin.module, origin.backward, origin.half, origin.format) == ("1", False, True, "fp16")
    assert origin.operator in ("pow", "square") and origin.largest == 300


def test_backward_names_it_too_between_two_layers() -> None:
    origin = watched(model(lambda h: torch.sqrt(h - h)))  # 0 forward, 1/0 backward
    assert origin is not None
    assert (origin.module, origin.backward, origin.half) == ("1", True, False)


def test_backward_in_half_tells_the_layer_whose_gradient_is_too_large() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)).half()
    with torch.no_grad():
        net[1].weight.fill_(100.0)
        for layer in net:
            layer.bias.zero_()
    origin = watched(net, X.half() * 1e-3, factor=1000.0)
    assert origin is not None
    assert (origin.module, origin.backward, origin.half) == ("1", True, True)


def test_what_comes_in_bad_is_said_first() -> None:
    net = model(torch.relu)
    spoiled = X.clone()
    spoiled[0, 0] = float("nan")
    origin = watched(net, spoiled)
    assert origin is not None and origin.given == "input"
    with torch.no_grad():
        net[1].second.bias[3] = float("inf")
    origin = watched(net)
    assert origin is not None and origin.given == "weight 1.second.bias"


def test_a_forward_that_raised_leaves_nothing_behind() -> None:
    def fail(h: torch.Tensor) -> torch.Tensor:
        raise ValueError

    net = model(fail)
    probe = Probe(net)
    with pytest.raises(ValueError), probe:
        net(X)
    net[1].function = torch.log
    with probe:
        net(torch.zeros_like(X)).sum()
    probe.remove()
    assert probe.origin is not None and probe.origin.module == "1"


def test_after_the_step_its_context_sees_no_more() -> None:
    net = model(torch.relu)
    probe = Probe(net)
    with probe:
        net(X)
        probe.remove()
        torch.log(torch.zeros(3) - 1)
    assert probe.origin is None


def test_memory_without_meaning_is_not_looked_at() -> None:
    def uninitialised(h: torch.Tensor) -> torch.Tensor:
        return h + torch.empty_like(h).fill_(1.0)

    junk = torch.full((64, 64), float("nan"))
    del junk
    assert watched(model(uninitialised)) is None


def test_a_mask_of_the_lowest_number_is_none() -> None:
    def mask(h: torch.Tensor) -> torch.Tensor:
        lowest = torch.full_like(h, torch.finfo(torch.float32).min).half()
        return torch.softmax(h + torch.where(h > 0, 0.0, lowest.float()), dim=-1)

    assert watched(model(mask)) is None
