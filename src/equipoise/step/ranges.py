"""Exponents counted: where the magnitudes of a tensor lie on the scale of powers of two.

Enters: weights, activations, gradients or updates. Leaves: a histogram of their exponents, from which
follows what each format would flush to zero, overflow or round away. Where: on sampled steps.

Source: IEEE 754 binary32: a sign bit, eight bits of exponent, 23 of fraction.
"""

import torch

LOWEST = -149
"""Exponent of the smallest FP32 number above zero."""

BINS = 279
"""Zero; exponents from -149 to 127; not finite."""


def bin_of(exponent: int) -> int:
    """The bin of numbers in [2**exponent, 2**(exponent + 1))."""
    return exponent - LOWEST + 1


def exponent_counts(values: torch.Tensor) -> torch.Tensor:
    """How many numbers have each exponent, in one pass.

    Args:
        values: floating or complex, of any shape; complex ones count as two.

    Returns:
        int64 of shape (279,) on the same device: zeros, then floor(log2(abs(x))) from -149 to 127, then
        infinities and NaNs.
    """
    values = values.detach()
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.to(torch.float32).reshape(-1)
    bits = flat.view(torch.int32)
    biased = torch.bincount((bits >> 23).to(torch.uint8), minlength=256)  # the cast drops the sign bit
    counts = biased.new_zeros(BINS)
    counts[bin_of(-126) :] = biased[1:]
    counts[0] = flat.numel() - torch.count_nonzero(flat)
    small = flat[(bits & 0x7F800000) == 0] if int(biased[0]) > int(counts[0]) else flat[:0]
    small = small[small != 0]
    if small.numel():
        # frexp gives a fraction in [0.5, 1): its exponent is one above floor(log2)
        at = torch.frexp(small).exponent.to(torch.int64) - 1 - LOWEST + 1
        counts += torch.bincount(at, minlength=BINS)
    return counts
