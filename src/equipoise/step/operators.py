"""The operator table at work: kernels that stand where autocast looks, on every device.

Enters: operators called under ``Session.autocast()``, as functions, methods, Python operators or inside
modules, in forward and in a recomputed forward. Leaves: the same operators computed as
:mod:`equipoise.sensitive` says. Where: inside a step, between the user's call and autograd.

Kernels are Python functions registered at torch's autocast dispatch keys, for the rows that the device's own
autocast treats otherwise. They act on the whole process, so each call looks at a flag that belongs to its
thread: without it, it does what torch alone does. They come with the first :class:`Kernels` and go with the
last.

The flag is the autocast state of a device type that no machine has any more (``ipu``). It thereby follows
wherever autocast's own state does: into the threads of a backward pass, into ``torch.compile``'s guards (code
that was compiled under plain autocast isn't reused) and into the keys of its caches on disk, and costs no
more than a look at a thread-local bit. The table's hash goes into ``torch.compiler.config.cache_key_tag``
as well: another version's code isn't ours.

Source: ``aten/src/ATen/autocast_mode.h`` of torch 2.13 for what a kernel at these keys does.
"""

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, cast

import torch

from ..sensitive import OPERATORS, Operator, table_hash
from . import emulate, functions
from .emulate import Emulation
from .emulate import is_on as emulating

_FLAG = "ipu"
"""The device type whose autocast state says that the table counts on this thread."""

REGION = "maia"
"""The device type whose autocast state says: this is a compiled region, which enters autocast by itself."""

_VMAP = "FuncTorchBatched"
_TAKEN_APART = "FuncTorchBatchedDecomposition"
"""The alias key of operators that ``vmap`` takes apart."""

_HALVES = (torch.bfloat16, torch.float16)
_LOWEST_FP16 = torch.finfo(torch.float16).min
_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA", "xpu": "AutocastXPU", "mps": "AutocastMPS"}

_enabled = torch.is_autocast_enabled
_set_enabled = torch.set_autocast_enabled
_Excluded: Any = torch._C._ExcludeDispatchKeyGuard


def table_counts() -> bool:
    """Whether the table is in force on this thread."""
    return _enabled(_FLAG)


class _Ambient:
    """Torch's autocast, with the table in force, as eager code enters it.

    The same calls as ``torch.autocast``'s own, whose checks of device and dtype were made with the plan: half
    its time. What exports a model listens to torch's own.
    """

    __slots__ = ("_autocast", "_before", "_device", "_dtype", "_dtype_before", "_table_before")

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._before = self._table_before = False
        self._dtype_before = dtype
        self._autocast: Any = None

    def __enter__(self) -> None:
        device = self._device
        self._table_before = _enabled(_FLAG)
        if torch._C._is_torch_function_mode_enabled():
            self._autocast = torch.autocast(device, dtype=self._dtype)
            self._autocast.__enter__()
        else:
            self._before, self._dtype_before = _enabled(device), torch.get_autocast_dtype(device)
            _set_enabled(device, True)
            torch.set_autocast_dtype(device, self._dtype)
            torch.autocast_increment_nesting()
        _set_enabled(_FLAG, True)

    def __exit__(self, *error: Any) -> None:
        _set_enabled(_FLAG, self._table_before)
        if self._autocast is not None:
            self._autocast.__exit__(*error)
            self._autocast = None
            return
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _set_enabled(self._device, self._before)
        torch.set_autocast_dtype(self._device, self._dtype_before)


class _Emulated:
    """Autocast by casts there and back, with the table in force or torch's own lists."""

    __slots__ = ("_autocast", "_emulation")

    def __init__(self, device: str, dtype: torch.dtype, table: bool) -> None:
        self._autocast: Any = _Ambient(device, dtype) if table else torch.autocast(device, dtype=dtype)
        self._emulation = Emulation()

    def __enter__(self) -> None:
        self._autocast.__enter__()
        self._emulation.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._emulation.__exit__(*error)
        self._autocast.__exit__(*error)


@contextmanager
def _within(device: str, dtype: torch.dtype, table: bool) -> Iterator[None]:
    # torch.compile follows autocast only where `with` is written out like this.
    with torch.autocast(device, dtype=dtype), torch.autocast(REGION, dtype=torch.bfloat16):
        if table:
            with torch.autocast(_FLAG, dtype=torch.bfloat16):
                yield
        else:
            yield


def autocast(
    device: str, dtype: torch.dtype, table: bool, emulate: bool = False
) -> AbstractContextManager[Any]:
    """Autocast in ``dtype``, with the table in force or torch's own lists; in eager and in compiled code.

    ``emulate`` computes the half list by casts there and back; eager only.
    """
    if torch.compiler.is_compiling():
        return _within(device, dtype, table)
    if emulate:
        return _Emulated(device, dtype, table)
    return _Ambient(device, dtype) if table else torch.autocast(device, dtype=dtype)


class _Flags:
    """The table in force, or not, and emulation where asked for, whatever autocast's own state is."""

    __slots__ = ("_before", "_emulation", "_table")

    def __init__(self, table: bool, emulate: bool) -> None:
        self._table = table
        self._emulation = Emulation() if emulate else None
        self._before = False

    def __enter__(self) -> None:
        self._before = _enabled(_FLAG)
        _set_enabled(_FLAG, self._table)
        if self._emulation is not None:
            self._emulation.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._emulation is not None:
            self._emulation.__exit__(*error)
        _set_enabled(_FLAG, self._before)


class Backward:
    """What a backward runs under: no autocast, which would run the products of FP32 layers in half; but the
    table in force, for forwards that are recomputed.
    """

    __slots__ = ("_autocast", "_device", "_flags")

    def __init__(self, device: str, table: bool, emulate: bool) -> None:
        self._device = device
        self._flags = _Flags(table, emulate)
        self._autocast: Any = None

    def __enter__(self) -> None:
        if _enabled(self._device):
            self._autocast = torch.autocast(self._device, enabled=False)
            self._autocast.__enter__()
        self._flags.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._flags.__exit__(*error)
        if self._autocast is not None:
            self._autocast.__exit__(*error)


# -- what a kernel does -----------------------------------------------------------------------------------

Kernel = Callable[..., Any]
Plain = Callable[..., Any]
"""``plain(keyset, *args, **kwargs)``: what torch alone does at this key."""


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALVES else value
    return [_widened(v) for v in value] if isinstance(value, (list, tuple)) else value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        wide = value.is_floating_point() and value.dtype is not torch.float64
        return value.to(dtype) if wide else value
    return [_narrowed(v, dtype) for v in value] if isinstance(value, (list, tuple)) else value


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _fp32(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """Half inputs widened; the result is FP32."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, *args, **kwargs)
        wide = [_widened(a) for a in args]
        with _Excluded(keys):
            return op(*wide, **{k: _widened(v) for k, v in kwargs.items()})

    return kernel


def _fp32_out(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """The result is FP32 unless the user said what it shall be; for operators that take ``dtype``."""
    arguments = op._schema.arguments
    at = [a.name for a in arguments].index("dtype")
    by_name = arguments[at].kwarg_only

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, *args, **kwargs)
        given = kwargs.get("dtype") if by_name or len(args) <= at else args[at]
        if given is None and args[0].dtype in _HALVES:
            args = (args[0].float(), *args[1:])
        with _Excluded(keys):
            return op(*args, **kwargs)

    return kernel


def _softmax(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """As ``fp32_out``, and a score that half made -inf counts as half's lowest number.

    A mask of the lowest number added to scores overflows in half: a row masked in full would be NaN, where
    FP32 gives it equal weights, and a masked class would cost infinity. The widened copy is ours, so it is
    changed in place: as an operator that autograd records it would take as long as the softmax.
    """

    def kernel(keyset: Any, scores: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, scores, *args, **kwargs)
        if scores.dtype in _HALVES:
            lowest = torch.finfo(scores.dtype).min
            scores = scores.float()
            scores.detach().clamp_min_(lowest)
        with _Excluded(keys):
            return op(scores, *args, **kwargs)

    return kernel


def _cross_entropy(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """As ``softmax``, in FP16 alone: bf16 has FP32's range, and torch's own kernel widens it in less time."""
    wide = _fp32(op, keys, plain, device)

    def kernel(keyset: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if logits.dtype is torch.float16 and _enabled(_FLAG):
            logits = logits.float()
            logits.detach().clamp_min_(_LOWEST_FP16)
        return wide(keyset, logits, *args, **kwargs)

    return kernel


def _unit(wide: Kernel) -> Kernel:
    """The same, held between -1 and 1; the gradient is that of the operator itself."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        out = wide(keyset, *args, **kwargs)
        if _enabled(_FLAG):
            out.detach().clamp_(-1.0, 1.0)
        return out

    return kernel


def _promote(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """Floating inputs of several widths are brought to the widest."""

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, *args, **kwargs)
        dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()}
        if len(dtypes) > 1 and dtypes & set(_HALVES):
            if dtypes == set(_HALVES) or torch.float32 in dtypes:
                args = tuple(_widened(a) for a in args)
                kwargs = {k: _widened(v) for k, v in kwargs.items()}
        with _Excluded(keys):
            return op(*args, **kwargs)

    return kernel


def _half(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """Inputs and weights in autocast's half."""
    emulated = emulate.kernel(op, keys, device)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, *args, **kwargs)
        if emulating():
            return emulated(*args, **kwargs)
        dtype = torch.get_autocast_dtype(device)
        narrow = [_narrowed(a, dtype) for a in args]
        with _Excluded(keys):
            return op(*narrow, **{k: _narrowed(v, dtype) for k, v in kwargs.items()})

    return kernel


def _inside(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """Statistics in FP32 inside torch's kernel; the result follows the input, half weights are widened.

    CPU's kernel keeps them in FP32 only where some weight or running statistic is FP32: without any, it
    rounds the mean to half before it subtracts it. So there the input is widened, the result narrowed.
    """

    def kernel(keyset: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _enabled(_FLAG):
            return plain(keyset, x, *args, **kwargs)
        wide = [_widened(a) for a in args]
        with _Excluded(keys):
            if device == "cpu" and x.dtype in _HALVES and all(a is None for a in wide[:4]):
                return op(x.float(), *wide, **kwargs).to(x.dtype)
            return op(x, *wide, **kwargs)

    return kernel


def _emulated(op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    """Half by casts there and back while this thread emulates."""
    emulated = emulate.kernel(op, keys, device)

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return emulated(*args, **kwargs) if emulating() else plain(keyset, *args, **kwargs)

    return kernel


_MAKERS: dict[str, Callable[[Any, Any, Plain, str], Kernel]] = {
    "fp32": _fp32,
    "fp32_out": _fp32_out,
    "softmax": _softmax,
    "cross_entropy": _cross_entropy,
    "promote": _promote,
    "follow": _promote,
    "half": _half,
    "inside": _inside,
}


def _kernel_of(row: Operator, op: Any, keys: Any, plain: Plain, device: str) -> Kernel:
    kernel = _MAKERS[row.kind](op, keys, plain, device)
    return _unit(kernel) if row.unit else kernel


# -- installed and removed --------------------------------------------------------------------------------

_Set = tuple[str, str]
"""A set of kernels: the device type, and which of ``Kernels``' three."""


class _Installed:
    """The kernels of this process; a library for each set in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[_Set, int] = {}
        self._libraries: dict[_Set, Any] = {}
        self._undo: list[Callable[[], None]] = []

    @property
    def devices(self) -> set[str]:
        """Device types with kernels in place."""
        return {device for device, _ in self._libraries}

    def acquire(self, device: str, which: str) -> None:
        key = device, which
        with self._lock:
            self._users[key] = self._users.get(key, 0) + 1
            if self._users[key] > 1 or device not in _KEYS:
                return
            if not self._libraries:
                self._undo += [_tag_caches(), functions.install(_for_backward, _for_recompute)]
                self._undo.append(_vmap_library()._destroy)
            self._libraries[key] = _library(device, which)

    def release(self, device: str, which: str) -> None:
        key = device, which
        with self._lock:
            self._users[key] -= 1
            if self._users[key] or key not in self._libraries:
                return
            self._libraries.pop(key)._destroy()
            while self._undo and not self._libraries:
                self._undo.pop()()


_INSTALLED = _Installed()


class Kernels:
    """A hold on the kernels for one device type; :meth:`remove`, or its end, lets go.

    Args:
        device: torch device type; one without autocast has no kernels.
        which: ``table``; ``fp16``, what the table does in FP16 alone; or ``emulate``, half by casts there and
            back.
    """

    def __init__(self, device: str, which: str = "table") -> None:
        _INSTALLED.acquire(device, which)
        self._finalizer = weakref.finalize(self, _INSTALLED.release, device, which)

    def remove(self) -> None:
        """Let go; further calls do nothing."""
        self._finalizer()


def _tag_caches() -> Callable[[], None]:
    config: Any = torch.compiler.config
    before = config.cache_key_tag
    config.cache_key_tag = f"{before}+equipoise-{table_hash()}"

    def remove() -> None:
        config.cache_key_tag = before

    return remove


def _for_backward() -> Callable[[], AbstractContextManager[Any]] | None:
    """The autocast of this moment, to be entered again when a Function's backward runs."""
    for device in _INSTALLED.devices:
        if _enabled(device):
            dtype = torch.get_autocast_dtype(device)
            return partial(autocast, device, dtype, _enabled(_FLAG), emulating())
    return None


def _for_recompute() -> Callable[[], AbstractContextManager[Any]] | None:
    """Our flags of this moment, to be raised again when a checkpoint computes its forward again."""
    return partial(_Flags, _enabled(_FLAG), emulating()) if any(map(_enabled, _INSTALLED.devices)) else None


def overload(name: str) -> Any:
    """The torch operator of a schema name such as ``softmax.int``; None where this torch has none."""
    base, _, which = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return None if packet is None else getattr(packet, which or "default", None)


def _keys_of(device: str) -> Any:
    """Autocast's dispatch keys of a device type."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _KEYS[device]))


def _library(device: str, which: str) -> Any:
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    key, keys = _KEYS[device], _keys_of(device)
    with warnings.catch_warnings():
        # Replacing torch's own kernel is what is meant here.
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for row in OPERATORS:
            op = overload(row.name)
            if op is None or not _needs_kernel(row, op, device, which):
                continue
            plain = _plain(op, device)
            if which == "emulate":
                kernel = _emulated(op, keys, plain, device)
            else:
                kernel = _kernel_of(row, op, keys, plain, device)
            library.impl(op, kernel, key, with_keyset=True)
    return library


def _vmap_library() -> Any:
    """``torch.func.vmap`` takes operators apart before autocast sees them: our rules come first.

    A part that is a product of its own (in ``cov``, ``dot``) still runs in half there.
    """
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
        for row in OPERATORS:
            op = overload(row.name)
            if op is not None and (has(op.name(), _VMAP) or has(op.name(), _TAKEN_APART)):
                library.impl(op, _under_vmap(row, op), _VMAP, with_keyset=True)
    return library


class _Apart:
    """An operator as ``vmap`` takes it apart, called as the operator itself is."""

    def __init__(self, op: Any) -> None:
        self._schema = op._schema
        self._own = torch.library.get_kernel(op, _VMAP)
        self._keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, _VMAP))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._own.call_boxed(self._keys, *args, **kwargs)


def _under_vmap(row: Operator, op: Any) -> Kernel:
    apart = _Apart(op)

    def plain(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return apart(*args, **kwargs)

    by_device = {device: _kernel_of(row, apart, _keys_of(device), plain, device) for device in _KEYS}

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        first = next(_tensors((*args, *kwargs.values())), None)
        device = "" if first is None else first.device.type
        ours = device in by_device and _enabled(device)
        return (by_device[device] if ours else plain)(keyset, *args, **kwargs)

    return kernel


@cache
def _has_own(op: Any, device: str) -> bool:
    """Whether torch has a kernel at this device's autocast key; first asked before ours is there."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _KEYS[device]))


def _needs_kernel(row: Operator, op: Any, device: str, which: str) -> bool:
    """Whether torch's own autocast on this device does something else than the row says.

    The sets share no operator: those of the half list that torch leaves out emulate by themselves.
    """
    if which == "emulate":
        return row.kind == "half" and _has_own(op, device)
    if which == "fp16":
        return row.kind == "cross_entropy" and _has_own(op, device)
    if device in row.unlike and _has_own(op, device):
        return True
    return not (_has_own(op, device) or row.by_torch or row.kind == "follow")


def _plain(op: Any, device: str) -> Plain:
    """What torch alone does with an operator at this device's autocast key."""
    if _has_own(op, device):
        own = torch.library.get_kernel(op, _KEYS[device])
        return cast(Plain, own.call_boxed)
    after = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, _KEYS[device]))

    def fall_through(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        return op.redispatch(keyset & after, *args, **kwargs)

    return fall_through
