"""Hysteresis, caps that change with time, scales of groups; each beside the rule written out by hand."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from equipoise import Session
from equipoise.errors import SessionError
from equipoise.step.scaler import LossScaler


def move(scaler: LossScaler, bad: bool) -> float:
    """One step of a single weight whose gradient is finite or not; the next scale."""
    p = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler.scale((p * (float("inf") if bad else 1.0)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


# -- hysteresis


def by_hand(bad: list[bool], patience: int, interval: int, scale: float) -> list[float]:
    """Megatron's rule in plain Python."""
    left, tracker, scales = patience, 0, []
    for found in bad:
        if found:
            tracker, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, 2.0**-24)
        else:
            tracker += 1
            if tracker == interval:
                tracker, left, scale = 0, patience, min(scale * 2.0, 2.0**48)
        scales.append(scale)
    return scales


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_hysteresis_follows_the_rule(bad: list[bool], patience: int, interval: int) -> None:
    scaler = LossScaler("cpu", init_scale=256.0, growth_interval=interval, hysteresis=patience)
    assert [move(scaler, b) for b in bad] == by_hand(bad, patience, interval, 256.0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=20), st.data())
def test_a_resumed_scaler_has_as_much_patience_left(bad: list[bool], data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(bad) - 1))
    options = {"init_scale": 64.0, "growth_interval": 3, "hysteresis": 3}
    whole, first, second = (LossScaler("cpu", **options) for _ in range(3))
    expected = [move(whole, b) for b in bad]
    got = [move(first, b) for b in bad[:at]]
    second.load_state_dict(first.state_dict())
    assert got + [move(second, b) for b in bad[at:]] == expected


def test_two_optimizers_updated_after_each_use_up_patience_once() -> None:
    scales = []
    for after_each in (False, True):
        scaler = LossScaler("cpu", init_scale=64.0, hysteresis=2)
        history = []
        for _ in range(4):
            ps = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
            optimizers = [torch.optim.SGD([p], lr=0.1) for p in ps]
            scaler.scale(sum((p * float("inf")).sum() for p in ps)).backward()
            for o in optimizers:
                scaler.step(o)
                if after_each:
                    scaler.update()
            scaler.update()
            history.append(scaler.get_scale())
        scales.append(history)
    assert scales[0] == scales[1] == [64.0, 32.0, 16.0, 8.0]


# -- caps


def test_a_cap_that_changes_holds_from_its_step_on() -> None:
    scaler = LossScaler("cpu", init_scale=4.0, growth_interval=1, caps=[(0, 32.0), (6, 8.0), (8, 128.0)])
    assert [move(scaler, False) for _ in range(12)] == [8, 16, 32, 32, 32, 8, 8, 16, 32, 64, 128, 128]


def test_a_resumed_scaler_goes_on_in_the_schedule() -> None:
    options = {"init_scale": 4.0, "growth_interval": 1, "caps": [(0, 32.0), (6, 8.0)]}
    whole, first, second = (LossScaler("cpu", **options) for _ in range(3))
    expected = [move(whole, False) for _ in range(10)]
    got = [move(first, False) for _ in range(4)]
    second.load_state_dict(first.state_dict())
    assert got + [move(second, False) for _ in range(6)] == expected


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"hysteresis": 1.5}, "hysteresis is 1.5"),
        ({"caps": [(5, 2.0**20)]}, "the first of them 0"),
        ({"caps": [(0, 2.0**20), (0, 2.0**18)]}, "rising steps"),
        ({"caps": [(0, 2.0**60)]}, "the cap from step 0 on"),
        ({"caps": [(0, 2.0**10)]}, "above the first cap"),
    ],
)
def test_settings_that_can_not_be_are_refused(options: dict, words: str) -> None:
    with pytest.raises(SessionError, match=words):
        LossScaler("cpu", **options)


# -- groups


class Net(nn.Module):
    """Two branches with a residual, one of them a group."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.branch, self.head = (
            nn.Linear(6, 6),
            nn.Sequential(nn.Linear(6, 6), nn.Tanh()),
            nn.Linear(6, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        return self.head(h + self.branch(h))


X, Y = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 1, 0])

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
}


def train(
    name: str, groups: dict[str, float], *, clip: bool, accumulate: int = 1
) -> tuple[list, list[float]]:
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    scaler = LossScaler("cpu", init_scale=1024.0, growth_interval=4)
    for path, factor in groups.items():
        scaler.add_group(net.get_submodule(path), factor)
    scales = []
    for step in range(8):
        for _ in range(accumulate):
            loss = nn.functional.cross_entropy(net(X), Y) / accumulate
            scaler.scale(loss * (float("inf") if step == 5 else 1.0)).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return [p.detach() for p in net.parameters()], scales


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("groups", [{"branch": 2.0**7}, {"branch": 2.0**-5, "branch.0": 2.0**9}, {"": 8.0}])
def test_a_groups_factor_changes_no_bit_of_the_training(name: str, clip: bool, groups: dict) -> None:
    expected, expected_scales = train(name, {}, clip=clip)
    got, scales = train(name, groups, clip=clip)
    assert scales == expected_scales
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_groups_gradients_really_carry_the_factor() -> None:
    grads = []
    for factor in (1.0, 2.0**10):
        net = Net()
        scaler = LossScaler("cpu", init_scale=2.0)
        scaler.add_group(net.branch, factor)
        seen: list[torch.Tensor] = []
        net.branch[0].register_full_backward_hook(lambda m, i, out, seen=seen: seen.append(out[0]))
        scaler.scale(nn.functional.cross_entropy(net(X), Y)).backward()
        grads.append((seen[0], net.branch[0].weight.grad, net.stem.weight.grad))
    assert torch.equal(grads[1][0], grads[0][0] * 2.0**10)
    assert torch.equal(grads[1][1], grads[0][1] * 2.0**10)
    assert torch.equal(grads[1][2], grads[0][2])


def test_a_group_saves_gradients_that_fp16_would_flush() -> None:
    """A branch whose gradients are 2**-42 of the others': one scale can't serve both."""

    class Weak(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.strong, self.weak = (
                nn.Linear(6, 3),
                nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3)),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.strong(x).float() * 64 + self.weak(x).float() * 2.0**-36

    def flushed(factor: float) -> float:
        net = Weak()
        scaler = LossScaler("cpu", init_scale=2.0**8)
        scaler.add_group(net.weak, factor)
        session = Session(
            net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16", emulate=True, scaler=scaler
        )
        with session.autocast():
            loss = nn.functional.cross_entropy(net(X), Y)
        session.backward(loss)
        session.unscale()
        assert bool(net.strong.weight.grad.isfinite().all())
        return float((net.weak[0].weight.grad == 0).float().mean())

    assert flushed(1.0) == 1.0
    assert flushed(2.0**16) < 0.5


def test_groups_rest_where_no_loss_is_scaled() -> None:
    nets = []
    for group in (False, True):
        net = Net()
        scaler = LossScaler("cpu")
        if group:
            scaler.add_group(net.branch, 2.0**10)
        session = Session(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp32", scaler=scaler)
        session.step(nn.functional.cross_entropy(net(X), Y))
        nets.append([p.detach() for p in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*nets, strict=True))


def test_a_weight_inside_and_outside_of_a_group_is_refused() -> None:
    net = Net()
    net.head.weight = nn.Parameter(torch.randn(6, 6))
    net.branch[0].weight = net.head.weight
    scaler = LossScaler("cpu")
    scaler.add_group(net.branch, 4.0)
    with pytest.raises(SessionError, match="shared with 'head'"):
        Session(net, torch.optim.SGD(net.parameters(), lr=0.1), precision="fp16", emulate=True, scaler=scaler)


@pytest.mark.parametrize("factor", [0.0, 3.0, -2.0, float("nan"), float("inf"), 2.0**60])
def test_a_factor_that_would_change_digits_is_refused(factor: float) -> None:
    with pytest.raises(SessionError, match="powers of two"):
        LossScaler("cpu").add_group(nn.Linear(2, 2), factor)


def test_misuse_of_groups_is_named() -> None:
    scaler = LossScaler("cpu")
    layer = nn.Linear(2, 2)
    scaler.add_group(layer, 2.0)
    with pytest.raises(SessionError, match="is a scale group already"):
        scaler.add_group(layer, 4.0)
    with pytest.raises(SessionError, match="is a module"):
        scaler.add_group(layer.weight, 4.0)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="can't be pickled or copied"):
        copy.deepcopy(scaler)
