"""Exponents are counted exactly, at the edges of FP32 too."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.step.ranges import BINS, bin_of, exponent_counts


def test_edges_of_fp32_fall_into_their_bins() -> None:
    tiny, largest = 2.0**-149, torch.finfo(torch.float32).max
    values = torch.tensor([0.0, -0.0, tiny, -(2.0**-127), 2.0**-126, 1.0, -1.99, 2.0, largest])
    counts = exponent_counts(values)
    assert counts.shape == (BINS,) and counts.sum() == 9
    once = {bin_of(e): 1 for e in (-149, -127, -126, 1, 127)}
    assert {i: int(n) for i, n in enumerate(counts) if n} == {0: 2, bin_of(0): 2, **once}


def test_infinities_and_nans_have_the_last_bin() -> None:
    counts = exponent_counts(torch.tensor([math.inf, -math.inf, math.nan, 3.0]))
    assert counts[-1] == 3 and counts[bin_of(1)] == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_other_types_count_by_their_value(dtype: torch.dtype) -> None:
    counts = exponent_counts(torch.full((3, 5), 4.0, dtype=dtype))
    assert counts[bin_of(2)] == 15
    assert counts[0] == (15 if dtype.is_complex else 0)


def test_empty_tensor_counts_nothing() -> None:
    assert exponent_counts(torch.empty(0)).sum() == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=40))
def test_counts_equal_frexp(numbers: list[float]) -> None:
    counts = exponent_counts(torch.tensor(numbers, dtype=torch.float32))
    expected = [0] * BINS
    for x in numbers:
        if not math.isfinite(x):
            expected[-1] += 1
        elif x == 0:
            expected[0] += 1
        else:
            expected[bin_of(math.frexp(x)[1] - 1)] += 1
    assert counts.tolist() == expected
