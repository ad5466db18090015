"""Weights and optimizer state kept in few bits between steps; the update itself is FP32 arithmetic.

Enters: the user's optimizer and a model in FP32. Leaves: the same parameters, whose numbers lie in bf16 while
forward and backward run, and whose update the optimizer makes in FP32, a few weights at a time. Where: around
the optimizer's step, which needs no change: momentum, weight decay and fused kernels see FP32 weights.

A bf16 weight alone loses every update below 2**-9 of its size, decay included. What keeps it:

- ``split``: the FP32 weight in two halves of 16 bits. The upper half is the weight rounded to bf16, halves
  away from zero, and the lower one a signed 16-bit distance: together the FP32 weight, bit for bit. (To
  nearest *even* has one distance too many: a half may lie 0x8000 below or above.)
- ``kahan``: a second bf16 number holds what the first one lost, so that 16 to 17 bits are kept.
- ``stochastic``: nothing beside the bf16 weight; it is rounded up with the probability of what is cut off,
  and is right in the mean.

``8bit`` state: FP8 e4m3 with an FP32 factor for each 256 numbers, rounded stochastically, since a second
moment changes by less than a rounding step at a time. It is kept as its root, whose range FP8 holds.

Source: stochastic rounding: Gupta et al. 2015 (arXiv 1502.02551); compensation: Kahan 1965, and for bf16
weights Zamirai et al. 2020 (arXiv 2010.06192); blocks of state: Dettmers et al. 2021 (arXiv 2110.02861).
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ..errors import SessionError
from .cast import NARROWABLE
from .optim import inner_optimizer

Tensor = torch.Tensor

CHUNK = 2**22
"""Numbers that are FP32 at the same time, where an optimizer can be stepped in parts: 32 MiB with their
gradients."""

_ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adadelta,
)  # fmt: skip
"""Optimizers whose step over some weights doesn't know of the others."""

_SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum")
"""State of torch's optimizers that is a mean or sum of squares: never below zero."""

_BLOCK = 256
_LEAST_STATE = 4096
"""Numbers from which on a state tensor is kept in 8 bits; smaller ones cost nothing."""
_AT_A_TIME = 256
"""Blocks that are rounded at a time: their temporary numbers stay in the cache."""
_FP8 = torch.float8_e4m3fn
_FP8_LARGEST = 448.0


# -- formats of a weight


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An FP32 tensor as bf16 and int16 ones of its shape; :func:`join` gives every bit back."""
    weight = _with_one_nan(weight)
    upper, lower = _halves_of(weight)
    high, low = _like(weight, torch.int16), _like(weight, torch.int16)
    _flat(low).copy_(lower)
    # The sign is a bit of its own: one more is one further from zero. A shift spreads the first bit: 0 or -1.
    torch.sub(upper, _flat(low) >> 15, out=_flat(high))
    return high.view(torch.bfloat16), low


def join(high: Tensor, low: Tensor) -> Tensor:
    """The FP32 tensor of :func:`split`'s two halves."""
    weight = _like(high, torch.float32)
    upper, lower = _halves_of(weight)
    lower.copy_(_flat(low))
    torch.add(_flat(high).view(torch.int16), _flat(low) >> 15, out=upper)
    return weight


def compensated(weight: Tensor) -> tuple[Tensor, Tensor]:
    """An FP32 tensor as the nearest bf16 numbers and what those lack, in bf16."""
    high = weight.to(torch.bfloat16)
    low = (weight - high).to(torch.bfloat16)
    if _may_hold_nan(low):  # inf - inf
        low = low.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    # A distance that was rounded to a half would bring the sum's nearest number to the other side.
    other_side = (high + low.float()).to(torch.bfloat16) != high
    if weight.device.type != "cpu" or bool(other_side.any()):
        low = torch.where(other_side, torch.nextafter(low, torch.zeros_like(low)), low)
    return high, low


def stochastic(weight: Tensor, generator: torch.Generator | None) -> Tensor:
    """An FP32 tensor in bf16, each number rounded away from zero with the probability of its cut-off part."""
    weight = _with_one_nan(weight)
    upper, lower = _halves_of(weight)
    high = _like(weight, torch.int16)
    # Unsigned numbers compare as signed ones do once their first bit is turned round.
    away = (lower ^ -(2**15)) > _random_16(weight.numel(), weight.device, generator)
    torch.add(upper, away, out=_flat(high))
    return high.view(torch.bfloat16)


def _halves_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Views of an FP32 tensor's upper and lower 16 bits, flat int16."""
    halves = _flat(weight).view(torch.int16)
    first, second = halves[0::2], halves[1::2]
    return (second, first) if sys.byteorder == "little" else (first, second)


def _flat(tensor: Tensor) -> Tensor:
    """A dense tensor's memory in the order in which it lies."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _like(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(tensor, dtype=dtype)


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, without gaps in its memory."""
    same = torch.empty_like(tensor).stride() == tensor.stride()
    return tensor if same else tensor.contiguous()


def _with_one_nan(weight: Tensor) -> Tensor:
    """Each NaN as the usual one: beside the largest of them lies zero."""
    return torch.where(weight.isnan(), torch.nan, weight) if _may_hold_nan(weight) else weight


def _may_hold_nan(values: Tensor) -> bool:
    """Whether there may be a NaN; not asked of an accelerator, which would have to be waited for."""
    return values.device.type != "cpu" or not math.isfinite(values.sum(dtype=torch.float32).item())


def _random_16(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Evenly spread int16 numbers, flat."""
    # 64 random bits at a time: as cheap as one number, and enough for four
    words = torch.empty(-(-n // 4), dtype=torch.int64, device=device)
    return words.random_(-(2**63), None, generator=generator).view(torch.int16)[:n]


# -- 8-bit state


def in_8_bits(values: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """FP32 values as FP8 codes of the same shape and one FP32 factor for each 256 of them.

    Rounded stochastically; the largest number of a block is kept as it is.
    """
    blocks = values.reshape(-1, _BLOCK)
    factors = blocks.abs().amax(1).div_(_FP8_LARGEST)
    factors = torch.where(factors < torch.finfo(torch.float32).tiny, 1.0, factors)
    codes = torch.empty_like(blocks, dtype=_FP8)
    for part in range(0, len(blocks), _AT_A_TIME):
        rows = slice(part, part + _AT_A_TIME)
        codes[rows] = _rounded_to_fp8(blocks[rows] / factors[rows, None], generator)
    return codes.view(values.shape), factors


def _rounded_to_fp8(scaled: Tensor, generator: torch.Generator | None) -> Tensor:
    scaled.clamp_(-_FP8_LARGEST, _FP8_LARGEST)
    random = _random_16(scaled.numel(), scaled.device, generator).view(scaled.shape).to(torch.int32)
    random.add_(2**15)  # from 0 to 65535
    # Below 2**-6, where FP8 numbers are 2**-9 apart, the random part is added as such; above, where 20 bits
    # are cut off, to the bits.
    small = random.mul(2.0**-16).add_(scaled, alpha=2.0**9).floor_().mul_(2.0**-9)
    cut = random.bitwise_left_shift_(4).add_(scaled.view(torch.int32)).bitwise_and_(~0xFFFFF)
    rounded = torch.where(scaled.abs() < 2.0**-6, small, cut.view(torch.float32))
    return rounded.clamp_(-_FP8_LARGEST, _FP8_LARGEST).to(_FP8)


def from_8_bits(codes: Tensor, factors: Tensor) -> Tensor:
    """The FP32 values of :func:`in_8_bits`."""
    return codes.reshape(-1, _BLOCK).float().mul_(factors[:, None]).view(codes.shape)


# -- at work


class Narrow:
    """Weights of bf16 layers, and state, kept narrow between steps; :meth:`remove` undoes it.

    Args:
        root: the user's module, in FP32.
        formats: format of every module by dotted name.
        optimizers: those whose parameters are meant.
        weights: ``fp32``, ``split``, ``kahan`` or ``stochastic``.
        state: ``fp32`` or ``8bit``.
    """

    def __init__(
        self,
        root: nn.Module,
        formats: Mapping[str, str],
        optimizers: Sequence[Any],
        weights: str,
        state: str,
    ) -> None:
        self.weights, self.state = weights, state
        self._optimizers = [inner_optimizer(o) for o in optimizers]
        self._weights: dict[int, _Weight] = {}
        self._handles: list[Any] = []
        device = next(p.device for o in self._optimizers for g in o.param_groups for p in g["params"])
        self.generator = torch.Generator(device)
        self.generator.manual_seed(torch.initial_seed())
        self._wide_gradients = False
        if weights != "fp32":
            names = {id(p): name for name, p in root.named_parameters()}
            for p in self._parameters():
                if id(p) in names and p.dtype is torch.float32 and _reads_bf16_alone(root, formats, p):
                    self._weights[id(p)] = _Weight(names[id(p)], p, weights, self.generator)
            for module in root.modules():
                if any(id(p) in self._weights for p in module._parameters.values()):
                    hooked = cast(Any, module)
                    self._handles.append(hooked.register_state_dict_post_hook(_Save(self)))
                    self._handles.append(hooked.register_load_state_dict_pre_hook(_Load(self)))

    def _parameters(self) -> Iterator[Tensor]:
        seen: set[int] = set()
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in seen:
                        seen.add(id(p))
                        yield p

    def __len__(self) -> int:
        """Number of parameters whose weights are narrow."""
        return len(self._weights)

    def find(self, parameter: Any) -> "_Weight | None":
        """What is kept beside a parameter; None for one that is not narrow."""
        found = self._weights.get(id(parameter))
        return found if found is not None and found.parameter is parameter else None

    # -- a step

    def gradients_in_fp32(self, on: bool) -> None:
        """Whether backward leaves FP32 gradients: where those of several micro-batches are added up."""
        if on is self._wide_gradients:
            return
        self._wide_gradients = on
        for w in self._weights.values():
            w.gradient_dtype(torch.float32 if on else torch.bfloat16)

    def step(self, optimizer: Any, factor: Tensor | None = None) -> None:
        """The optimizer's step in FP32.

        Args:
            optimizer: one of the optimizers, its parameters' gradients unscaled.
            factor: what gradients are multiplied by once they are FP32 (clipping); 0-d.
        """
        inner = inner_optimizer(optimizer)
        mine = [p for group in inner.param_groups for p in group["params"]]
        self.notice_edits(mine)
        grads = [(p, p.grad) for p in mine if p.grad is not None]
        for p, _ in grads:
            p.grad = None
        for part in _parts(optimizer, grads):
            self._step_part(optimizer, inner, part, factor)

    def _step_part(
        self, optimizer: Any, inner: Any, part: list[tuple[Any, Tensor]], factor: Tensor | None
    ) -> None:
        narrow = [w for p, _ in part if (w := self.find(p)) is not None]
        try:
            for w in narrow:
                w.widen()
            for p, grad in part:
                own = grad if grad.dtype is p.dtype else grad.to(p.dtype)
                p.grad = own if factor is None else own.mul_(factor.to(own.device))
                self._state_to_fp32(inner, p)
            optimizer.step()
        finally:
            for p, _ in part:
                p.grad = None
                self._state_to_8_bits(inner, p)
            for w in narrow:
                w.narrow(self.generator)

    @contextmanager
    def wide(self) -> Iterator[None]:
        """Within it the parameters hold the FP32 weights, to be read."""
        self.notice_edits([w.parameter for w in self._weights.values()])
        kept = [(w, w.parameter.data) for w in self._weights.values()]
        try:
            for w, _ in kept:
                w.parameter.data = w.whole()
            yield
        finally:
            for w, high in kept:
                w.parameter.data = high

    def notice_edits(self, parameters: Iterable[Any]) -> None:
        """Drop what was kept beside weights that something else has written since the last step."""
        stale = [w for p in parameters if (w := self.find(p)) is not None and w.is_stale()]
        for w in stale:
            w.forget()
        if stale:
            warnings.warn(
                f"{len(stale)} weights were written outside of the session's step ({stale[0].name!r} is the "
                "first): they go on from the bf16 numbers that they hold now. load_state_dict() of the model "
                "keeps all bits",
                stacklevel=4,
            )

    # -- state

    def _state_to_fp32(self, inner: Any, p: Any) -> None:
        if self.state == "fp32" or p not in inner.state:
            return
        state = inner.state[p]
        for key in [k for k, v in state.items() if isinstance(v, Tensor) and v.dtype is _FP8]:
            values = from_8_bits(state[key], state.pop(f"{key}_factors"))
            values = values.square_() if key in _SECOND_MOMENTS else values
            state[key] = torch.empty_like(p, dtype=torch.float32).copy_(values)

    def _state_to_8_bits(self, inner: Any, p: Any) -> None:
        if self.state == "fp32" or p.numel() < _LEAST_STATE or p.numel() % _BLOCK or p not in inner.state:
            return
        state = inner.state[p]
        for key, value in list(state.items()):
            if isinstance(value, Tensor) and value.shape == p.shape and value.dtype is torch.float32:
                values = value.sqrt() if key in _SECOND_MOMENTS else value
                state[key], state[f"{key}_factors"] = in_8_bits(values.contiguous(), self.generator)

    # -- what it costs, and its state

    def bytes_per_parameter(self) -> dict[str, float]:
        """Bytes for each number of the parameters, in the mean: weight, what is kept beside it, gradient,
        optimizer state (0 before the first step).
        """
        parameters = list(self._parameters())
        numbers = sum(p.numel() for p in parameters)
        state = sum(
            value.numel() * value.element_size()
            for o in self._optimizers
            for per_parameter in o.state.values()
            for value in per_parameter.values()
            if isinstance(value, Tensor) and value.dim()
        )
        weights = sum(p.numel() * p.element_size() for p in parameters)
        beside = sum(0 if w.low is None else w.low.numel() * 2 for w in self._weights.values())
        return {
            "weight": weights / numbers,
            "beside": beside / numbers,
            "gradient": weights / numbers,
            "state": state / numbers,
        }

    def describe(self) -> str:
        """One line for people."""
        sizes = self.bytes_per_parameter()
        parts = ", ".join(f"{what} {size:.2f}" for what, size in sizes.items())
        return (
            f"narrow: {len(self)} weights kept as {self.weights}, state {self.state}; bytes a parameter: "
            f"{parts}; in all {sum(sizes.values()):.2f} (FP32 with Adam: 16)"
        )

    def state_dict(self) -> dict[str, Any]:
        """The generator of stochastic rounding; the weights are whole in the model's own state."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`."""
        self.generator.set_state(state["generator"].cpu())

    def remove(self) -> None:
        """Back to FP32 weights and state, without losing what was kept beside them."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.notice_edits([w.parameter for w in self._weights.values()])
        for w in self._weights.values():
            grad, w.parameter.grad = w.parameter.grad, None
            w.widen()
            w.parameter.grad = None if grad is None else grad.float()
        self._weights.clear()
        for optimizer in self._optimizers:
            for p in [p for group in optimizer.param_groups for p in group["params"]]:
                self._state_to_fp32(optimizer, p)


class _Weight:
    """One parameter whose numbers lie in bf16 between steps."""

    def __init__(self, name: str, parameter: Any, kind: str, generator: torch.Generator) -> None:
        self.name, self.parameter, self._kind = name, parameter, kind
        self.low: Tensor | None = None
        """What the bf16 numbers lack; None under stochastic rounding."""
        self._sum = 0
        self._own_gradient_dtype = False
        grad, parameter.grad = parameter.grad, None
        # An FP32 weight that comes in is rounded to nearest: it is no update.
        self._keep(*self._halves(_dense(parameter.data), None))
        parameter.grad = None if grad is None else grad.to(torch.bfloat16)

    def _halves(self, wide: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor | None]:
        if self._kind == "split":
            return split(wide)
        if self._kind == "kahan":
            return compensated(wide)
        return (wide.to(torch.bfloat16) if generator is None else stochastic(wide, generator)), None

    def _keep(self, high: Tensor, low: Tensor | None) -> None:
        self.parameter.data, self.low = high, low
        self._sum = _sum_of(high) if low is not None else 0

    def whole(self) -> Tensor:
        """The FP32 weight, in memory of its own."""
        high = self.parameter.data
        if self.low is None:
            return cast(Tensor, high.float())
        return join(high, self.low) if self._kind == "split" else high.float().add_(self.low)

    def gradient_dtype(self, dtype: torch.dtype) -> None:
        """What backward leaves from now on; torch's default is the weight's own dtype."""
        if self.parameter.grad is None:
            self.parameter.grad_dtype = dtype
            self._own_gradient_dtype = True

    def widen(self) -> None:
        """Let the parameter, whose gradient was taken away, hold the FP32 weight."""
        if self._own_gradient_dtype:
            self.parameter.grad_dtype = torch.float32
        self.parameter.data = self.whole()

    def narrow(self, generator: torch.Generator | None) -> None:
        """Let it hold bf16 again, after an update."""
        if self.parameter.dtype is torch.float32:
            self._keep(*self._halves(self.parameter.data, generator))
            if self._own_gradient_dtype:
                self.parameter.grad_dtype = torch.bfloat16

    def load(self, wide: Tensor) -> Tensor:
        """Keep what bf16 can't hold of a weight that is being loaded; returns the rest."""
        at = torch.empty_like(self.parameter, dtype=torch.float32).copy_(wide)
        high, self.low = self._halves(at, None)
        self._sum = _sum_of(high) if self.low is not None else 0
        return high

    def is_stale(self) -> bool:
        """Whether the bf16 numbers were written by something else."""
        return self.low is not None and _sum_of(self.parameter.data) != self._sum

    def forget(self) -> None:
        """Take the bf16 numbers as they are."""
        high = self.parameter.data
        self._keep(high, None if self.low is None else torch.zeros_like(self.low))


def _sum_of(high: Tensor) -> int:
    """A checksum of 16-bit numbers: one pass, eight bytes at a time where that divides them."""
    bits = _flat(_dense(high)).view(torch.int16)
    return int((bits if bits.numel() % 4 else bits.view(torch.int64)).sum())


def _reads_bf16_alone(root: nn.Module, formats: Mapping[str, str], parameter: Any) -> bool:
    """Whether each layer that owns this parameter computes in bf16."""
    owners = [
        (name, module)
        for name, module in root.named_modules()
        if any(p is parameter for p in module._parameters.values())
    ]
    return bool(owners) and all(
        isinstance(module, NARROWABLE) and formats[name] == "bf16" for name, module in owners
    )


def _parts(optimizer: Any, grads: list[tuple[Any, Tensor]]) -> Iterator[list[tuple[Any, Tensor]]]:
    """Parameters in parts that an optimizer may step one after the other; one part where it may not."""
    alone = type(optimizer) in _ELEMENTWISE
    if not alone or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        yield grads
        return
    part: list[tuple[Any, Tensor]] = []
    numbers = 0
    for p, grad in grads:
        if part and numbers + p.numel() > CHUNK:
            yield part
            part, numbers = [], 0
        part.append((p, grad))
        numbers += p.numel()
    yield part


class _Hook:
    """On a module's state dict, also once the session was dropped. In a copy of the module it finds nothing
    of its own: that has bf16 weights alone.
    """

    def __init__(self, narrow: Narrow) -> None:
        self._narrow = narrow

    def __deepcopy__(self, memo: Any) -> "_Hook":
        return self

    def __reduce__(self) -> Any:
        return _nothing, ()

    def _own(self, module: nn.Module) -> Iterator[tuple[str, _Weight]]:
        for key, p in module._parameters.items():
            if (w := self._narrow.find(p)) is not None:
                yield key, w


class _Save(_Hook):
    """Gives FP32 weights to a state dict."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, w in self._own(module):
            if w.is_stale():
                w.forget()
            state[prefix + key] = w.whole()


class _Load(_Hook):
    """Takes FP32 weights from a state dict, which is torch's own copy."""

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for key, w in self._own(module):
            value = state.get(prefix + key)
            if isinstance(value, Tensor) and value.shape == w.parameter.shape:
                state[prefix + key] = w.load(value.detach())


def _nothing() -> Callable[..., None]:
    """Stands for a hook in a pickled model."""
    return _leave


def _leave(*args: Any) -> None:
    pass


def check_allowed(weights: str, models: Sequence[nn.Module]) -> None:
    """Refuse narrow weights where they would be lost.

    Raises:
        SessionError: a model that holds its weights in a wrapper of its own: DDP's buckets, FSDP2's shards.
    """
    if weights == "fp32":
        return
    for model in models:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            raise SessionError(
                f"weights={weights!r} in a {type(model).__name__}, whose buckets are made for FP32 "
                "gradients; keep FP32 weights there"
            )
        for name, p in model.named_parameters():
            if type(p.data) is not Tensor:
                raise SessionError(
                    f"weights={weights!r}, but parameter {name!r} is a {type(p.data).__name__}; only plain "
                    "tensors can be kept narrow"
                )
