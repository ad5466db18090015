"""Exponents are counted exactly, at the edges of FP32 too."""

import math
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from equipoise.errors import FormatError
from equipoise.step.ranges import BINS, LOSSY, bin_of, exponent_counts, ranges_of


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


@pytest.mark.parametrize("name", LOSSY)
def test_nothing_but_zeros_loses_nothing(name: str) -> None:
    found = ranges_of(exponent_counts(torch.zeros(7)), name)
    assert (found.values, found.underflow, found.overflow, found.sqnr_db, found.scale) == (0, 0, 0, None, 1)


@pytest.mark.parametrize("name", LOSSY)
def test_infinities_and_nans_are_no_values(name: str) -> None:
    found = ranges_of(exponent_counts(torch.tensor([math.inf, math.nan, 1.0, 0.0])), name)
    assert (found.values, found.underflow, found.overflow) == (1, 0, 0)


@pytest.mark.parametrize("name", ["fp32", "fp17", "e4m3", ""])
def test_a_format_without_ranges_is_named(name: str) -> None:
    with pytest.raises(FormatError, match=f"no ranges for format '{name}'; allowed: fp16, bf16, fp8-e4m3"):
        ranges_of(exponent_counts(torch.ones(1)), name)


def test_numbers_that_fit_get_no_scale() -> None:
    found = ranges_of(exponent_counts(torch.randn(1000)), "fp16")
    assert (found.scale, found.underflow, found.overflow) == (1.0, 0.0, 0.0)


def test_small_numbers_are_lifted_and_large_ones_lowered() -> None:
    small = ranges_of(exponent_counts(torch.randn(10_000) * 2.0**-26), "fp16")
    assert small.underflow > 0.3 and small.scaled_underflow < 0.002 and small.scale > 2**8
    large = ranges_of(exponent_counts(torch.randn(10_000) * 2.0**20), "fp16")
    assert large.overflow > 0.9 and large.scale < 2**-5
    assert large.scaled_sqnr_db is not None and large.sqnr_db is not None
    assert large.scaled_sqnr_db > large.sqnr_db + 50


def test_bf16_has_fp32s_range_and_two_bits_fewer_than_fp16() -> None:
    counts = exponent_counts(torch.exp2(torch.linspace(-120, 120, 10_001)))
    wide, fp16 = ranges_of(counts, "bf16"), ranges_of(counts, "fp16")
    assert (wide.underflow, wide.overflow, wide.subnormal) == (0, 0, 0)
    assert fp16.underflow > 0.35 and fp16.overflow > 0.35
    close = exponent_counts(1 + torch.rand(10_000))
    bits = [ranges_of(close, n).sqnr_db for n in ("fp16", "bf16", "fp8-e4m3", "fp8-e5m2")]
    steps = [a - b for a, b in pairwise(bits)]  # type: ignore[operator]
    assert steps == pytest.approx([3 * 6.02, 4 * 6.02, 6.02], abs=0.01)  # 6.02 dB a mantissa bit
