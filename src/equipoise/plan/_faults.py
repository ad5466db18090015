"""Whether a format's results are right: small products, subnormals, the sum inside a product.

Enters: a format on a device. Leaves: what was found wrong, each in one sentence; nothing for a sound
format.
Where: before the first step, in the probe's child only; imports torch.
Source: IEEE 754-2019. The three questions:

*Small products.* Whole numbers from -1 to 2 and at most 64 terms give sums up to 256, which every format
with 8 significant bits holds exactly, partial sums included. Any difference to float64 is a fault of the
kernel.
*Subnormals.* A number below the smallest normal one, times 1, is itself. Some units replace it by 0.
*The accumulator.* 64 ones and 4032 times 2^-12 add up to 64.98, which rounds to 65. An accumulator with
fewer than about 13 bits loses the small terms and stays at 64.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from ..formats import FORMATS
from ._workloads import Arithmetic


def faults_of(arithmetic: Arithmetic) -> Iterator[dict[str, str]]:
    """Each fault found, as ``{"fault": ..., "text": ...}``; ``inexact`` alone makes a format unusable."""
    if arithmetic.name.startswith("fp8"):
        return  # its only operator is the scaled product, checked where it is used
    arithmetic.activate()
    for question in (_inexact, _flushed, _narrow_sum):
        try:
            yield from question(arithmetic)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            yield {"fault": "unchecked", "text": f"{question.__doc__}: {str(error).splitlines()[0][:120]}"}


def _inexact(arithmetic: Arithmetic) -> Iterator[dict[str, str]]:
    """Products of small whole numbers."""
    generator = torch.Generator().manual_seed(0)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 3, shape, generator=generator).double()

    def wrong(got: torch.Tensor, exact: torch.Tensor) -> int:
        return int((got.cpu().double() != exact).sum())

    for rows, inner, columns in ((64, 64, 64), (33, 47, 17), (1, 64, 64)):
        a, b = whole(rows, inner), whole(inner, columns)
        got = a.to(arithmetic.device, arithmetic.dtype) @ b.to(arithmetic.device, arithmetic.dtype)
        if count := wrong(got, a @ b):
            yield {
                "fault": "inexact",
                "text": f"{count} of {rows * columns} results of a product of small whole "
                f"numbers ({rows}x{inner}x{columns}) are wrong",
            }
    x, w = whole(2, 4, 9, 9), whole(8, 4, 3, 3)
    got = F.conv2d(
        x.to(arithmetic.device, arithmetic.dtype), w.to(arithmetic.device, arithmetic.dtype), padding=1
    )
    if count := wrong(got, F.conv2d(x, w, padding=1)):
        yield {
            "fault": "inexact",
            "text": f"{count} results of a convolution of small whole numbers are wrong",
        }


def _flushed(arithmetic: Arithmetic) -> Iterator[dict[str, str]]:
    """Subnormal numbers."""
    number_format = arithmetic.format
    tiny = torch.full((64, 64), number_format.smallest_normal / 2, dtype=torch.float64)
    tiny_lp = tiny.to(arithmetic.device, arithmetic.dtype)
    unit_lp = torch.eye(64, device=arithmetic.device).to(arithmetic.dtype)
    for where, got in (("products", tiny_lp @ unit_lp), ("element-wise operators", tiny_lp * unit_lp[0, 0])):
        if not bool((got.cpu().double() == tiny).all()):
            yield {
                "fault": "subnormals",
                "text": f"{where} flush numbers below {number_format.smallest_normal:.1e} to zero",
            }


def _narrow_sum(arithmetic: Arithmetic) -> Iterator[dict[str, str]]:
    """The accumulator of a product."""
    row = torch.full((8, 4096), 2.0**-6)
    row[:, :64] = 1.0
    row_lp = row.to(arithmetic.device, arithmetic.dtype)
    total = float((row_lp @ row_lp[:8].t())[0, 0])
    exact = 64 + 4032 * 2.0**-12
    step = FORMATS["bf16" if arithmetic.name == "bf16" else "fp16"].epsilon * 64
    if abs(total - exact) > step / 2 + 0.02:
        yield {
            "fault": "accumulate",
            "text": f"a sum of 4096 terms inside a product came to {total:g} instead of {exact:.2f}: it is "
            f"kept in less than FP32",
        }
