"""The finite check and clipping, on every kind of gradient."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.step import gradients

INF = float("inf")
CPU = torch.device("cpu")


def sparse(*values: float) -> torch.Tensor:
    return torch.sparse_coo_tensor([[0] * len(values)], list(values), (3,), check_invariants=True)


CASES = {
    "none": ([], False),
    "fp32": ([torch.ones(3), torch.zeros(2)], False),
    "fp32-inf": ([torch.ones(3), torch.tensor([1.0, -INF])], True),
    "fp32-nan": ([torch.tensor([math.nan])], True),
    "fp64-inf": ([torch.tensor([INF], dtype=torch.float64)], True),
    "bf16-inf": ([torch.tensor([INF], dtype=torch.bfloat16)], True),
    "fp16": ([torch.ones(3, dtype=torch.float16)], False),
    "mixed": ([torch.ones(2), torch.ones(2, dtype=torch.float64)], False),
    "mixed-inf": ([torch.ones(2), torch.tensor([INF], dtype=torch.float64)], True),
    "complex": ([torch.ones(2, dtype=torch.complex64)], False),
    "complex-inf": ([torch.ones(2), torch.tensor([complex(1, INF)])], True),
    "sparse": ([sparse(1.0, 2.0)], False),
    "sparse-sum-overflows": ([torch.ones(2), sparse(3e38, 3e38)], True),
    "transposed": ([torch.tensor([[1, INF], [2, 3]]).t()], True),
    "no-numbers": ([torch.ones(0)], False),
    "largest": ([torch.full((4,), torch.finfo(torch.float32).max)], False),
    "subnormal": ([torch.full((4,), 1e-45)], False),
}


@pytest.mark.parametrize("name", CASES)
def test_finite_check(name: str) -> None:
    grads, bad = CASES[name]
    before = [g.clone() for g in grads]
    check = gradients.FiniteCheck(CPU)
    for _ in range(2):  # a flag that went up must come down again
        check(grads)
        assert check.on_host() is bad
    check([torch.ones(1)])
    assert check.on_host() is False
    if not bad:
        for a, b in zip(before, grads, strict=True):
            assert torch.equal(a.to_dense(), b.to_dense())  # not a bit has changed


@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_the_check_agrees_with_isfinite(values: list[float]) -> None:
    check = gradients.FiniteCheck(CPU)
    check([torch.tensor(values)])
    assert check.on_host() is not all(math.isfinite(v) for v in values)


def leaves(*grads: torch.Tensor) -> list[torch.Tensor]:
    found = []
    for g in grads:
        p = torch.zeros(g.shape, dtype=g.dtype, requires_grad=True)
        p.grad = g
        found.append(p)
    return found


@pytest.mark.parametrize(
    "values",
    [
        [3.0, 4.0],
        [0.0, 0.0],
        [1e-30, 1e-30],
        [1e25, 1e25],
        [torch.finfo(torch.float32).max] * 3,
        [5e-39, 2e-39],
    ],
)
def test_norm_and_clipping_against_float64(values: list[float]) -> None:
    grad = torch.tensor(values)
    exact = torch.linalg.vector_norm(grad.double())
    (p,) = leaves(grad.clone())
    norm = gradients.clip([p], [p.grad], 1.0)
    # FP32 holds squares from about 1e-19 on; below, the norm may come out 0, and nothing is clipped there
    # anyway.
    if float(exact) > 1e-18 and float(exact) < torch.finfo(torch.float32).max:
        assert float(norm) == pytest.approx(float(exact), rel=1e-6)
    clipped = torch.linalg.vector_norm(p.grad.double())
    assert torch.isfinite(clipped) and float(clipped) <= 1.0 + 1e-6
    if float(exact) <= 1.0:
        torch.testing.assert_close(p.grad, grad, rtol=1e-6, atol=0)


def test_half_gradients_are_measured_in_fp32() -> None:
    big = torch.full((10_000,), 1000.0, dtype=torch.float16)  # the sum of squares is 1e10: inf in FP16
    (p,) = leaves(big)
    norm = gradients.clip([p], [p.grad], 1e5)
    assert float(norm) == pytest.approx(1e5, rel=1e-3)
    assert torch.count_nonzero(p.grad) == 10_000


def test_sparse_gradients_are_clipped() -> None:
    p = torch.zeros(3, requires_grad=True)
    p.grad = sparse(3.0, 4.0)  # one place, so its gradient is 7
    norm = gradients.clip([p], [p.grad], 1.0)
    assert float(norm) == pytest.approx(7.0)
    assert float(p.grad.to_dense().abs().max()) == pytest.approx(1.0, rel=1e-5)


def test_collect_sees_groups_added_later_and_only_real_gradients() -> None:
    a, b, c = leaves(torch.ones(1), torch.ones(2), torch.ones(3))
    b.grad = None
    opt = torch.optim.SGD([a, b], lr=0.1)
    opt.add_param_group({"params": [c]})
    parameters, grads = gradients.collect([opt])
    assert [p is q for p, q in zip(parameters, (a, c), strict=True)] == [True, True]
    assert [g.numel() for g in grads] == [1, 3]


def test_the_first_bad_parameter_is_named() -> None:
    a, b = leaves(torch.ones(2), torch.tensor([1.0, INF]))
    assert gradients.first_nonfinite([("a", a), ("b", b)]) == "b"
    assert gradients.first_nonfinite([("a", a)]) is None


@pytest.mark.parametrize("limit", [1e-3, 1.0, 5.0, 5.0 + 1e-5, 1e6])
def test_clipping_gives_the_bits_of_torchs_own(limit: float) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(7, 5), torch.randn(3), torch.tensor(2.0)]
    whole = torch.linalg.vector_norm(torch.cat([g.flatten() for g in grads]))
    grads = [g * (5.0 / whole) for g in grads]  # at 5 exactly: both sides of the limit are near
    ours, theirs = leaves(*(g.clone() for g in grads)), leaves(*(g.clone() for g in grads))
    norm = gradients.clip(ours, [p.grad for p in ours], limit)
    assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(theirs, limit))
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours, theirs, strict=True))


def test_a_nan_does_not_spread_to_gradients_that_are_not_to_blame() -> None:
    fine, bad = leaves(torch.ones(3), torch.tensor([1.0, float("nan")]))
    norm = gradients.clip([fine, bad], [fine.grad, bad.grad], 1.0)
    assert norm.isnan() and torch.equal(fine.grad, torch.ones(3))
    assert gradients.first_nonfinite([("fine", fine), ("bad", bad)]) == "bad"
