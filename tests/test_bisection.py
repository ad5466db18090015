"""The modules that must stay FP32 are found by running, and none is named in vain."""

import gc
import itertools
import math
from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import nn
from torch.utils.data import TensorDataset

from equipoise.bisection import Bisection, bisect, margin_of, smallest
from equipoise.errors import FormatError, TaskError
from equipoise.step import operators
from equipoise.task import Task

LOUD = 2.0**20
"""Makes FP16 overflow (its largest number is 65504), and no other format."""


class Loud(nn.Linear):
    """A layer whose outputs leave FP16's range."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * LOUD) / LOUD


class OwnCode(nn.Module):
    """No layer is at fault: the block multiplies by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.inner.weight * LOUD) / LOUD


def task_of(make: Callable[[], nn.Module], *, steps: int = 8) -> Callable[[int, str | None], Task]:
    def task(seed: int, data: str | None) -> Task:
        torch.manual_seed(seed)
        x = torch.randn(64, 8)
        splits = TensorDataset(x, (x[:, 0] > 0).long())
        model = make()
        return Task(
            name="tiny", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), train=splits,
            val=splits, test=splits, loss=lambda m, b: nn.functional.cross_entropy(m(b[0]).float(), b[1]),
            metric=lambda labels, scores: float((scores.argmax(1) == labels).mean()), metric_name="accuracy",
            batch_size=16, steps=steps,
        )  # fmt: skip

    return task


def calm() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 2))


def one_loud() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16), Loud(16, 16)), nn.ReLU(),
        nn.Linear(16, 2),
    )  # fmt: skip


def two_loud() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), Loud(16, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(),
        nn.Sequential(nn.Linear(16, 16), Loud(16, 16)), nn.Linear(16, 2),
    )  # fmt: skip


def loud_block() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), OwnCode(), nn.Linear(16, 2))


def is_one_minimal(found: Bisection) -> bool:
    """As the runs themselves say it."""
    allowed = found.fp32_loss + found.margin
    kept = found.loss is not None and found.loss <= allowed
    return kept and all(loss is None or loss > allowed for loss in found.without.values())


def test_where_nothing_overflows_nothing_must_stay_wide() -> None:
    found = bisect(task_of(calm))
    assert found.holds and found.wide == () and found.runs == 2
    assert (found.policy, found.without) == ("fp16", {})
    assert found.half_loss == found.loss != found.fp32_loss, "it did compute in FP16"
    assert found.half_loss == pytest.approx(found.fp32_loss, rel=0.01)


@pytest.mark.parametrize(
    ("model", "wide"),
    [(one_loud, ("2.1",)), (two_loud, ("1", "6.1")), (loud_block, ("3",))],
)
def test_what_overflows_is_named(model: Callable[[], nn.Module], wide: tuple[str, ...]) -> None:
    found = bisect(task_of(model))
    assert found.wide == wide
    assert found.half_loss is None, "infinite"
    assert found.policy == "; ".join(["fp16", *(f"{w}=fp32" for w in wide), *inside(wide, model())])
    assert is_one_minimal(found)
    assert set(found.without) == set(wide)
    assert found.loss == pytest.approx(found.fp32_loss, rel=0.02)


def inside(wide: tuple[str, ...], model: nn.Module) -> list[str]:
    """Modules inside a wide one are none of its own code."""
    return [f"{w}.{n}=fp16" for w in wide for n, _ in model.get_submodule(w).named_children()]


def test_bf16_holds_where_fp16_overflows() -> None:
    assert bisect(task_of(two_loud), format_name="bf16").holds


def test_a_bisection_repeats_and_leaves_nothing_behind() -> None:
    gc.collect()  # sessions of tests before this one
    installed = set(operators._INSTALLED.devices)
    seen: list[tuple[int, int, float | None]] = []
    first = bisect(task_of(one_loud), on_run=lambda *run: seen.append(run))
    assert first == bisect(task_of(one_loud))
    assert [n for n, _, _ in seen] == list(range(1, first.runs + 1))
    assert seen[0][1:] == (7, first.fp32_loss) and seen[1][1:] == (0, None)
    assert not torch.is_autocast_enabled("cpu")
    gc.collect()
    assert set(operators._INSTALLED.devices) == installed, "no session's kernels stay"


@pytest.mark.parametrize("name", ["fp8-e4m3", "fp32", "half"])
def test_only_half_formats(name: str) -> None:
    with pytest.raises(FormatError, match=f"what '{name}' breaks; allowed: fp16, bf16"):
        bisect(task_of(calm), format_name=name)


@pytest.mark.parametrize("margin", ["two", "-1%", "nan", -0.5, "", "inf"])
def test_a_margin_that_cannot_be(margin: float | str) -> None:
    with pytest.raises(TaskError, match="write a number from 0 up in the loss's units, or a share as '2%'"):
        bisect(task_of(calm), margin=margin)


def test_a_margin_is_a_number_or_a_share() -> None:
    assert margin_of("5%", -2.0) == pytest.approx(0.1)
    assert margin_of("0.25", 2.0) == margin_of(0.25, 2.0) == 0.25


def test_a_margin_of_nothing_names_more_than_one_of_two_percent() -> None:
    """The margin is what decides: FP16's rounding alone is more than nothing."""
    strict, loose = (bisect(task_of(calm), margin=m) for m in ("0%", "50%"))
    assert loose.holds
    if strict.half_loss is not None and strict.half_loss > strict.fp32_loss:
        assert not strict.holds and is_one_minimal(strict)


@pytest.mark.parametrize("steps", [0, -3])
def test_a_training_without_a_step(steps: int) -> None:
    with pytest.raises(TaskError, match=f"steps is {steps}; at least 1 step"):
        bisect(task_of(calm), steps=steps)


def test_an_fp32_loss_that_is_not_finite() -> None:
    def broken() -> nn.Module:
        model = calm()
        with torch.no_grad():
            model[0].weight.fill_(math.inf)  # type: ignore[index, union-attr, operator]
        return model

    with pytest.raises(TaskError, match=r"its loss in FP32 isn't finite within 8 steps"):
        bisect(task_of(broken))


# -- the search alone


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 24), st.data())
def test_the_search_finds_exactly_what_is_needed(n: int, data: st.DataObject) -> None:
    needed = data.draw(st.sets(st.integers(0, n - 1), min_size=1))
    asked: list[frozenset[int]] = []

    def holds(part: frozenset[int]) -> bool:
        asked.append(part)
        return needed <= part

    assert smallest(range(n), holds) == sorted(needed)
    assert len(asked) == len(set(asked)), "each set is run once"
    k = len(needed)
    if k <= 3:
        assert len(asked) <= k * (math.ceil(math.log2(n)) + 1) + 2 * k


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), min_size=1), min_size=1, max_size=4))
def test_of_any_rule_the_set_found_is_one_minimal(enough: list[set[int]]) -> None:
    """Several sets may each be enough, and more may break what less mends."""

    def holds(part: frozenset[int]) -> bool:
        return len(part) == 10 or any(s <= part and len(part - s) < 8 for s in enough)

    found = smallest(range(10), holds)
    assert holds(frozenset(found))
    for left_out in itertools.combinations(found, len(found) - 1):
        assert not left_out or not holds(frozenset(left_out))
