"""Rows S1-S7 and S9-S11 of the cases from real life in a Session's own loop; S8 is in tests/distributed.

The scaler alone has tests/cases/test_scaling.py.
"""

import copy
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equipoise import LossScaler, Session
from equipoise.errors import StallError

Tensor = torch.Tensor
X = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(16, 2, generator=torch.Generator().manual_seed(1))


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def session_of(model: Any, optimizer: Any, precision: str = "fp16", **options: Any) -> Session:
    if precision == "fp16":
        options.setdefault("scaler", LossScaler("cpu", init_scale=2.0**10))
    return Session(model, optimizer, precision=precision, emulate=precision != "fp32", **options)


def loss_of(session: Session, model: nn.Module, factor: float = 1.0) -> Tensor:
    with session.autocast():
        return F.mse_loss(model(X).float(), Y) * factor


@pytest.mark.parametrize("how", ["max_grad_norm", "by hand", "accumulated"])
def test_s1_clipping_sees_true_gradients_whatever_the_scale(how: str) -> None:
    results = []
    for scale in (None, 1.0, 2.0**10):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {} if scale is None else {"scaler": LossScaler("cpu", init_scale=scale)}
        session = session_of(model, optimizer, "fp32" if scale is None else "fp16", **options)
        for _ in range(4):
            if how == "accumulated":
                session.backward(loss_of(session, model, 0.5))
            if how == "by hand":
                session.backward(loss_of(session, model))
                session.unscale()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                report = session.step()
            else:
                factor = 0.5 if how == "accumulated" else 1.0
                report = session.step(loss_of(session, model, factor), max_grad_norm=0.05)
            assert not report.skipped
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    moved = float((results[0] - torch.cat([p.detach().flatten() for p in small_model().parameters()])).norm())
    assert moved == pytest.approx(4 * 0.1 * 0.05, rel=1e-2)  # each step is as long as the limit says
    for half in results[1:]:
        assert float((half - results[0]).norm()) < 1e-2 * moved


def test_s2_two_optimizers_move_under_one_scale_and_one_update() -> None:
    """Growth after every step: a second update would show in the scale and in the second's step."""
    model = nn.ModuleList([small_model(), small_model()])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in model]
    session = session_of(model, optimizers, scaler=LossScaler("cpu", init_scale=4.0, growth_interval=1))
    for step in range(5):
        assert session.scaler.get_scale() == 4.0 * 2**step
        with session.autocast():
            loss = sum(F.mse_loss(m(X).float(), Y) for m in model)
        assert not session.step(loss).skipped
        for a, b in zip(model[0].parameters(), model[1].parameters(), strict=True):
            assert torch.equal(a, b)


def test_s3_a_scale_that_would_grow_waits_for_the_windows_end() -> None:
    weights = []
    for micro in (1, 4):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = session_of(model, optimizer, scaler=LossScaler("cpu", init_scale=4.0, growth_interval=1))
        for step in range(4):
            for _ in range(micro - 1):
                session.backward(loss_of(session, model, 1 / micro))
            report = session.step(loss_of(session, model, 1 / micro))
            assert report.scale == 4.0 * 2**step and not report.skipped
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_s4_four_overflows_move_neither_step_nor_schedule_nor_average(precision: str) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    session = session_of(model, optimizer, precision, lr_scheduler=schedule, ema=ema)
    for _ in range(2):
        session.step(loss_of(session, model))
    before = copy.deepcopy(
        (
            model.state_dict(),
            optimizer.state_dict(),
            schedule.state_dict(),
            ema.state_dict(),
            session.taken_count,
        )
    )
    scale = session.scaler.get_scale()
    for _ in range(4):
        report = session.step(loss_of(session, model, math.inf))
        assert report.skipped
    after = (
        model.state_dict(),
        optimizer.state_dict(),
        schedule.state_dict(),
        ema.state_dict(),
        session.taken_count,
    )
    assert str(before) == str(after) and session.step_count == 6
    assert session.scaler.get_scale() == scale / (16 if precision == "fp16" else 1)
    report = session.step(loss_of(session, model))
    assert not report.skipped and schedule.last_epoch == 3 and int(ema.n_averaged) == 3


class Overflows(nn.Module):
    """Its backward always makes an infinity in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bad, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.bad(self.first(x).detach())
        if h.requires_grad:
            h.register_hook(lambda grad: grad * math.inf)
        return self.last(self.first(x) + h)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_s5_an_inf_that_stays_is_an_error_with_the_layers_name_within_20_steps(precision: str) -> None:
    model = Overflows()
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
    steps = 0
    with pytest.raises(StallError, match=r"20 steps in a row were skipped.*\bbad\b"):
        for _ in range(300):
            session.step(loss_of(session, model))
            steps += 1
    assert steps == 19
    assert precision != "fp16" or session.scaler.get_scale() >= 2.0**-24


def test_s5_and_s6_the_scale_ends_at_floor_and_cap() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    scaler = LossScaler("cpu", init_scale=1.0, growth_interval=1)
    session = session_of(model, optimizer, scaler=scaler, on_stall="record")
    for _ in range(80):
        session.step(loss_of(session, model, 1e-25))
        assert math.isfinite(session.scaler.get_scale())
    assert session.scaler.get_scale() == 2.0**48
    with pytest.warns(UserWarning, match="20 steps in a row were skipped"):
        for _ in range(120):
            session.step(loss_of(session, model, math.inf))
            assert session.scaler.get_scale() > 0
    assert session.scaler.get_scale() == 2.0**-24
    assert [d.what for d in session.decisions] == ["stall"]
    assert all(bool(p.isfinite().all()) for p in model.parameters())


CHILD = """
import sys, torch
sys.path.insert(0, {here!r})
from test_scaling_in_a_session import scales
print(scales({file!r}, {start}, {stop}))
"""


def scales(file: str, start: int, stop: int) -> list[float]:
    """Scales of steps ``start`` to ``stop``, from the state in ``file`` if there is one; writes it."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    session = session_of(model, optimizer, scaler=LossScaler("cpu", init_scale=2.0**10, growth_interval=7))
    if Path(file).exists():
        saved = torch.load(file, weights_only=True)
        model.load_state_dict(saved["model"])
        session.load_state_dict(saved["session"])
    seen = []
    for step in range(start, stop):
        session.step(loss_of(session, model, math.inf if step % 23 == 5 or step in (101, 102) else 1.0))
        seen.append(session.scaler.get_scale())
    torch.save({"model": model.state_dict(), "session": session.state_dict()}, file)
    return seen


@pytest.mark.parametrize("stop", [0, 100])
def test_s7_a_new_process_goes_on_with_the_scales_of_an_unbroken_run(stop: int, tmp_path: Path) -> None:
    unbroken = scales(str(tmp_path / "whole"), 0, 200)
    assert len(set(unbroken)) > 5
    file = str(tmp_path / "parts")
    assert scales(file, 0, stop) == unbroken[:stop]
    code = CHILD.format(here=str(Path(__file__).parent), file=file, start=stop, stop=200)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.strip() == str(unbroken[stop:]), done.stderr
    whole, parts = (torch.load(tmp_path / name, weights_only=True)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_s7_the_state_of_a_run_without_a_scaler_is_accepted() -> None:
    wide = small_model()
    plain = session_of(wide, torch.optim.SGD(wide.parameters(), lr=0.1), "fp32")
    plain.step(loss_of(plain, wide))
    state = plain.state_dict()
    assert state["scaler"] == {}
    model = small_model()
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.load_state_dict(state | {"plan": None})
    assert session.scaler.get_scale() == 2.0**10 and session.step_count == 1
    assert not session.step(loss_of(session, model)).skipped


class Odd(nn.Module):
    """Complex weights, and an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.table = nn.Embedding(5, 4, sparse=True)
        self.last = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        h = self.table(words).sum(1)
        return self.last((h * self.phase).abs())


@pytest.mark.parametrize("clip", [None, 0.1])
def test_s9_and_s11_complex_and_sparse_gradients_in_one_step(clip: float | None) -> None:
    words = torch.tensor([[1, 1, 3], [3, 0, 1]])  # repeated: the parts of a sum
    after = {}
    for precision in ("fp32", "fp16"):
        model = Odd()
        session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), precision)
        for _ in range(3):
            with session.autocast():
                loss = model(words).float().square().mean()
            assert not session.step(loss, max_grad_norm=clip).skipped
        after[precision] = [p.detach() for p in model.parameters()]
    for a, b, start in zip(after["fp32"], after["fp16"], Odd().parameters(), strict=True):
        moved = float((a - start.detach()).abs().norm())
        assert moved > 0 and float((a - b).abs().norm()) < 0.02 * moved


@pytest.mark.parametrize("part", ["phase", "table"])
def test_s9_and_s11_an_overflow_in_them_is_a_skip(part: str) -> None:
    model = Odd()
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    before = [p.detach().clone() for p in model.parameters()]
    with session.autocast():
        loss = model(torch.tensor([[1, 1, 3]])).float().square().mean()
    session.backward(loss)
    session.unscale()
    grad: Any = model.phase.grad if part == "phase" else model.table.weight.grad
    (torch.view_as_real(grad) if part == "phase" else grad._values())[0, 0] = math.nan
    assert session.step().skipped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_s10_a_norm_beyond_halfs_range_clips_and_does_not_zero(precision: str) -> None:
    """2**18 gradients of 100 and more: their norm of 5e4 squared leaves FP16, not FP32."""
    torch.manual_seed(0)
    model = nn.Linear(512, 512, bias=False)
    before = model.weight.detach().clone()
    options = {"scaler": LossScaler("cpu", init_scale=1.0)} if precision == "fp16" else {}
    session = session_of(model, torch.optim.SGD(model.parameters(), lr=1.0), precision, **options)
    with session.autocast():
        loss = model(torch.full((4, 512), 50.0)).float().sum()
    report = session.step(loss, max_grad_norm=1.0)
    assert not report.skipped and report.grad_norm == pytest.approx(200 * 512, rel=1e-3)
    assert float((model.weight.detach() - before).norm()) == pytest.approx(1.0, rel=1e-3)
