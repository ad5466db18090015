"""Which operator of which module first made a number that isn't finite: a step that is watched.

Enters: a model, and a step run inside :class:`Probe`. Leaves: an :class:`~equipoise.records.Origin`, or
None. Where: around forward and backward, on the first step in FP16 and on steps after skipped ones; each
operator's result is read, so a watched step is slow, and the others know nothing of it.

A dispatch mode sees every operator below autograd and autocast, with the numbers in the format that they
really have. Hooks say which module is at work: in forward a stack of names; in backward the gradient of a
module's output says that its backward begins. Compiled regions run eagerly meanwhile.

Source: ``torch.utils._python_dispatch`` of torch 2.13.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..records import Origin

_HALVES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

_NO_VALUES = ("empty", "new_empty", "resize_", "set_", "rand", "_local_scalar_dense")
"""Operators whose result is memory without meaning yet, or no tensor."""


class _Eagerly:
    """No compiled code while somebody is inside: it acts on the process, so that the first comes and the last
    goes, whichever threads they are in.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._inside += 1

    def __exit__(self, *error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._stance.__exit__(None, None, None)


_EAGERLY = _Eagerly()


class _Entered(threading.local):
    """What this thread has entered of a probe and not left: a step inside autocast enters it twice."""

    def __init__(self) -> None:
        self.stack: list[ExitStack] = []


class Probe:
    """Watches steps of one model while it is entered; :meth:`remove` takes its hooks away.

    Args:
        model: its modules are named as in ``named_modules()``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.watching = True
        """Whether results are looked at: a context may be left later than the step ends."""
        self._stack: list[str] = []
        self._gradient_of: str | None = None
        self._found: list[Origin] = []
        self._masks: list[Origin] = []  # such as log(0), by which some write a mask
        self._half_masks: list[Origin] = []  # a mask's lowest number, and -inf in half
        self._given: Origin | None = None
        self._entered = _Entered()
        self._handles: list[Any] = []
        self._made: dict[int, torch.Tensor] = {}  # kept alive for the step, so that no id comes twice
        for name, module in model.named_modules():
            self._handles.append(
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
            )
            self._handles.append(module.register_forward_hook(partial(self._leave, name), always_call=True))

    def __enter__(self) -> None:
        inside = ExitStack()
        inside.enter_context(_EAGERLY)
        if not self._entered.stack:
            inside.enter_context(_Watching(self))
        self._entered.stack.append(inside)

    def __exit__(self, *error: Any) -> None:
        self._entered.stack.pop().__exit__(*error)

    @property
    def origin(self) -> Origin | None:
        """The likeliest beginning: a value that came in not finite, else the first operator that left a half
        format's range, else the first that made an inf or a NaN.
        """
        halves = (o for o in self._found if o.half)
        return self._given or next(halves, None) or next(iter(self._found + self._masks), None)

    def remove(self) -> None:
        """Take the hooks away; :attr:`origin` stays."""
        self.watching = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._made.clear()

    # -- which module is at work

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not name:
            self._stack.clear()  # a forward that raised may have left names
            self._look_at_what_is_given(module, args, kwargs)
        parent = self._stack[-1] if self._stack else None
        self._stack.append(name)
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad and not tensor.is_leaf:
                self._tag(tensor, parent)

    def _leave(self, name: str, module: nn.Module, args: Any, out: Any) -> None:
        if self._stack and self._stack[-1] == name:
            self._stack.pop()
        for tensor in _tensors((out,)):
            if tensor.requires_grad and not tensor.is_leaf:
                self._tag(tensor, name)

    def _tag(self, tensor: torch.Tensor, name: str | None) -> None:
        """When this tensor's gradient is complete, ``name``'s backward begins."""
        if id(tensor) in self._made:
            return  # the innermost module that made it says it
        self._made[id(tensor)] = tensor

        def begin(grad: torch.Tensor) -> None:
            self._gradient_of = name

        self._handles.append(tensor.register_hook(begin))  # type: ignore[no-untyped-call]

    def _look_at_what_is_given(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._given is not None:
            return
        for name, p in module.named_parameters():
            if not _finite(p.detach()):
                self._given = _given("", f"weight {name}")
                return
        if any(not _finite(t.detach()) for t in _tensors((args, kwargs))):
            self._given = _given("", "input")

    # -- what each operator makes

    def look(self, func: Any, inputs: list[float], out: Any) -> None:
        """Take an operator's result.

        Args:
            func: the operator.
            inputs: largest magnitude of each of its inputs, before it ran where it writes in place.
            out: what it gave.
        """
        bad = [t for t in _tensors((out,)) if not _finite(t)]
        if not bad:
            return
        if not all(math.isfinite(x) for x in inputs):
            # A softmax of the user's own, in FP32 by hand: the mask that overflowed before has become NaN.
            if self._half_masks and not self._found and any(bool(t.isnan().any()) for t in bad):
                self._found.append(self._half_masks[0])
            return
        backward = torch._C._current_graph_task_id() != -1
        if self._stack:
            module: str | None = self._stack[-1]  # in backward too: a forward that is recomputed
            backward = False
        else:
            module = self._gradient_of if backward else None
        name = _HALVES.get(bad[0].dtype, "fp32")
        mask = not backward and all(bool((t[~torch.isfinite(t)] == -math.inf).all()) for t in bad)
        origin = Origin(
            module=module,
            operator=func._schema.name.partition("::")[2],
            backward=backward,
            half=name != "fp32",
            largest=max(inputs, default=0.0),
            format=name,
        )
        # A mask's lowest number becomes -inf in half, and is mostly none the worse for it.
        masks = self._masks if name == "fp32" else self._half_masks
        (masks if mask else self._found).append(origin)


class _Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows a probe each operator that makes a number which isn't finite."""

    def __init__(self, probe: Probe) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._probe = probe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._probe.watching or func.is_view:
            return func(*args, **kwargs)
        if func._schema.name.partition("::")[2].startswith(_NO_VALUES):
            return func(*args, **kwargs)
        before = _magnitudes((args, kwargs)) if func._schema.is_mutable else None
        out = func(*args, **kwargs)
        if not all(_finite(t) for t in _tensors((out,))):
            self._probe.look(func, _magnitudes((args, kwargs)) if before is None else before, out)
        return out


def _given(module: str, what: str) -> Origin:
    return Origin(
        module=module, operator="", backward=False, half=False, largest=math.inf, format="", given=what
    )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Floating tensors that have memory, in nested containers."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _tensors(v)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _finite(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "meta" or bool(torch.isfinite(_numbers(tensor)).all())


def _magnitudes(value: Any) -> list[float]:
    """Largest magnitude of each tensor and number; inf for what isn't finite."""
    found = []
    for tensor in _tensors(value):
        numbers = _numbers(tensor)
        if numbers.numel():
            largest = float(numbers.abs().max())
            found.append(largest if math.isfinite(largest) else math.inf)
    return found + [abs(x) if math.isfinite(x) else math.inf for x in _scalars(value)]


def _scalars(value: Any) -> Iterator[float]:
    if isinstance(value, float):
        yield value
    elif isinstance(value, dict):
        yield from _scalars(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for v in value:
            yield from _scalars(v)
