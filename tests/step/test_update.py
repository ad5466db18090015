"""The end of a step: all of it or none of it, for every optimizer, with the flag on the host or not."""

import pytest
import torch
from torch import nn

from equipoise.errors import SessionError
from equipoise.step import gradients
from equipoise.step.scaler import LossScaler
from equipoise.step.update import Updater

CPU = torch.device("cpu")


def parameter(grad: float | None = 1.0) -> nn.Parameter:
    p = nn.Parameter(torch.ones(4))
    p.grad = None if grad is None else torch.full((4,), grad)
    return p


def end(updater: Updater, optimizers: list, max_grad_norm: float | None = None) -> bool | torch.Tensor:
    """What a session does after backward; returns the skip."""
    parameters, grads = gradients.collect(optimizers)
    updater.unscale(optimizers)
    updater.check_and_clip(optimizers, parameters, grads, max_grad_norm)
    return updater.update(optimizers)


class OnDevice(Updater):
    """An updater whose flag is as an accelerator's: a tensor that no one may look into for nothing."""

    def __init__(self) -> None:
        super().__init__(CPU, alike=True)
        self.check = _DeviceCheck(CPU)


class _DeviceCheck(gradients.FiniteCheck):
    def on_host(self) -> None:
        return None


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_gradient_stops_every_optimizer(bad: float) -> None:
    good, spoiled = parameter(), parameter(bad)
    a, b = (torch.optim.SGD([p], lr=0.5, momentum=0.9) for p in (good, spoiled))
    assert end(Updater(CPU, alike=True), [a, b]) is True
    assert torch.equal(good, torch.ones(4)) and torch.equal(spoiled, torch.ones(4))
    assert not a.state and not b.state


def test_an_optimizer_without_gradients_is_left_out() -> None:
    moved, idle = parameter(), parameter(None)
    steps = []
    a, b = (torch.optim.SGD([p], lr=0.5) for p in (moved, idle))
    b.register_step_post_hook(lambda *_: steps.append("idle"))
    assert end(Updater(CPU, alike=True), [a, b]) is False
    assert torch.equal(moved, torch.full((4,), 0.5)) and not steps


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_optimizer_reads_the_flag_on_the_device(bad: bool, momentum: float) -> None:
    reads, p = [], parameter()
    opt = torch.optim.SGD([p], lr=0.5, momentum=momentum, fused=True)
    updater = OnDevice()
    assert not end(updater, [opt])  # a first step: momentum is there afterwards
    opt.register_step_pre_hook(lambda o, *_: reads.append(o.found_inf))
    before = p.detach().clone()
    p.grad = torch.full((4,), float("inf") if bad else 1.0)
    skipped = end(updater, [opt])
    assert isinstance(skipped, torch.Tensor) and bool(skipped) is bad
    assert torch.equal(p, before) is bad
    assert reads and not hasattr(opt, "found_inf") and not hasattr(opt, "grad_scale")


def test_a_first_skip_with_momentum_is_read_so_that_momentum_is_never_garbage() -> None:
    p = parameter(float("inf"))
    opt = torch.optim.SGD([p], lr=0.5, momentum=0.9, fused=True)
    assert end(OnDevice(), [opt]) is True
    assert torch.equal(p, torch.ones(4)) and "momentum_buffer" not in opt.state.get(p, {})


def test_an_unfused_optimizer_costs_the_one_read() -> None:
    p = parameter(float("inf"))
    assert end(OnDevice(), [torch.optim.SGD([p], lr=0.5)]) is True
    assert torch.equal(p, torch.ones(4))


def test_the_fused_flag_is_taken_back_when_the_step_raises() -> None:
    p = parameter()
    opt = torch.optim.SGD([p], lr=0.5, fused=True)

    def fail(*_: object) -> None:
        raise RuntimeError("a hook of the user's")

    opt.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="a hook of the user's"):
        end(OnDevice(), [opt])
    assert not hasattr(opt, "found_inf") and not hasattr(opt, "grad_scale")


def test_scaled_gradients_are_clipped_at_their_true_size_and_the_next_scale_is_told() -> None:
    p = parameter(2.0**10 * 3.0)
    opt = torch.optim.SGD([p], lr=1.0)
    updater = Updater(CPU, alike=True)
    updater.use(LossScaler("cpu", init_scale=2.0**10))
    updater.scaler.scale(torch.ones(()))
    assert end(updater, [opt], max_grad_norm=3.0) is False
    # Four gradients of 3 have norm 6: each becomes 1.5, but for torch's 1e-6 in the quotient.
    assert torch.allclose(p, torch.full((4,), 1.0 - 1.5), atol=1e-5)
    assert float(updater.close()) == 2.0**10
    updater.scaler.scale(torch.ones(()))
    p.grad = torch.full((4,), float("inf"))
    assert end(updater, [opt]) is True
    assert float(updater.close()) == 2.0**10 and updater.scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_no_gradient_can_have_is_refused(norm: float) -> None:
    with pytest.raises(SessionError, match="max_grad_norm"):
        end(Updater(CPU, alike=True), [torch.optim.SGD([parameter()], lr=0.5)], norm)


def test_a_closure_that_meets_infinity_leaves_weights_and_state() -> None:
    p = parameter(None)
    opt = torch.optim.LBFGS([p], lr=0.1, max_iter=4)
    updater = Updater(CPU, alike=True)
    calls = []

    def evaluate(worst: float) -> torch.Tensor:
        calls.append(1)
        p.grad = None
        loss = (p.square().sum()) * (worst if len(calls) == 2 else 1.0)
        loss.backward()
        return loss.detach()

    assert updater.step_closure(opt, lambda: evaluate(float("inf")), None) is True
    assert len(calls) == 2 and torch.equal(p, torch.ones(4)) and not opt.state[p]
    calls.clear()
    assert updater.step_closure(opt, lambda: evaluate(1.0), None) is False
    assert len(calls) > 1 and float(p.detach().norm()) < 2.0
