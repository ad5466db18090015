"""PyTorch's own rules of the scaler, and equality with it bit for bit.

The rules are restated from torch 2.13's tests: ``test/test_torch.py`` (``test_grad_scaling_*``,
``test_grad_scale_*``, ``test_grad_scaler_*``, ``test_params_invalidated_with_grads_invalidated_*``; older
torches have them in ``test/test_cuda.py``). They run on torch's scaler too: a rule that torch breaks was
restated wrongly.
"""

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scaler_models import (
    INF,
    NAN,
    OPTIMIZERS,
    Parameter,
    batches,
    loss_of,
    one_parameter,
    same_bits,
    spoil,
    two_layers,
    weights,
    window,
)
from torch.amp import GradScaler

from equipoise.errors import SessionError
from equipoise.step.scaler import LossScaler


@pytest.fixture(params=[GradScaler, LossScaler], ids=["torch", "ours"])
def scaler_class(request: pytest.FixtureRequest) -> type[GradScaler]:
    return request.param


# ---- PyTorch's rules, on torch's scaler and on ours -----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, INF, -INF, NAN])
def test_unscale_divides_and_finds_what_is_not_finite(
    scaler_class: Any, dtype: torch.dtype, bad: float | None
) -> None:
    """test_torch.py: test_grad_scaling_unscale."""
    p = Parameter(torch.zeros(5, 5, dtype=dtype))
    p.grad = torch.full((5, 5), 4.0, dtype=dtype)
    if bad is not None:
        p.grad[2, 3] = bad
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    finite = torch.isfinite(p.grad)
    assert (p.grad[finite] == 1.0).all()
    assert int((~finite).sum()) == (bad is not None)
    scaler.step(optimizer)
    assert bool((p == 0.0).all()) == (bad is not None)


def test_scale_grows_at_the_interval_and_backs_off_at_once(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_update_scale."""
    p, optimizer = one_parameter()
    scaler = scaler_class("cpu", init_scale=4.0, growth_factor=2.0, backoff_factor=0.25, growth_interval=2)
    seen = []
    for bad in (False, False, False, True, False):
        scaler.scale(torch.zeros(()))
        p.grad = torch.full((3,), NAN if bad else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), scaler._get_growth_tracker()))
    assert seen == [(4.0, 1), (8.0, 0), (8.0, 1), (2.0, 0), (2.0, 1)]


def test_scale_never_grows_to_infinity(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scale_will_not_overflow."""
    bounds = {"max_scale": 2.0**126} if scaler_class is LossScaler else {}
    p, optimizer = one_parameter()
    scaler = scaler_class("cpu", init_scale=2.0**120, growth_factor=2.0**4, growth_interval=1, **bounds)
    for _ in range(4):
        scaler.scale(torch.zeros(()))
        p.grad = torch.ones(3)
        scaler.step(optimizer)
        scaler.update()
    assert 2.0**124 <= scaler.get_scale() < INF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [None, INF, NAN])
def test_unscale_of_sparse_gradients(scaler_class: Any, dtype: torch.dtype, bad: float | None) -> None:
    """test_torch.py: test_grad_scaling_unscale_sparse."""
    values = torch.tensor([16.0, 32.0, 64.0], dtype=dtype)
    if bad is not None:
        values[1] = bad
    p = Parameter(torch.zeros(2, 3, dtype=dtype))
    p.grad = torch.sparse_coo_tensor([[0, 1, 1], [2, 0, 2]], values, (2, 3), check_invariants=True)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    if bad is None:
        assert torch.equal(p.grad.to_dense(), torch.tensor([[0, 0, 4.0], [8, 0, 16]], dtype=dtype))
    before = p.detach().clone()
    scaler.step(optimizer)
    assert torch.equal(p, before) == (bad is not None)


@pytest.mark.parametrize("started", [False, True], ids=["lazy", "started"])
def test_state_goes_into_another_scaler(scaler_class: Any, started: bool) -> None:
    """test_torch.py: test_grad_scaling_state_dict."""
    first = scaler_class("cpu", init_scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2)
    second = scaler_class("cpu", init_scale=6.0, growth_factor=7.0, backoff_factor=0.8, growth_interval=1)
    state = {**first.state_dict(), "_growth_tracker": 1}
    if started:
        second.scale(torch.zeros(4))
    second.load_state_dict(state)
    assert (second.get_scale(), second.get_growth_factor(), second.get_backoff_factor()) == (3.0, 4.0, 0.5)
    assert (second.get_growth_interval(), second._get_growth_tracker()) == (2, 1)
    assert second.state_dict() == state


def test_scale_of_nested_outputs(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_scale (nested iterables)."""
    scaler = scaler_class("cpu", init_scale=2.0)
    t = torch.full((1,), 4.0)
    out = scaler.scale([t, (t, [t]), (x for x in (t,))])
    assert out[0] == out[1][0] == out[1][1][0] == next(out[2]) == 8.0
    assert type(out) is list and type(out[1]) is tuple
    with pytest.raises(ValueError):
        scaler.scale(3)


def scaled_and_control(
    scaler: Any,
    loop: Callable[[torch.nn.Module, Any, Any, int, bool], None],
    skip_at: int = 2,
    tol: float = 1e-6,
) -> None:
    """Train a model with the scaler, whose step ``skip_at`` overflows; and one without, which omits it."""
    with_scale, control = two_layers(), two_layers()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (with_scale, control)]
    null = GradScaler("cpu", enabled=False)
    for i in range(5):
        loop(with_scale, optimizers[0], scaler, i, i == skip_at)
        if i != skip_at:
            loop(control, optimizers[1], null, i, False)
    for a, b in zip(weights(with_scale), weights(control), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=tol)  # a scaled loss rounds a product twice
    assert scaler.get_scale() != 128.0


def test_plain_loop(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_autocast, _run_scaling_case."""

    def loop(model: Any, optimizer: Any, scaler: Any, i: int, bad: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batches(5)[i])).backward()
        if bad:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    scaled_and_control(scaler_class("cpu", init_scale=128.0, growth_interval=1), loop)


def test_clipping_of_scaled_gradients_with_a_scaled_limit(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_clipping."""

    def loop(model: Any, optimizer: Any, scaler: Any, i: int, bad: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batches(5)[i])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2 * scaler.get_scale())
        if bad:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    scaled_and_control(scaler_class("cpu", init_scale=128.0, growth_interval=1), loop)


def test_clipping_after_unscale(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_clipping_separate_unscale."""

    def loop(model: Any, optimizer: Any, scaler: Any, i: int, bad: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, batches(5)[i])).backward()
        if bad:
            spoil(model)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        scaler.step(optimizer)
        scaler.update()

    scaled_and_control(scaler_class("cpu", init_scale=128.0, growth_interval=1), loop)


def test_gradient_penalty(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_penalty."""

    def loop(model: Any, optimizer: Any, scaler: Any, i: int, bad: bool) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batches(5)[i])
        grads = torch.autograd.grad(scaler.scale(loss), list(model.parameters()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        norm = sum((g * inverse).pow(2).sum() for g in grads).sqrt()
        scaler.scale(loss + norm).backward()
        if bad:
            spoil(model)
        scaler.step(optimizer)
        scaler.update()

    scaled_and_control(scaler_class("cpu", init_scale=128.0, growth_interval=1), loop)


def test_accumulation(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaling_accumulation."""

    def loop(model: Any, optimizer: Any, scaler: Any, i: int, bad: bool) -> None:
        optimizer.zero_grad()
        for batch in batches(2):
            scaler.scale(loss_of(model, batch) / 2).backward()
        if bad:
            spoil(model, NAN)
        scaler.step(optimizer)
        scaler.update()

    scaled_and_control(scaler_class("cpu", init_scale=128.0, growth_interval=1), loop)


@pytest.mark.parametrize("bad_in", [0, 1])
def test_several_models_losses_and_optimizers(scaler_class: Any, bad_in: int) -> None:
    """test_torch.py: test_grad_scaling_multiple: only the one with the overflow skips; one update for all."""
    models = [two_layers(), two_layers()]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    scaler = scaler_class("cpu", init_scale=128.0, growth_interval=1)
    a, b = (loss_of(m, batch) for m, batch in zip(models, batches(2), strict=True))
    scaler.scale(0.6 * a + 0.4 * b).backward(retain_graph=True)
    scaler.scale(0.6 * b - 0.4 * a).backward()
    spoil(models[bad_in])
    before = [weights(m) for m in models]
    scaler.unscale_(optimizers[0])
    scaler.step(optimizers[0])
    scaler.step(optimizers[1])
    scaler.update()
    assert same_bits(weights(models[bad_in]), before[bad_in])
    assert not same_bits(weights(models[1 - bad_in]), before[1 - bad_in])
    assert scaler.get_scale() == 64.0


def test_an_optimizer_that_takes_the_scaler_itself(scaler_class: Any) -> None:
    """test_torch.py: test_grad_scaler_pass_itself, test_grad_scaler_deprecated_warning."""

    class Own(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure: Any = None, *, grad_scaler: Any = None) -> None:
            grad_scaler.unscale_(self)
            assert sum(v.item() for v in grad_scaler._found_inf_per_device(self).values()) == 0
            super().step()

    p = Parameter(torch.ones(2))
    optimizer = Own([p], lr=1.0)
    scaler = scaler_class("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    with pytest.warns(FutureWarning):
        scaler.step(optimizer)
    assert torch.equal(p, torch.zeros(2))


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_gradients_spoilt_between_unscale_and_step_are_the_users_own(scaler_class: Any, name: str) -> None:
    """test_torch.py: test_params_invalidated_with_grads_invalidated_between_unscale_and_step."""
    model = two_layers()
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    scaler = scaler_class("cpu", init_scale=128.0)
    scaler.scale(loss_of(model, batches()[0])).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.fill_(INF)
    scaler.step(optimizer)
    assert not all(torch.isfinite(w).all() for w in weights(model))


def test_disabled_scaler_changes_nothing(scaler_class: Any) -> None:
    """test_torch.py: the enabled=False arm of its cases."""
    p, optimizer = one_parameter(2.0)
    scaler = scaler_class("cpu", enabled=False)
    t = torch.ones(2)
    assert scaler.scale(t) is t
    scaler.unscale_(optimizer)
    scaler.step(optimizer, lambda: torch.zeros(()))
    scaler.update()
    assert (scaler.get_scale(), scaler.state_dict(), scaler.is_enabled()) == (1.0, {}, False)
    assert torch.equal(p, torch.full((3,), -1.0))
    scaler.load_state_dict({})


@pytest.mark.parametrize("order", [("unscale_", "unscale_"), ("step", "unscale_"), ("step", "step")])
def test_calls_that_torch_refuses(scaler_class: Any, order: tuple[str, str]) -> None:
    """grad_scaler.py: unscale_ twice, unscale_ after step, step twice are RuntimeErrors."""
    _, optimizer = one_parameter()
    scaler = scaler_class("cpu")
    scaler.scale(torch.zeros(()))
    getattr(scaler, order[0])(optimizer)
    with pytest.raises(RuntimeError):
        getattr(scaler, order[1])(optimizer)


def test_half_gradients_are_refused(scaler_class: Any) -> None:
    """test_torch.py: 'Attempting to unscale FP16 gradients.'"""
    p = Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = scaler_class("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(ValueError, match=r"FP16"):
        scaler.unscale_(optimizer)


def test_pickle_and_copy_between_iterations(scaler_class: Any) -> None:
    """grad_scaler.py: __getstate__."""
    model = two_layers()
    optimizer = OPTIMIZERS["sgd"](list(model.parameters()))
    scaler = scaler_class("cpu", init_scale=128.0, growth_interval=2)
    for batch, bad in zip(batches(4), (None, None, None, INF), strict=True):
        window(scaler, model, optimizer, batch, bad)
    for twin in (pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert twin.state_dict() == scaler.state_dict()
        twin.scale(torch.zeros(()))
        assert twin.get_scale() == scaler.get_scale()


# ---- equal to torch's, bit for bit ----------------------------------------------------------------------


def states_of(scaler: GradScaler) -> dict[str, Any]:
    return {k: v for k, v in scaler.state_dict().items() if k in GradScaler("cpu").state_dict()}


windows = st.lists(
    st.fixed_dictionaries(
        {
            "micro": st.integers(1, 3),
            "bad": st.sampled_from([None, None, None, INF, -INF, NAN]),
            "unscale": st.booleans(),
            "clip": st.booleans(),
            "losses": st.booleans(),
            "new_scale": st.sampled_from([None, None, None, None, 7.0, 2.0**12]),
        }
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pattern=windows,
    name=st.sampled_from(sorted(OPTIMIZERS)),
    factors=st.sampled_from([(2.0, 0.5), (3.0, 0.7), (1.001, 0.999)]),
    interval=st.integers(1, 3),
    scale=st.sampled_from([2.0**16, 1000.0, 0.3]),
)
def test_equals_torch_for_any_pattern_of_overflows(
    pattern: list[dict[str, Any]], name: str, factors: tuple[float, float], interval: int, scale: float
) -> None:
    runs = []
    for make in (GradScaler, LossScaler):
        scaler = make("cpu", scale, factors[0], factors[1], interval)
        model = two_layers()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        runs.append(list(follow(scaler, model, optimizer, pattern)))
    for theirs, ours in zip(*runs, strict=True):
        assert theirs[0] == ours[0]
        assert same_bits(theirs[1], ours[1])


def follow(
    scaler: Any, model: Any, optimizer: Any, pattern: Any
) -> Iterator[tuple[dict[str, Any], list[torch.Tensor]]]:
    for w, batch in zip(pattern, batches(len(pattern)), strict=True):
        optimizer.zero_grad()
        for _ in range(w["micro"]):
            loss = loss_of(model, batch) / w["micro"]
            (sum(scaler.scale([loss / 2, loss / 2])) if w["losses"] else scaler.scale(loss)).backward()
        if w["bad"] is not None:
            spoil(model, w["bad"])
        if w["unscale"] or w["clip"]:
            scaler.unscale_(optimizer)
        if w["clip"]:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update(w["new_scale"])
        yield (
            states_of(scaler),
            weights(model)
            + [
                v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
            ],
        )


CALLS = ("backward", "unscale_a", "unscale_b", "step_a", "step_b", "update", "new_scale", "zero_a", "zero_b")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(calls=st.lists(st.tuples(st.sampled_from(CALLS), st.booleans()), min_size=1, max_size=30))
def test_equals_torch_for_any_order_of_calls_that_torch_accepts(calls: list[tuple[str, bool]]) -> None:
    """Two optimizers, any order but those in which torch divides a gradient twice or by another scale than
    its own: no ``scale`` after an ``update``, or a new scale amid a window."""
    theirs, ours = (Two(make("cpu", 2.0**10, growth_interval=2)) for make in (GradScaler, LossScaler))
    fresh, stepped = False, False
    for call, bad in calls:
        if not fresh and call.startswith(("unscale", "step", "update")):
            continue
        if call == "new_scale" and not stepped:
            continue
        try:
            theirs.call(call, bad)
        except (RuntimeError, AssertionError, AttributeError):
            with contextlib.suppress(SessionError):  # it may do the safe thing instead
                ours.call(call, bad)
            return
        ours.call(call, bad)
        fresh = call == "backward" or (fresh and call not in ("update", "new_scale"))
        stepped = call.startswith("step") or (stepped and call not in ("update", "new_scale"))
        assert states_of(theirs.scaler) == states_of(ours.scaler)
        assert same_bits(theirs.numbers(), ours.numbers())


class Two:
    """Two parameters with an optimizer each under one scaler."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self.a, self.b = Parameter(torch.tensor([1.0, -2.0])), Parameter(torch.tensor([0.5, 3.0]))
        self.optimizers = {
            "a": torch.optim.SGD([self.a], lr=0.1, momentum=0.5),
            "b": torch.optim.AdamW([self.b], lr=0.1, fused=True),
        }

    def call(self, name: str, bad: bool) -> None:
        which = self.optimizers.get(name[-1])
        if name == "backward":
            self.scaler.scale((self.a * self.b).sum() * (INF if bad else 1.0)).backward()
        elif name == "update":
            self.scaler.update()
        elif name == "new_scale":
            self.scaler.update(64.0)
        elif name.startswith("unscale"):
            self.scaler.unscale_(which)
        elif name.startswith("step"):
            self.scaler.step(which)
        else:
            which.zero_grad()

    def numbers(self) -> list[torch.Tensor]:
        grads = [torch.nan_to_num(p.grad, nan=7.0) for p in (self.a, self.b) if p.grad is not None]
        return [torch.nan_to_num(p.detach(), nan=7.0).clone() for p in (self.a, self.b)] + grads
