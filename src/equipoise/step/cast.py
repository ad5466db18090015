"""A Policy applied to modules; removable.

Enters: a model and the format of each of its modules. Leaves: the same model, whose ``forward`` runs in that
format, and the context that a step's forward runs under. Where: inside a step, before the first layer.

The root's half format is torch's autocast, entered by ``Session.autocast()``. A module whose format differs
from its parent's has its ``forward`` replaced *on the instance* by a bound method that enters its own format:

- FP32 inside half: autocast off, half inputs widened. Weights are FP32 already.
- half inside FP32: autocast on, floating outputs widened, since the parent's operators expect FP32.

Instance attributes leave ``state_dict``, ``isinstance``, hooks and ``deepcopy`` alone (``copy`` rebinds a
method to the copied module). ``pickle`` stores a bound method by its name: the replacements are called
``forward``, so a model that was saved whole comes back with its own. Source: torch.amp's operator lists;
Hugging Face Accelerate replaces ``forward`` likewise.
"""

import copy
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..errors import PolicyError, SessionError
from ..formats import FORMATS
from ..policy import Policy
from .compiled import Borders
from .operators import REGION, Backward, Kernels, autocast

NARROWABLE = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
)
"""Layers whose products run in the policy's format. Norms, embeddings and activations follow their inputs."""

_OWN_FORWARD = "_equipoise_forward"
_NO_CONTEXT = nullcontext()


def dtype_of(format_name: str) -> torch.dtype:
    """The torch dtype of a format."""
    dtype: torch.dtype = getattr(torch, FORMATS[format_name].torch_name)
    return dtype


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel or ``torch.compile``."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def one_root(models: Sequence[nn.Module]) -> nn.Module:
    """One module that holds all models, or the one model itself.

    Raises:
        SessionError: no module, or something that is none.
    """
    for m in models:
        if not isinstance(m, nn.Module):
            raise SessionError(f"model is {type(m).__name__}; a torch.nn.Module or a list of them is needed")
    if not models:
        raise SessionError("no model was given; a torch.nn.Module or a list of them is needed")
    inner = [unwrapped(m) for m in models]
    return inner[0] if len(inner) == 1 else nn.ModuleList(inner)


def layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own parameters themselves, by dotted name: what a plan lists."""
    for name, module in model.named_modules():
        if module._parameters and any(p is not None for p in module._parameters.values()):
            yield name, module


def module_formats(model: nn.Module, policy: Policy) -> dict[str, str]:
    """The format that a policy gives to every module, containers and the root ``""`` included.

    Raises:
        PolicyError: a pattern of the policy matches nothing.
    """
    found = policy.resolve([name for name, _ in model.named_modules()])
    return {name: match.format for name, match in found.items()}


def layer_formats(model: nn.Module, formats: Mapping[str, str]) -> dict[str, str]:
    """What each layer computes in under ``formats``: layers that keep FP32 statistics count as FP32."""
    return {
        name: formats[name] if isinstance(module, NARROWABLE) else "fp32" for name, module in layers(model)
    }


def castable(parameter: torch.Tensor) -> bool:
    """Whether a weight can be brought to a half format: not an integer, complex, FP8 or double one."""
    return parameter.is_floating_point() and parameter.dtype.itemsize in (2, 4)


def is_quantised(module: nn.Module) -> bool:
    """Whether torch quantised this layer: its weight is packed away and no parameter, it takes FP32."""
    return type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized"))


def attention_of(model: nn.Module, name: str) -> str:
    """The attention that a module is a part of, whose parts have one format; ``name`` where it is in none."""
    parts = name.split(".") if name else []
    for depth in range(len(parts) + 1):
        outer = ".".join(parts[:depth])
        if isinstance(model.get_submodule(outer), nn.MultiheadAttention):
            return outer
    return name


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with each tensor changed: in lists, tuples, named tuples, dicts and dataclasses, which are
    copied.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(v, change) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        values = {k: map_tensors(v, change) for k, v in value.items()}
        if type(value) is dict or all(values[k] is v for k, v in value.items()):
            return values if type(value) is dict else value
        copied = copy.copy(value)  # a subclass, such as a Hugging Face output, keeps its type
        for k, v in values.items():
            copied[k] = v
        return copied
    if is_dataclass(value) and not isinstance(value, type):
        values = {f.name: map_tensors(getattr(value, f.name), change) for f in fields(value)}
        if all(getattr(value, k) is v for k, v in values.items()):
            return value
        twin: Any = copy.copy(value)
        for k, v in values.items():
            object.__setattr__(twin, k, v)  # a frozen one too: it is our copy
        return twin
    return value


def _widened(value: Any) -> Any:
    return map_tensors(value, lambda t: t.float() if is_half(t) else t)


def is_half(tensor: torch.Tensor) -> bool:
    """Whether the tensor is bfloat16 or float16."""
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _forward_wide(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    device = self.__dict__["_equipoise_device"]
    args, kwargs = _widened(args), _widened(kwargs)
    if not torch.is_autocast_enabled(device):
        return self.__dict__[_OWN_FORWARD](*args, **kwargs)
    if torch.compiler.is_compiling() and not torch.is_autocast_enabled(REGION):
        return _wide_uncompiled(self, args, kwargs)
    with torch.autocast(device, enabled=False):
        return self.__dict__[_OWN_FORWARD](*args, **kwargs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _wide_uncompiled(self: nn.Module, args: Any, kwargs: Any) -> Any:
    """An FP32 layer in a function that the user compiled: traced there, its backward would run in half."""
    warnings.warn(
        "a layer kept in FP32 is called inside a function under torch.compile that was entered under "
        "session.autocast(): it runs uncompiled. Compile the model instead, or enter session.autocast() "
        "inside the function",
        stacklevel=2,
    )
    with torch.autocast(self.__dict__["_equipoise_device"], enabled=False):
        return self.__dict__[_OWN_FORWARD](*args, **kwargs)


def _own_autocast(module: nn.Module) -> AbstractContextManager[Any]:
    own = module.__dict__
    return autocast(
        own["_equipoise_device"], own["_equipoise_dtype"], own["_equipoise_table"], own["_equipoise_emulate"]
    )


def _forward_narrow(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _own_autocast(self):
        out = self.__dict__[_OWN_FORWARD](*args, **kwargs)
    return _widened(out)


def _forward_other_half(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # One half inside the other: the inner autocast casts inputs and weights to its own dtype.
    with _own_autocast(self):
        return self.__dict__[_OWN_FORWARD](*args, **kwargs)


def _forward_region(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    # The first module of a compiled region: its border left autocast behind, here it is entered again.
    own = self.__dict__
    if torch.is_autocast_enabled(own["_equipoise_device"]) or not torch.is_autocast_enabled(REGION):
        return own[_OWN_FORWARD](*args, **kwargs)
    with _own_autocast(self):
        return own[_OWN_FORWARD](*args, **kwargs)


_AT_WORK: "weakref.WeakSet[Casts]" = weakref.WeakSet()
"""Policies that hold some module's forward now."""


def refuse_taken(model: nn.Module) -> None:
    """Refuse a model that another policy is at work on.

    Raises:
        SessionError: a module's forward is another living session's.
    """
    taken = {id(module) for casts in _AT_WORK for module in casts.wrapped}
    for name, module in model.named_modules():
        if id(module) in taken:
            raise SessionError(
                f"module {name!r} runs under another Session's policy; call restore() of that one first"
            )


def _unwrap(module: nn.Module) -> None:
    own = module.__dict__
    forward = own.pop(_OWN_FORWARD, None)
    if own.pop("_equipoise_had_forward", False):
        own["forward"] = forward
    else:
        own.pop("forward", None)
    for key in ("_equipoise_device", "_equipoise_dtype", "_equipoise_table", "_equipoise_emulate"):
        own.pop(key, None)


class Casts:
    """A policy at work on one model; :meth:`remove` undoes it.

    Args:
        model: the user's module, not wrapped.
        formats: format of every module by dotted name, the root ``""`` included.
        device: torch device type.
        table: whether Equipoise's operator table is in force (else torch's own autocast lists).
        emulate: half formats by casts there and back.
        models: what the user calls, where that isn't ``model`` itself: wrapped or compiled.

    Raises:
        PolicyError: one weight would be read in two half formats (autocast caches its copy by weight alone),
            or a part of an attention would have another format than the attention.
        SessionError: another session's policy is at work on a module.
    """

    def __init__(
        self,
        model: nn.Module,
        formats: Mapping[str, str],
        device: str,
        *,
        table: bool = True,
        emulate: bool = False,
        models: Sequence[nn.Module] = (),
    ) -> None:
        _refuse_two_halves(model, formats)
        _refuse_split_attention(model, formats)
        refuse_taken(model)
        self.root_format = formats[""]
        self._device = device
        self._half = FORMATS[self.root_format].is_half
        self._dtype = dtype_of(self.root_format)
        self._table = table
        self._uses_half = any(FORMATS[f].is_half for f in formats.values())
        self._emulate = emulate
        wanted = {"table": table and self._uses_half, "fp16": table and "fp16" in formats.values()}
        wanted["emulate"] = emulate and self._uses_half
        self._kernels = [Kernels(device, which) for which, is_wanted in wanted.items() if is_wanted]
        self.wrapped: list[nn.Module] = []
        """Modules whose forward is replaced."""
        self._unseen: set[str] = set()
        self._seeing: list[Any] = []
        parents: dict[int, set[str]] = {}  # a module may stand in several
        for name, module in model.named_modules():
            if _OWN_FORWARD in module.__dict__:  # a copy, or its session is gone: nobody else will undo it
                _unwrap(module)
            for child in module.children():
                parents.setdefault(id(child), set()).add(formats[name])
        self._borders = Borders(models or [model], device)
        entering = {id(m) for m in self._borders.inside}
        if emulate and entering:
            self._borders.remove()
            raise SessionError("emulation runs in eager code only; hand over the model without torch.compile")
        for name, module in model.named_modules():
            if name and parents[id(module)] != {formats[name]}:
                self._wrap(module, formats[name], parents[id(module)])
                if not entering:  # a hook would be compiled in
                    self._unseen.add(name)
                    hook = partial(_see_forward, self._unseen, name)
                    self._seeing.append(module.register_forward_pre_hook(hook))
            elif FORMATS[formats[name]].is_half and (id(module) in entering or (not name and entering)):
                self._wrap(module, formats[name], None)
        _AT_WORK.add(self)
        # A weight changed by hand inside a context must be seen: the copy that autocast keeps is dropped
        # whenever the model starts a forward. Compiled regions do so at their border.
        fresh = self._half and id(model) not in entering
        self._fresh = model.register_forward_pre_hook(_drop_cached_casts) if fresh else None

    def _wrap(self, module: nn.Module, format_name: str, parent_formats: set[str] | None) -> None:
        """Replace the forward; ``parent_formats`` None: it has its parent's, and starts a compiled region."""
        own = module.__dict__
        # object.__setattr__: nn.Module's own would look for parameters and modules in each value.
        object.__setattr__(module, "_equipoise_had_forward", "forward" in own)
        object.__setattr__(module, _OWN_FORWARD, module.forward)
        object.__setattr__(module, "_equipoise_device", self._device)
        object.__setattr__(module, "_equipoise_dtype", dtype_of(format_name))
        object.__setattr__(module, "_equipoise_table", self._table)
        object.__setattr__(module, "_equipoise_emulate", self._emulate)
        if parent_formats is None:
            function: Callable[..., Any] = _forward_region
        elif format_name == "fp32":
            function = _forward_wide
        elif "fp32" in parent_formats:
            function = _forward_narrow
        else:
            function = _forward_other_half
        object.__setattr__(module, "forward", types.MethodType(function, module))
        self.wrapped.append(module)

    def never_ran(self) -> list[str]:
        """Modules with a format of their own whose forward hasn't run by now; ends the watch for them."""
        for handle in self._seeing:
            handle.remove()
        self._seeing.clear()
        return sorted(self._unseen)

    def context(self) -> AbstractContextManager[Any]:
        """What a forward runs under: autocast in the root's half format, or nothing."""
        if not self._half:
            return _NO_CONTEXT
        return autocast(self._device, self._dtype, self._table, self._emulate)

    def backward_context(self) -> AbstractContextManager[Any]:
        """What a backward runs under."""
        return Backward(self._device, self._table, self._emulate) if self._uses_half else _NO_CONTEXT

    @property
    def needs_loss_scale(self) -> bool:
        """Whether any module computes in FP16."""
        fp16 = torch.float16
        return self._dtype is fp16 or any(m.__dict__.get("_equipoise_dtype") is fp16 for m in self.wrapped)

    def remove(self) -> None:
        """Give every module its own ``forward`` back."""
        for module in self.wrapped:
            _unwrap(module)
        self.wrapped.clear()
        self.never_ran()
        self._borders.remove()
        for kernels in self._kernels:
            kernels.remove()
        _AT_WORK.discard(self)
        if self._fresh is not None:
            self._fresh.remove()
            self._fresh = None


for _forward in (_forward_wide, _forward_narrow, _forward_other_half, _forward_region):
    _forward.__name__ = "forward"


def _see_forward(unseen: set[str], name: str, module: nn.Module, args: Any) -> None:
    unseen.discard(name)


def _drop_cached_casts(module: nn.Module, args: Any) -> None:
    torch.clear_autocast_cache()


def _refuse_two_halves(model: nn.Module, formats: Mapping[str, str]) -> None:
    seen: dict[int, tuple[str, str]] = {}
    for name, module in layers(model):
        fmt = formats[name]
        if not FORMATS[fmt].is_half:
            continue
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            other = seen.setdefault(id(parameter), (fmt, f"{name}.{key}"))
            if other[0] != fmt:
                raise PolicyError(
                    f"one weight is shared by {other[1]} ({other[0]}) and {name}.{key} ({fmt}); "
                    "a shared weight can have one half format only: give both layers the same"
                )


def _refuse_split_attention(model: nn.Module, formats: Mapping[str, str]) -> None:
    # The attention reads its projection's weight by itself; the projection's own forward never runs.
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            for inner, _ in module.named_modules(prefix=name):
                if formats.get(inner, formats[name]) != formats[name]:
                    raise PolicyError(
                        f"{inner!r} can't have a format of its own ({formats[inner]}): the attention "
                        f"{name or '(root)'!r} ({formats[name]}) computes with its weight. Name the attention"
                    )
