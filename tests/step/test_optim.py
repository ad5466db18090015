"""The fused update, switched on in the user's own optimizer and put back; optimizer state kept whole."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.errors import SessionError
from equipoise.step.optim import (
    Fused,
    can_fuse,
    cloned_state,
    distinct_optimizers,
    inner_optimizer,
    load_optimizer,
)

MADE = {
    "sgd": lambda p, **more: torch.optim.SGD(p, lr=0.1, momentum=0.9, **more),
    "adam": lambda p, **more: torch.optim.Adam(p, lr=1e-2, **more),
    "adamw": lambda p, **more: torch.optim.AdamW(p, lr=1e-2, **more),
    "adagrad": lambda p, **more: torch.optim.Adagrad(p, lr=1e-2, **more),
}


class Wrapper:
    """As Accelerate's: keeps the user's optimizer as ``.optimizer``."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((16, 8), (16,), (3,))]


def train(optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


def settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything about an optimizer but its state and parameters."""
    own = {k: v for k, v in vars(optimizer).items() if k not in ("state", "param_groups")}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return copy.deepcopy({"own": own, "groups": groups})


@pytest.mark.parametrize("name", sorted(MADE))
def test_fused_on_equals_the_users_own_fused_optimizer_bit_for_bit(name: str) -> None:
    ours, theirs = parameters(), parameters()
    a, b = MADE[name](ours), MADE[name](theirs, fused=True)
    assert can_fuse(a)
    Fused(a)
    train(a, 3)
    train(b, 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", sorted(MADE))
def test_switched_off_it_equals_one_that_was_never_fused(name: str) -> None:
    ours, theirs = parameters(), parameters()
    a, b = MADE[name](ours), MADE[name](theirs)
    before = settings(a)
    fused = Fused(a)
    assert settings(a) != before
    fused.remove()
    assert settings(a) == before
    train(a, 3)
    train(b, 3)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


def test_a_group_added_while_fused_is_fused_and_then_as_the_user_would_have_it() -> None:
    first, *rest = parameters()
    optimizer = torch.optim.AdamW([first], lr=1e-2, foreach=None)
    fused = Fused(optimizer)
    optimizer.add_param_group({"params": rest, "lr": 0.5})
    assert optimizer.param_groups[1]["fused"] is True
    train(optimizer, 1)
    fused.remove()
    assert [(g["fused"], g["foreach"], g["lr"]) for g in optimizer.param_groups] == [
        (None, None, 1e-2),
        (None, None, 0.5),
    ]
    train(optimizer, 1)


@pytest.mark.parametrize(
    "more", [{"fused": True}, {"foreach": True}, {"differentiable": True}, {"capturable": True}]
)
def test_what_the_user_chose_is_not_overruled(more: dict[str, bool]) -> None:
    assert not can_fuse(torch.optim.AdamW(parameters(), **more))


def test_no_kernel_no_fusing() -> None:
    class Own(torch.optim.SGD):
        pass

    assert not can_fuse(torch.optim.RMSprop(parameters()))
    assert not can_fuse(Own(parameters(), lr=0.1))  # its step may be its own
    sparse = nn.Parameter(torch.ones(3, 2))
    sparse.grad = torch.eye(3, 2).to_sparse()
    assert not can_fuse(torch.optim.SGD([sparse], lr=0.1))
    assert not can_fuse(torch.optim.SGD([nn.Parameter(torch.ones(2, device="meta"))], lr=0.1))
    assert can_fuse(Wrapper(torch.optim.SGD(parameters(), lr=0.1)))


def test_a_wrapper_and_what_it_wraps_are_one() -> None:
    inner = torch.optim.SGD(parameters(), lr=0.1)
    wrapper, other = Wrapper(inner), torch.optim.SGD(parameters(), lr=0.1)
    assert inner_optimizer(Wrapper(wrapper)) is inner
    assert distinct_optimizers([inner, wrapper, other, inner]) == [wrapper, other]
    assert distinct_optimizers([wrapper, inner]) == [wrapper]
    circle = Wrapper(inner)
    circle.optimizer = circle
    assert inner_optimizer(circle) is circle
    with pytest.raises(SessionError, match="optimizer is str"):
        distinct_optimizers(["adam"])


def test_a_copy_of_the_state_shares_no_memory() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2)
    train(optimizer, 1)
    first = optimizer.param_groups[0]["params"][0]
    optimizer.state[first]["nested"] = {"a": [torch.ones(2)], "n": 3}
    copied = cloned_state(optimizer)[first]
    optimizer.state[first]["nested"]["a"][0].zero_()
    optimizer.state[first]["exp_avg"].zero_()
    assert float(copied["nested"]["a"][0].sum()) == 2 and copied["nested"]["n"] == 3
    assert torch.count_nonzero(copied["exp_avg"])


def test_state_of_another_dtype_is_loaded_as_it_was_saved() -> None:
    optimizer = torch.optim.AdamW(parameters(), lr=1e-2)
    train(optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].bfloat16()
    fresh = torch.optim.AdamW(parameters(), lr=1e-2)
    load_optimizer(fresh, saved)
    for index, p in enumerate(fresh.param_groups[0]["params"]):
        assert fresh.state[p]["exp_avg"].dtype is torch.bfloat16
        assert torch.equal(fresh.state[p]["exp_avg"], saved["state"][index]["exp_avg"])
        assert fresh.state[p]["exp_avg"].data_ptr() != saved["state"][index]["exp_avg"].data_ptr()
