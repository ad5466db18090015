"""The work that the probe times: real operators at the shapes of training, in each direction.

Enters: a format on a device (:class:`Arithmetic`) and a size. Leaves: for each direction a call without
arguments. Where: before the first step, in the probe's child only; imports torch.
Source: the operators that autograd itself calls: for ``Y = X W^T`` the input gradient is ``dY W`` and the
weight gradient ``dY^T X``; for convolutions ``aten::convolution_backward`` with one output asked for at a
time.

Shapes: B batch, I inputs, O outputs, C channels, S height and width, H heads, T tokens, D width of a head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..formats import FORMATS, Format

Call = Callable[[], object]
Size = tuple[int, ...]

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input-gradient", "weight-gradient"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """One format on one device."""

    name: str
    device: torch.device

    @property
    def format(self) -> Format:
        """How its numbers lie in memory; TF32's are FP32's."""
        return FORMATS["fp32" if self.name == "tf32" else self.name]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of its tensors."""
        dtype: torch.dtype = getattr(torch, self.format.torch_name)
        return dtype

    def tensor(self, *shape: int) -> torch.Tensor:
        """Normal random numbers."""
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def activate(self) -> None:
        """Set what isn't in the dtype: FP32 tensors on CUDA may be multiplied in TF32 or not."""
        if self.device.type == "cuda" and self.dtype is torch.float32:
            precision = "tf32" if self.name == "tf32" else "ieee"
            torch.backends.cuda.matmul.fp32_precision = precision
            cudnn: Any = torch.backends.cudnn  # a module that replaces itself: its parts have no types
            cudnn.conv.fp32_precision = precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One operator at growing sizes."""

    op: str
    sizes: tuple[Size, ...]
    """Smallest first: the rate at one size predicts the next, so that a hopeless one isn't started."""
    build: Callable[[Arithmetic, Size], dict[str, Call]]
    """The calls by direction; empty where the format has no such operator."""
    work: Callable[[Arithmetic, Size, str], float]
    """Floating-point operations or bytes of one call."""
    show: Callable[[Size], str]
    unit: str = "flop/s"
    decisive: bool = False
    """Whether the verdicts come from it: measured longer, and again under foreign load."""


def _gemm(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
    batch, inputs, outputs = size
    if arithmetic.name.startswith("fp8"):
        return _gemm_fp8(arithmetic, size)
    x = arithmetic.tensor(batch, inputs)  # (B, I)
    w = arithmetic.tensor(outputs, inputs)  # (O, I)
    g = arithmetic.tensor(batch, outputs)  # (B, O)
    return {FORWARD: lambda: x @ w.t(), INPUT_GRADIENT: lambda: g @ w, WEIGHT_GRADIENT: lambda: g.t() @ x}


def _gemm_fp8(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
    """Scaled products: row-major times column-major is all that the kernels take; scales are 1."""
    batch, inputs, outputs = size
    one = torch.ones((), device=arithmetic.device)

    def product(rows: int, inner: int, columns: int) -> Call:
        a, b = arithmetic.tensor(rows, inner), arithmetic.tensor(columns, inner).t()
        return lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)

    return {
        FORWARD: product(batch, inputs, outputs),
        INPUT_GRADIENT: product(batch, outputs, inputs),
        WEIGHT_GRADIENT: product(outputs, batch, inputs),
    }


def _gemm_work(arithmetic: Arithmetic, size: Size, direction: str) -> float:
    batch, inputs, outputs = size
    return 2.0 * batch * inputs * outputs


def _conv(
    memory_format: torch.memory_format, *, depthwise: bool = False, stride: int = 1
) -> Callable[[Arithmetic, Size], dict[str, Call]]:
    def build(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
        if arithmetic.name.startswith("fp8"):
            return {}
        batch, channels, side = size
        groups = channels if depthwise else 1
        x = arithmetic.tensor(batch, channels, side, side).to(memory_format=memory_format)  # (B, C, S, S)
        w = arithmetic.tensor(channels, channels // groups, 3, 3).to(memory_format=memory_format)

        def forward() -> torch.Tensor:
            return F.conv2d(x, w, stride=stride, padding=1, groups=groups)

        g = arithmetic.tensor(*_out(size, stride)).to(memory_format=memory_format)

        def backward(of_input: bool) -> object:
            return torch.ops.aten.convolution_backward(
                g,
                x,
                w,
                None,
                (stride, stride),
                (1, 1),
                (1, 1),
                False,
                (0, 0),
                groups,
                (of_input, not of_input, False),
            )

        return {
            FORWARD: forward,
            INPUT_GRADIENT: lambda: backward(True),
            WEIGHT_GRADIENT: lambda: backward(False),
        }

    return build


def _out(size: Size, stride: int) -> Size:
    batch, channels, side = size
    small = (side - 1) // stride + 1
    return batch, channels, small, small


def _conv_work(*, depthwise: bool = False, stride: int = 1) -> Callable[[Arithmetic, Size, str], float]:
    def work(arithmetic: Arithmetic, size: Size, direction: str) -> float:
        batch, channels, small, _ = _out(size, stride)
        return 2.0 * 9 * batch * channels * (1 if depthwise else channels) * small * small

    return work


def _attention(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
    if arithmetic.name.startswith("fp8"):
        return {}
    q, k, v = (arithmetic.tensor(*size).requires_grad_() for _ in range(3))  # (B, H, T, D)
    out = F.scaled_dot_product_attention(q, k, v)
    g = arithmetic.tensor(*size)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(q, k, v)

    return {FORWARD: forward, "backward": lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True)}


def _attention_work(arithmetic: Arithmetic, size: Size, direction: str) -> float:
    batch, heads, tokens, width = size
    return (4.0 if direction == FORWARD else 10.0) * batch * heads * tokens * tokens * width


def _elementwise(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
    if arithmetic.name in ("tf32", "fp8-e4m3"):
        return {}
    a, b, out = (arithmetic.tensor(*size) for _ in range(3))
    return {FORWARD: lambda: torch.mul(a, b, out=out)}


def _conversion(arithmetic: Arithmetic, size: Size) -> dict[str, Call]:
    if arithmetic.dtype is torch.float32:
        return {}
    wide = torch.randn(*size, device=arithmetic.device)
    narrow = wide.to(arithmetic.dtype)
    return {"narrow": lambda: narrow.copy_(wide), "widen": lambda: wide.copy_(narrow)}


def _bytes_of(tensors: int, *, wide: int = 0) -> Callable[[Arithmetic, Size, str], float]:
    return lambda arithmetic, size, direction: float(
        size[0] * (tensors * arithmetic.dtype.itemsize + 4 * wide)
    )


def _times(size: Size) -> str:
    return "x".join(str(n) for n in size)


def _conv_family(
    op: str,
    sizes: tuple[Size, ...],
    *,
    memory_format: torch.memory_format = torch.channels_last,
    depthwise: bool = False,
    stride: int = 1,
    decisive: bool = False,
) -> Family:
    return Family(
        op=op,
        sizes=sizes,
        decisive=decisive,
        build=_conv(memory_format, depthwise=depthwise, stride=stride),
        work=_conv_work(depthwise=depthwise, stride=stride),
        show=lambda size: f"{_times(size)}x{size[2]}",
    )


def families(*, quick: bool, accelerator: bool) -> list[Family]:
    """All that is timed, what the verdicts need first. An accelerator is busy at larger sizes only."""
    sides: tuple[int, ...] = (64, 256, 1024) if quick else (64, 128, 256, 512, 1024, 2048)
    convs: tuple[Size, ...] = ((1, 16, 8), (4, 32, 16), (8, 64, 16))
    depthwise: tuple[Size, ...] = ((1, 32, 8), (4, 144, 16))
    skinny: tuple[Size, ...] = ((8, 256, 256), (8, 1024, 1024), (32, 1024, 1024))
    tokens: tuple[Size, ...] = ((1, 2, 32, 32), (2, 6, 128, 64))
    if not quick:
        convs += ((16, 128, 16),)
    if accelerator:
        sides += (4096,) if quick else (4096, 8192)
        convs += ((64, 256, 32),)
        depthwise += ((64, 512, 32),)
        tokens += ((8, 12, 1024, 64),)
    numbers: tuple[Size, ...] = ((2**14,), (2**22,))
    return [
        Family(
            op="gemm",
            sizes=tuple((n, n, n) for n in sides),
            build=_gemm,
            work=_gemm_work,
            show=_times,
            decisive=True,
        ),
        _conv_family("conv", convs, decisive=True),
        _conv_family("conv-depthwise-stride2", depthwise, depthwise=True, stride=2),
        _conv_family("conv-depthwise", depthwise, depthwise=True),
        Family(
            op="gemm-skinny",
            sizes=skinny[1:2] if quick else skinny,
            build=_gemm,
            work=_gemm_work,
            show=_times,
        ),
        _conv_family("conv-nchw", convs, memory_format=torch.contiguous_format),
        Family(op="attention", sizes=tokens, build=_attention, work=_attention_work, show=_times),
        Family(
            op="convert",
            sizes=numbers,
            build=_conversion,
            work=_bytes_of(1, wide=1),
            show=_times,
            unit="byte/s",
        ),
        Family(
            op="elementwise", sizes=numbers, build=_elementwise, work=_bytes_of(3), show=_times, unit="byte/s"
        ),
    ]
