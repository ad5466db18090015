"""F3 and F4: updates that half formats lose.

The neighbours: each way to keep weights, each optimizer, decay alone, momentum, second moments.
"""

from typing import Any

import pytest
import torch
from torch import nn

from equipoise import Session

KINDS = ("fp32", "split", "kahan", "stochastic")


def at_one(optimizer: Any, weights: str, gradient: float, steps: int, **more: Any) -> torch.Tensor:
    """4,096 weights that start at 1.0, each with the same gradient in each step; the weights afterwards."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    nn.init.ones_(model[0].weight)
    session = Session(
        model, optimizer(model.parameters()), precision="bf16", emulate=True, weights=weights, **more
    )
    for _ in range(steps):
        with session.autocast():
            loss = (model(torch.eye(64)) * gradient).sum()
        assert not session.step(loss).skipped
    return model.state_dict()["0.weight"]


@pytest.mark.parametrize("weights", KINDS)
def test_F4_bf16_weights_move_with_small_updates(weights: str) -> None:
    """100 updates of 6e-4 at 1.0, each below half of bf16's step there, 2**-8."""
    gradient = 2.0**-10  # exact in bf16
    found = at_one(lambda p: torch.optim.SGD(p, lr=0.6144), weights, gradient, 100)
    true = 1 - 100 * 6e-4
    if weights in ("fp32", "split"):
        assert found == pytest.approx(torch.full((64, 64), true), abs=1e-5)
    else:
        # Kahan keeps 2**-17 of a weight; stochastic rounding is 2**-9 off once, and a walk of 100 steps
        assert found.mean().item() == pytest.approx(true, abs=1e-3)
        assert (found - true).abs().max() < {"kahan": 1e-3, "stochastic": 0.1}[weights]


def test_F4_bf16_alone_would_not_move() -> None:
    w = torch.ones(64, dtype=torch.bfloat16)
    for _ in range(100):
        w -= 6e-4
    assert torch.equal(w, torch.ones_like(w))


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-2),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    ],
    ids=["sgd", "adamw", "adamw-fused"],
)
def test_F4_weight_decay_alone_moves_them(optimizer: Any, weights: str) -> None:
    """Decay by 1e-3 a step, without a gradient: 200 steps leave 0.999**200."""
    found = at_one(optimizer, weights, 0.0, 200).mean().item()
    assert found == pytest.approx(0.999**200, abs=2e-3)


@pytest.mark.parametrize("weights", KINDS)
def test_F4_momentum_counts(weights: str) -> None:
    found = at_one(lambda p: torch.optim.SGD(p, lr=2.0**-4, momentum=0.9), weights, 2.0**-10, 100)
    true = at_one(lambda p: torch.optim.SGD(p, lr=2.0**-4, momentum=0.9), "fp32", 2.0**-10, 100)
    assert 1 - found.mean().item() == pytest.approx(1 - true.mean().item(), rel=0.02)


@pytest.mark.parametrize("state", ["fp32", "8bit"])
@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad"])
def test_F3_a_gradient_of_zero_and_one_whose_square_underflows(
    optimizer: str, weights: str, state: str
) -> None:
    """1e-4 squared is 1e-8, zero in FP16; 1e-30 squared is zero in FP32 too."""
    make = getattr(torch.optim, optimizer)
    for gradient in (0.0, 1e-4, 1e-30):
        found = at_one(lambda p: make(p, lr=1e-2), weights, gradient, 3, state=state)
        true = at_one(lambda p: make(p, lr=1e-2), "fp32", gradient, 3)
        assert bool(found.isfinite().all())
        # bf16's own step below 1 is 2**-8, and three were made; FP8 state is within an eighth of its number
        rounding = 3 * 2.0**-8 if weights == "stochastic" else 1e-4
        moved = (true - 1).abs().max().item()
        assert (found - true).abs().max().item() <= rounding + (moved / 4 if state == "8bit" else 0)
        assert (found - true).mean().abs().item() <= 2.0**-11 + (moved / 16 if state == "8bit" else 0)


@pytest.mark.parametrize("fused", [False, True])
def test_F3_adam_under_fp16(fused: bool) -> None:
    """A Session's FP16 keeps weights, gradients and moments in FP32: the step is FP32's."""
    steps = {}
    for precision in ("fp32", "fp16"):
        model = nn.Linear(8, 8, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=fused)
        session = Session(model, optimizer, precision=precision, emulate=precision == "fp16")
        for gradient in (0.0, 1e-4, 0.0):
            with session.autocast():
                loss = (model(torch.eye(8)).float() * gradient).sum()
            assert not session.step(loss).skipped
        steps[precision] = model.weight.detach().clone()
    assert torch.allclose(steps["fp16"], steps["fp32"], rtol=0, atol=1e-5)
    assert (steps["fp16"] < 1).all()
