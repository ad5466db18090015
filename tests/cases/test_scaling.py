"""Rows S1-S11 of the cases from real life, as far as they concern the scaler alone.

In a Session: tests/cases/test_scaling_in_a_session.py. S8 (two ranks): tests/distributed.
"""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.amp import GradScaler

from equipoise.errors import FormatError, SessionError, StallError
from equipoise.step.scaler import LossScaler

Parameter = torch.nn.Parameter
OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "plain": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}
HALVES = [torch.bfloat16, torch.float16]
each_optimizer = pytest.mark.parametrize("name", sorted(OPTIMIZERS))


def model_and_batch() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Linear(16, 4), torch.randn(8, 16), torch.randn(8, 4)


# ---- S1 ---------------------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("half", [None, *HALVES])
def test_s1_clipping_sees_unscaled_gradients(name: str, half: torch.dtype | None) -> None:
    results = []
    for scale in (None, 65536.0, 1024.0):
        model, x, y = model_and_batch()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        scaler = LossScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", half) if half is not None else contextlib.nullcontext():
                out = model(x)
            loss = (out.float() - y).pow(2).mean() * 0.01
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.005)
            assert 0.005 < norm < 1.0
            scaler.step(optimizer)
            scaler.update()
        assert scale is None or scaler.get_scale() == scale
        results.append(model.weight.detach().clone())
    for scaled in results[1:]:
        # powers of two change no bit but where a half gradient is subnormal, and then by one of its roundings
        torch.testing.assert_close(
            scaled, results[0], rtol=1e-6 if half is None else 1e-2, atol=1e-6 if half is None else 1e-3
        )


# ---- S2 ---------------------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("bad", [None, "first", "second", "both"])
def test_s2_two_optimizers_updated_after_each(name: str, unscale_first: bool, bad: str | None) -> None:
    """The same as one update at the end, whatever overflows; growth interval 1 moves the scale each time."""
    history, params = s2_loop(name, unscale_first, bad, after_each=False)
    history_each, params_each = s2_loop(name, unscale_first, bad, after_each=True)
    assert history == history_each
    assert all(torch.equal(a, b) for a, b in zip(params, params_each, strict=True))
    if bad is None:  # and both move alike
        assert torch.equal(*params_each)


def s2_loop(
    name: str, unscale_first: bool, bad: str | None, *, after_each: bool
) -> tuple[list[dict[str, Any]], list[Parameter]]:
    params = [Parameter(torch.ones(4)), Parameter(torch.ones(4))]
    optimizers = [OPTIMIZERS[name]([p]) for p in params]
    scaler = LossScaler("cpu", init_scale=1024.0, growth_interval=1)
    history = []
    for i in range(4):
        for p in params:
            p.grad = None
        scaler.scale(sum((p * p).sum() for p in params)).backward()
        for p, which in zip(params, ("first", "second"), strict=True):
            if i == 1 and bad in (which, "both"):
                p.grad[1] = math.nan
        for optimizer in optimizers if unscale_first else ():
            scaler.unscale_(optimizer)
        for n, optimizer in enumerate(optimizers):
            scaler.step(optimizer)
            if after_each or n == 1:
                scaler.update()
        history.append(scaler.state_dict())
    return history, params


def test_s2_neighbour_update_twice_at_the_end() -> None:
    p = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
    scaler = LossScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scaler.update()
    assert scaler.get_scale() == 8.0


def test_s2_neighbour_two_backward_passes_are_two_windows() -> None:
    """A GAN: each network has its own loss, step and update; as in torch, two updates."""
    scales = []
    for make in (GradScaler, LossScaler):
        params = [Parameter(torch.ones(2)), Parameter(torch.ones(2))]
        optimizers = [torch.optim.SGD([p], lr=0.1) for p in params]
        scaler = make("cpu", init_scale=4.0, growth_interval=1)
        for p, optimizer in zip(params, optimizers, strict=True):
            scaler.scale(p.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())
        assert torch.equal(params[0], params[1])
    assert scales == [16.0, 16.0]


# ---- S3 ---------------------------------------------------------------------------------------------------


@each_optimizer
def test_s3_a_new_scale_between_micro_batches_waits_for_the_window(name: str) -> None:
    results = []
    for meddle in (False, True):
        p = Parameter(torch.ones(4))
        optimizer = OPTIMIZERS[name]([p])
        scaler = LossScaler("cpu", init_scale=1024.0)
        scaler.scale((p * p).sum() / 2).backward()
        if meddle:
            scaler.update(8.0)
        scaler.scale([(p * p).sum() / 4, (p * p).sum() / 4])[0].backward()
        next(iter(scaler.scale((p * p).sum() / 4 for _ in range(1)))).backward()
        scaler.step(optimizer)
        scaler.update()
        results.append(p.detach().clone())
        assert scaler.get_scale() == (8.0 if meddle else 1024.0)
        assert float(scaler.scale(torch.ones(()))) == scaler.get_scale()
    assert torch.equal(*results)


def test_s3_an_update_between_micro_batches_is_refused_and_the_window_goes_on() -> None:
    p = Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0, growth_interval=1)
    scaler.scale(p.sum() / 2).backward()
    with pytest.raises(SessionError, match="micro-batch"):
        scaler.update()
    scaler.scale(p.sum() / 2).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(p, torch.zeros(4)) and scaler.get_scale() == 8.0


def test_s3_a_second_unscale_names_the_misuse() -> None:
    p = Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum() / 2).backward()
    scaler.unscale_(optimizer)
    grad = p.grad.clone()
    with pytest.raises(SessionError, match="last micro-batch"):
        scaler.unscale_(optimizer)
    assert torch.equal(p.grad, grad)


# ---- S5, S6 -----------------------------------------------------------------------------------------------


@each_optimizer
@pytest.mark.parametrize("backoff", [0.5, 0.3])
def test_s5_an_inf_that_stays_ends_loudly_at_the_floor(name: str, backoff: float) -> None:
    p = Parameter(torch.ones(4))
    optimizer = OPTIMIZERS[name]([p])
    scaler = LossScaler("cpu", backoff_factor=backoff)
    at_floor = 0
    with pytest.raises(StallError, match="smallest allowed scale"):
        for _ in range(300):
            optimizer.zero_grad()
            at_floor += scaler.get_scale() == 2.0**-24
            scaler.scale((p * math.inf).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert at_floor == 20
    assert scaler.get_scale() == 2.0**-24
    assert torch.equal(p, torch.ones(4))


@each_optimizer
def test_s6_the_scale_stops_at_its_cap(name: str) -> None:
    p = Parameter(torch.ones(4))
    optimizer = OPTIMIZERS[name]([p])
    scaler = LossScaler("cpu", growth_interval=1)
    for _ in range(200):
        optimizer.zero_grad()
        scaler.scale((p * 1e-30).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**48
    assert torch.isfinite(p).all()


# ---- S7 ---------------------------------------------------------------------------------------------------


def scales(scaler: Any, steps: range) -> list[float]:
    p = Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([p], lr=0.1)
    seen = []
    for i in steps:
        scaler.scale(torch.zeros(()))
        p.grad = torch.full((4,), math.inf if i % 17 == 3 or i in (120, 121) else 1.0)
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
    return seen


@pytest.mark.parametrize("before", [GradScaler, LossScaler])
@pytest.mark.parametrize("after", [GradScaler, LossScaler])
@pytest.mark.parametrize("stop", [0, 1, 100])
def test_s7_resumed_scales_equal_those_of_an_unbroken_run(before: Any, after: Any, stop: int) -> None:
    unbroken = scales(LossScaler("cpu", growth_interval=5), range(200))
    first = before("cpu", growth_interval=5)
    assert scales(first, range(stop)) == unbroken[:stop]
    second = after("cpu", init_scale=3.0)
    second.load_state_dict(first.state_dict())
    assert scales(second, range(stop, 200)) == unbroken[stop:]


def test_s7_a_disabled_scalers_empty_state_is_accepted() -> None:
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.load_state_dict(GradScaler("cpu", enabled=False).state_dict())
    scaler.load_state_dict(LossScaler("cpu", enabled=False).state_dict())
    assert scaler.get_scale() == 4.0


# ---- S9 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("part", [None, complex(math.inf, 0), complex(0, math.nan)])
@pytest.mark.parametrize("foreach", [False, True])
def test_s9_complex_gradients_are_unscaled_as_pairs(
    dtype: torch.dtype, part: complex | None, foreach: bool
) -> None:
    p, real = Parameter(torch.full((3,), 1 + 2j, dtype=dtype)), Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p, real], lr=0.5, foreach=foreach)
    scaler = LossScaler("cpu", init_scale=1024.0)
    scaler.scale((p * p.conj()).real.sum() + real.sum()).backward()
    if part is not None:
        p.grad[1] = part
    scaler.step(optimizer)
    scaler.update()
    if part is None:
        assert torch.equal(p, torch.zeros_like(p)) and torch.equal(real, torch.full((3,), 0.5))
    else:
        assert torch.equal(p, torch.full((3,), 1 + 2j, dtype=dtype)) and scaler.get_scale() == 512.0


# ---- S10 --------------------------------------------------------------------------------------------------


def test_s10_norm_of_many_large_entries_is_finite_and_clips_to_the_limit() -> None:
    """Gradients that came through FP16 layers are FP32 at the norm; half ones never reach it."""
    layer = torch.nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    scaler = LossScaler("cpu", init_scale=1.0)
    with torch.autocast("cpu", torch.float16):
        out = layer(torch.full((4, 512), 100.0))
    scaler.scale(out.float().sum() * 100.0).backward()
    exact = layer.weight.grad.double().norm()
    assert exact > torch.finfo(torch.float16).max
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    assert abs(norm - exact) < 1e-3 * exact  # a sum of 2**18 squares in FP32; half gives inf
    assert abs(layer.weight.grad.norm() - 1.0) < 1e-3
    half = torch.nn.Linear(4, 4).half()
    for p in half.parameters():
        p.grad = torch.full_like(p, 6e4)
    with pytest.raises(FormatError, match="float16"):
        scaler.unscale_(torch.optim.SGD(half.parameters()))


# ---- S11 --------------------------------------------------------------------------------------------------


def embedding(weight: torch.Tensor) -> torch.nn.Embedding:
    return torch.nn.Embedding.from_pretrained(weight.clone(), freeze=False, sparse=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # Adagrad's own
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam, torch.optim.Adagrad])
@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_s11_repeated_indices_are_unscaled_once(make: Any, scale: float) -> None:
    results = []
    for enabled in (False, True):
        torch.manual_seed(0)
        table = embedding(torch.randn(6, 3))
        optimizer = make(table.parameters(), lr=0.1)
        scaler = LossScaler("cpu", init_scale=scale, enabled=enabled)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(table(torch.tensor([1, 1, 4, 1])).pow(2).sum()).backward()
            scaler.unscale_(optimizer)
            if enabled:
                assert table.weight.grad.is_coalesced()
            scaler.step(optimizer)
            scaler.update()
        results.append(table.weight.detach().clone())
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("index", [[2], [2, 2], [0, 2, 2]])
def test_s11_neighbour_two_embeddings_that_are_added_share_no_values(index: list[int]) -> None:
    """The two gradients' values are one memory; torch's scaler divides it twice."""
    tables = [embedding(torch.zeros(3, 2)), embedding(torch.zeros(3, 2))]
    optimizer = torch.optim.SGD([t.weight for t in tables], lr=1.0)
    scaler = LossScaler("cpu", init_scale=1024.0)
    idx = torch.tensor(index)
    scaler.scale(((tables[0](idx) + tables[1](idx)) * torch.full((len(index), 2), 3.0)).sum()).backward()
    scaler.step(optimizer)
    expected = torch.zeros(3, 2)
    for i in index:
        expected[i] -= 3.0
    assert torch.equal(tables[0].weight, expected) and torch.equal(tables[1].weight, expected)


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38])
def test_s11_sums_of_repeated_indices_are_checked(value: float) -> None:
    table = embedding(torch.ones(3, 2))
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    scaler = LossScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    table.weight.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.full((2, 2), value), (3, 2), check_invariants=True
    )
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(table.weight, torch.ones(3, 2)) and scaler.get_scale() == 0.5


def test_s11_neighbour_complex_sparse_gradients() -> None:
    p = Parameter(torch.zeros(3, 2, dtype=torch.complex64))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    values = torch.full((2, 2), 4 + 8j)
    p.grad = torch.sparse_coo_tensor([[1, 1]], values, (3, 2), check_invariants=True)
    scaler.unscale_(optimizer)
    assert torch.equal(p.grad.to_dense()[1], torch.full((2,), 2 + 4j))
