"""channels_last: the same objects and values, other strides; all of it goes back."""

import pytest
import torch
from torch import nn

from equipoise.step.layout import ChannelsLast, has_conv_weights

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 2), nn.Flatten(), nn.Linear(4 * 49, 4))


def channels_last(t: torch.Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()


def test_weights_gradients_and_state_move_and_come_back() -> None:
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(X).sum().backward()
    opt.step()
    parameters = list(net.parameters())

    def tensors() -> list[torch.Tensor]:
        states = [opt.state[p] for p in parameters]
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        return [*parameters, *(p.grad for p in parameters), *moments]

    before = [(t.stride(), t.detach().clone()) for t in tensors()]
    laid_out = ChannelsLast(net, [opt])
    for conv in (net[0], net[1]):
        state = opt.state[conv.weight]
        assert all(map(channels_last, (conv.weight, conv.weight.grad, state["exp_avg"], state["exp_avg_sq"])))
    assert all(a is b for a, b in zip(net.parameters(), parameters, strict=True))
    laid_out.remove()
    for (stride, value), tensor in zip(before, tensors(), strict=True):
        assert tensor.stride() == stride and torch.equal(tensor, value)


def test_weights_that_were_channels_last_before_stay_so() -> None:
    net = model().to(memory_format=torch.channels_last)
    strides = [p.stride() for p in net.parameters()]
    ChannelsLast(net, []).remove()
    assert [p.stride() for p in net.parameters()] == strides and channels_last(net[0].weight)


def test_an_update_over_both_layouts_gives_the_same_bits() -> None:
    nets = model(), model()
    opts = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
    for step in range(3):
        if step == 1:
            ChannelsLast(nets[1], [opts[1]])
        for net, opt in zip(nets, opts, strict=True):
            for i, p in enumerate(net.parameters()):
                grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
                p.grad = grad.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else grad
            opt.step()
    for a, b in zip(*(net.parameters() for net in nets), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("layer", "has"),
    [(nn.Conv2d(1, 1, 1), True), (nn.ConvTranspose2d(1, 1, 1), True), (nn.Conv1d(1, 1, 1), False)],
)
def test_only_2d_convolutions_have_a_layout_to_choose(layer: nn.Module, has: bool) -> None:
    assert has_conv_weights(nn.Sequential(layer)) is has
