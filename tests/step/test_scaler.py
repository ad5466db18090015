"""What the scaler does beyond PyTorch's: floor, cap, stall, named misuse, ``found_inf``; the null scaler."""

import copy
import pickle
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
    one_parameter,
    two_layers,
    window,
)
from torch.amp import GradScaler

from equipoise.errors import FormatError, SessionError, StallError
from equipoise.step._scaling import STALL_SKIPS, FloorWatch, Move
from equipoise.step.scaler import LossScaler, NullScaler


def overflow(
    scaler: LossScaler, optimizer: torch.optim.Optimizer, p: Parameter, times: int = 1, bad: float = INF
) -> None:
    for _ in range(times):
        scaler.scale(torch.zeros(()))
        p.grad = torch.full_like(p, bad)
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("fused", [False, True])
def test_raises_after_20_skips_at_the_floor_and_never_before(fused: bool) -> None:
    p = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0, fused=fused)
    scaler = LossScaler("cpu", init_scale=2.0**-20)
    overflow(scaler, optimizer, p, 4)  # 2**-20 to the floor
    assert scaler.get_scale() == 2.0**-24
    overflow(scaler, optimizer, p, STALL_SKIPS - 1)
    overflow(scaler, optimizer, p, 1, bad=1e-9)  # one step was taken: the count starts again
    overflow(scaler, optimizer, p, STALL_SKIPS - 1)
    with pytest.raises(StallError, match="20 steps"):
        overflow(scaler, optimizer, p)
    with pytest.raises(StallError, match="21 steps"):
        overflow(scaler, optimizer, p)
    overflow(scaler, optimizer, p, 1, bad=1e-9)
    assert torch.isfinite(p).all()


def test_the_count_of_skips_survives_a_resume() -> None:
    p, optimizer = one_parameter()
    scaler = LossScaler("cpu", init_scale=2.0**-24)
    overflow(scaler, optimizer, p, STALL_SKIPS - 1)
    for twin in (LossScaler("cpu"), pickle.loads(pickle.dumps(scaler))):
        twin.load_state_dict(scaler.state_dict())
        with pytest.raises(StallError):
            overflow(twin, optimizer, p)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    pattern=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=6),
    first=st.integers(-24, 16),
)
def test_the_count_is_exact_where_the_host_knows_nothing(pattern: list[tuple[int, int]], first: int) -> None:
    """As on an accelerator with a fused optimizer: the answer stays there, the host seldom reads."""
    floor = 2.0**-24
    scale, watch = torch.tensor(2.0**first), FloorWatch(2.0**first)
    true_scale, true_skips = 2.0**first, 0
    for bads, goods in pattern:
        for bad in [True] * bads + [False] * goods:
            move = Move(torch.tensor(float(bad)), None, scale.clone(), torch.tensor(0), FloorWatch(1.0))
            true_skips = true_skips + 1 if bad and true_scale == floor else 0
            true_scale = max(true_scale / 2, floor) if bad else true_scale
            scale.fill_(true_scale)
            assert watch.after(move, scale, floor, 0.5) == (true_skips if true_skips >= STALL_SKIPS else 0)
            assert watch.least <= true_scale and watch.most >= true_skips


def test_the_host_reads_once_in_60_updates_of_a_healthy_run() -> None:
    scale, watch = torch.tensor(2.0**16), FloorWatch(2.0**16)
    move = Move(torch.zeros(()), None, scale, torch.tensor(0), FloorWatch(1.0))
    reads = []
    for i in range(1, 181):
        watch.after(move, scale, 2.0**-24, 0.5)
        if watch.least == 2.0**16:  # only a read tells the host so
            reads.append(i)
    assert reads == [60, 120, 180]


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_product_that_overflows_is_a_skip(name: str) -> None:
    """torch checks before it multiplies by 1/scale, and writes the infinity into the weights."""
    p = Parameter(torch.ones(3))
    optimizer = OPTIMIZERS[name]([p])
    for make, finite in ((GradScaler, False), (LossScaler, True)):
        scaler = make("cpu", init_scale=2.0**-20)
        scaler.scale(torch.zeros(()))
        p.grad = torch.tensor([1.0, 1e36, 1.0])
        scaler.step(optimizer)
        scaler.update()
        if finite:
            assert torch.equal(p, torch.ones(3)) and scaler.get_scale() == 2.0**-21
        elif name.startswith("sgd"):
            assert not torch.isfinite(p).all()
        p = Parameter(torch.ones(3))
        optimizer = OPTIMIZERS[name]([p])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_first_step_of_a_fused_sgd_overflows(nesterov: bool) -> None:
    """torch's kernel then leaves the momentum uninitialised, and the next step uses it."""
    results = []
    for fused in (False, True):
        p = Parameter(torch.ones(64))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=nesterov, fused=fused)
        scaler = LossScaler("cpu", init_scale=1000.0)
        overflow(scaler, optimizer, p, 2)
        assert "momentum_buffer" not in optimizer.state[p]
        for _ in range(3):
            overflow(scaler, optimizer, p, 1, bad=1.0)
        results.append(p.detach().clone())
    torch.testing.assert_close(*results)


def test_a_closure_is_refused_by_name_and_by_position() -> None:
    p, optimizer = one_parameter()
    scaler = LossScaler("cpu")
    scaler.scale(torch.zeros(()))
    for call in (
        lambda: scaler.step(optimizer, lambda: None),
        lambda: scaler.step(optimizer, closure=lambda: None),
    ):
        with pytest.raises(SessionError, match="closure"):
            call()
    scaler.step(optimizer, closure=None)
    assert (p < 1.0).all()


def test_calls_before_scale_name_the_misuse() -> None:
    _, optimizer = one_parameter()
    for call in ("unscale_", "step"):
        with pytest.raises(SessionError, match="scale\\(loss\\)"):
            getattr(LossScaler("cpu"), call)(optimizer)
    with pytest.raises(SessionError, match="before scale"):
        LossScaler("cpu").update()


def test_a_step_again_without_a_backward_pass_is_refused() -> None:
    p = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    after = p.detach().clone()
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(SessionError, match="without a backward pass"):
            call(optimizer)
    optimizer.zero_grad()
    with pytest.raises(SessionError, match="without a backward pass"):
        scaler.step(optimizer)
    assert torch.equal(p, after)
    (p.sum() * scaler.get_scale()).backward()  # scaled by hand: as in torch
    scaler.step(optimizer)
    assert torch.equal(p, after - 1.0)


@pytest.mark.parametrize("fused", [False, True])
def test_unscale_before_backward_is_refused_at_the_step(fused: bool) -> None:
    p = Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([p], fused=fused)
    scaler = LossScaler("cpu")
    loss = scaler.scale(p.sum())
    scaler.unscale_(optimizer)
    loss.backward()
    with pytest.raises(SessionError, match="before the backward pass"):
        scaler.step(optimizer)
    assert torch.equal(p, torch.ones(2))


def test_an_optimizer_without_gradients_is_neither_a_step_nor_a_skip() -> None:
    p = Parameter(torch.ones(2))
    for fused in (False, True):
        optimizer = torch.optim.AdamW([p], fused=fused)
        scaler = LossScaler("cpu", growth_interval=1)
        scaler.scale(torch.zeros(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0**16 and torch.equal(p, torch.ones(2))


def test_found_inf_is_told_and_overruled_without_a_step() -> None:
    (p, a), (q, b) = one_parameter(), one_parameter(NAN)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(SessionError, match="unscale_"):
        scaler.found_inf(a)
    scaler.unscale_(a)
    scaler.unscale_(b)
    mine, yours, both = scaler.found_inf(a), scaler.found_inf(b), scaler.found_inf(a, b)
    assert (float(mine), float(yours), float(both)) == (0.0, 1.0, 1.0)
    scaler.set_found_inf(both, a, b)
    scaler.step(a)
    scaler.step(b)
    scaler.update()
    assert torch.equal(p, torch.ones(3)) and torch.equal(q, torch.ones(3)) and scaler.get_scale() == 2.0
    assert (float(mine), float(yours), float(both)) == (0.0, 1.0, 1.0)


def test_a_rank_without_gradients_skips_with_the_others() -> None:
    p = Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.set_found_inf(torch.ones(()), optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0


def test_forgotten_gradients_count_for_nothing() -> None:
    p, optimizer = one_parameter(INF)
    scaler = LossScaler("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    scaler.forget(optimizer)
    overflow(scaler, optimizer, p, 1, bad=4.0)
    assert scaler.get_scale() == 4.0 and torch.equal(p, torch.zeros(3))


def test_floor_and_cap_are_in_the_state() -> None:
    scaler = LossScaler("cpu", init_scale=8.0, min_scale=2.0, max_scale=16.0)
    other = LossScaler("cpu")
    other.load_state_dict(scaler.state_dict())
    assert (other.min_scale, other.max_scale, other.get_scale()) == (2.0, 16.0, 8.0)
    theirs = GradScaler("cpu")
    theirs.load_state_dict(scaler.state_dict())
    assert theirs.get_scale() == 8.0
    scaler.load_state_dict({**GradScaler("cpu").state_dict(), "scale": 0.0})
    assert scaler.get_scale() == 2.0


def test_bad_states_are_refused_and_change_nothing() -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    before = scaler.state_dict()
    for bad in ({"scale": 1.0}, {**before, "scale": NAN}, {**before, "min_scale": 0.0}):
        with pytest.raises(SessionError):
            scaler.load_state_dict(bad)
    assert scaler.state_dict() == before


def test_loading_a_state_ends_a_window_that_was_given_up() -> None:
    p = Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    optimizer.zero_grad()
    scaler.scale(p.sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(p, torch.zeros(2))


@pytest.mark.parametrize(
    "new", [0.0, -1.0, NAN, INF, 2.0**60, torch.ones(2), torch.ones((), requires_grad=True)]
)
def test_a_new_scale_that_cant_be_is_refused(new: Any) -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    with pytest.raises(SessionError, match="new_scale"):
        scaler.update(new)
    assert scaler.get_scale() == 8.0


def test_a_new_scale_on_the_device_is_held_in_bounds() -> None:
    scaler = LossScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    for new, held in ((2.0**60, 2.0**48), (0.0, 2.0**-24), (NAN, 2.0**-24), (4.0, 4.0)):
        scaler.update(torch.tensor([new]))
        assert scaler.get_scale() == held
    scaler.update(16)
    assert scaler.get_scale() == 16.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"backoff_factor": 0.0},
        {"growth_interval": 0},
        {"init_scale": 0.0},
        {"init_scale": NAN},
        {"min_scale": 0.0},
        {"max_scale": INF},
        {"min_scale": 4.0, "max_scale": 2.0},
    ],
)
def test_settings_that_cant_work_are_refused(kwargs: dict[str, float]) -> None:
    with pytest.raises(SessionError, match=next(iter(kwargs))):
        LossScaler("cpu", **kwargs)


def test_copy_amid_a_window_is_refused() -> None:
    _, optimizer = one_parameter()
    scaler = LossScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.unscale_(optimizer)
    with pytest.raises(SessionError, match="between iterations"):
        copy.deepcopy(scaler)


def test_half_gradients_name_the_remedy() -> None:
    p = Parameter(torch.ones(2, dtype=torch.float16))
    p.grad = torch.ones_like(p)
    scaler = LossScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(FormatError, match="keep the parameters in float32"):
        scaler.unscale_(torch.optim.SGD([p]))


def test_null_scaler_has_the_same_calls_and_does_nothing() -> None:
    null = NullScaler()
    p, optimizer = one_parameter()
    t = torch.ones(2)
    assert null.scale(t) is t
    null.unscale_(optimizer)
    assert float(null.found_inf(optimizer)) == 0.0
    null.set_found_inf(torch.ones(()), optimizer)
    null.forget(optimizer)
    assert null.step(optimizer, lambda: 3.0) == 3.0
    null.update()
    null.load_state_dict({"scale": 4.0})
    assert (null.get_scale(), null.is_enabled(), null.state_dict()) == (1.0, False, {})
    assert torch.equal(p, torch.zeros(3))
    public = {n for n in vars(LossScaler) if not n.startswith("_")} - {"min_scale", "max_scale"}
    assert public <= {n for n in dir(NullScaler)}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_no_more_device_reads_than_torch(name: str) -> None:
    """Counted as ``_local_scalar_dense``; torch's Adam makes some of its own on a CPU."""
    reads = []
    for make in (GradScaler, LossScaler):
        model = two_layers()
        optimizer = OPTIMIZERS[name](list(model.parameters()))
        scaler = make("cpu")
        window(scaler, model, optimizer, batches()[0])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for batch in batches(4):
                window(scaler, model, optimizer, batch, None)
        reads.append(sum(e.name == "aten::_local_scalar_dense" for e in profile.events()))
    theirs, ours = reads
    assert ours <= theirs
    assert ours == 0 or name.startswith("adamw")
