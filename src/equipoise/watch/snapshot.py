"""Checkpoints: everything that a run needs to go on, saved and restored bit for bit.

Enters: state dicts of tensors and plain values. Leaves: ``step-00000123-0004.pt`` (step, number of
evaluations) beside a manifest of its size and SHA-256, or the state read back. Where: between steps. Source:
torch's notes on ``weights_only``.

The manifest gets its name first, so a ``.pt`` with its name is complete; one that doesn't match its manifest
is damaged and passed over. Nothing is unpickled but what ``torch.load(weights_only=True)`` allows: no code.
NumPy arrays and scalars, which it doesn't allow, travel as tensors and plain numbers.
"""

import hashlib
import json
import pickle
import re
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import RunError
from .files import Disk, put, put_json

SCHEMA = 1
"""Version of a checkpoint's content; another one is refused."""
KEEP = 2
"""Checkpoints kept: the last, and the one before it should the last be damaged."""

_ARRAY = "__numpy__"
_PLAIN = (bool, int, float, complex, str, bytes, torch.Tensor, torch.dtype, torch.device, type(None))
_NAME = re.compile(r"step-\d{8,}(-\d{4,})?\.pt")
_OWN = re.compile(
    r"(?P<aside>\.?)(?P<stem>(step|best)-\d{8,}(-\d{4,})?)\.(pt|json|pt\.new|pt\.new\.part|json\.part)"
)
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What stands beside a checkpoint."""

    schema: int
    step: int
    bytes: int
    sha256: str
    best: str | None
    """File name of the best weights that this checkpoint refers to."""


def pack(value: Any, where: str = "state") -> Any:
    """``value`` in types that ``weights_only`` loading takes.

    Raises:
        RunError: something that can't be restored without running code; the message names its place.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise RunError(
                f"{where} is a NumPy array of Python objects; a checkpoint takes arrays of numbers"
            )
        raw = torch.frombuffer(bytearray(value.tobytes() or b"\0"), dtype=torch.uint8)[: value.nbytes]
        return {_ARRAY: str(value.dtype), "shape": list(value.shape), "bytes": raw}
    if isinstance(value, Mapping):
        packed = {pack(k, where): pack(v, f"{where}[{k!r}]") for k, v in value.items()}
        return _alike(value, packed)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [pack(v, f"{where}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return {pack(v, where) for v in value}
    if isinstance(value, (*_PLAIN, torch.Size)):
        return value
    raise RunError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}; a checkpoint takes tensors, "
        "NumPy arrays, numbers, text, lists, tuples, sets and dicts. Return these from state_dict()"
    )


def unpack(value: Any) -> Any:
    """What :func:`pack` was given, from what it made of it."""
    if isinstance(value, dict):
        if _ARRAY in value:
            raw = value["bytes"].numpy().tobytes()
            return np.frombuffer(raw, dtype=value[_ARRAY]).reshape(value["shape"]).copy()
        return _alike(value, {k: unpack(v) for k, v in value.items()})
    if isinstance(value, list):
        return [unpack(v) for v in value]
    if type(value) is tuple:
        return tuple(unpack(v) for v in value)
    return value


def _alike(old: Mapping[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """``items`` as the kind of mapping that ``old`` is; a module's state keeps its version numbers."""
    kinds: tuple[type[dict[Any, Any]], ...] = (Counter, OrderedDict)
    new = next((kind(items) for kind in kinds if isinstance(old, kind)), items)
    if hasattr(old, "_metadata"):
        vars(new)["_metadata"] = old._metadata
    return new


def save(disk: Disk, path: Path, state: Mapping[str, Any], *, step: int, best: str | None = None) -> None:
    """Write a checkpoint whole, its manifest first.

    Raises:
        RunError: the disk is full or read-only, or the state holds something that can't be restored.
    """
    content = {"schema": SCHEMA, "step": step, "state": pack(state)}
    digest = hashlib.sha256()
    aside = path.with_suffix(".pt.new")
    size = put(disk, aside, lambda file: _save_to(content, file), digest)
    manifest = Manifest(schema=SCHEMA, step=step, bytes=size, sha256=digest.hexdigest(), best=best)
    put_json(disk, path.with_suffix(".json"), {k: getattr(manifest, k) for k in Manifest.__slots__})
    disk.rename(aside, path)
    disk.sync_directory(path.parent)


def _save_to(content: Any, file: Any) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # torch wraps what the file said ("unexpected pos ..."): the disk's own error is the one to show.
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        raise cause if cause is not None else error from None


def load(path: Path) -> dict[str, Any]:
    """The state of a complete checkpoint.

    Raises:
        Damaged: it isn't what its manifest says.
        RunError: it is of another version, or holds code.
    """
    manifest = read_manifest(path)
    if manifest is None:
        raise Damaged(f"{path.name} has no readable manifest ({path.with_suffix('.json').name})")
    if manifest.schema != SCHEMA:
        raise RunError(
            f"{str(path)!r} has schema {manifest.schema}, this version of Equipoise reads {SCHEMA}: "
            "resume with the version that wrote it"
        )
    _check_digest(path, manifest)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise RunError(
            f"{str(path)!r} holds something other than tensors and plain values; it may run code, so it was "
            f"not loaded. Only resume from checkpoints you trust. ({str(error).splitlines()[0]})"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
        raise Damaged(f"{path.name} can't be read: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise RunError(f"{str(path)!r} is not a checkpoint of Equipoise: it has no 'schema = {SCHEMA}'")
    state: dict[str, Any] = unpack(content["state"])
    return state


class Damaged(RunError):
    """A checkpoint that was cut, altered, or never finished."""


def read_manifest(path: Path) -> Manifest | None:
    """The manifest of a checkpoint; None when there is none that can be read."""
    try:
        return Manifest(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _check_digest(path: Path, manifest: Manifest) -> None:
    digest = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != manifest.bytes:
            raise Damaged(f"{path.name} has {size} bytes instead of {manifest.bytes}")
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise Damaged(f"{path.name} can't be read: {error.strerror}") from error
    if digest.hexdigest() != manifest.sha256:
        raise Damaged(f"{path.name} was altered: its SHA-256 is not the one in its manifest")


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints of a run, the newest last."""
    found = [p for p in folder.glob("step-*.pt") if _NAME.fullmatch(p.name)]
    return sorted(found, key=lambda p: [int(number) for number in p.stem.split("-")[1:]])


def load_newest(disk: Disk, folder: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The state of the newest complete checkpoint; damaged ones before it are set aside as ``*.damaged``.

    Returns:
        the state, None when no checkpoint was ever finished; and a sentence for each that was set aside.

    Raises:
        RunError: there are checkpoints, and all of them are damaged; or the newest holds code.
    """
    damaged: list[Path] = []
    notes: list[str] = []
    paths = checkpoints(folder)
    for path in reversed(paths):
        try:
            state = load(path)
        except Damaged as error:
            damaged.append(path)
            notes.append(f"{error}; going on from the checkpoint before it")
            continue
        for old in damaged:
            disk.rename(old, old.with_suffix(".pt.damaged"))
        return state, notes
    if paths:
        why = notes[0].split(";")[0]
        raise RunError(f"no checkpoint in {str(folder)!r} is complete ({why}); start a new run")
    return None, notes


def prune(disk: Disk, folder: Path) -> None:
    """Remove checkpoints but the last two, best weights that neither refers to, and unfinished files."""
    kept = checkpoints(folder)[-KEEP:]
    stems = {path.stem for path in kept}
    stems |= {Path(m.best).stem for m in map(read_manifest, kept) if m is not None and m.best}
    for path in sorted(folder.iterdir()):
        own = _OWN.fullmatch(path.name)
        if own and (own["stem"] not in stems or own["aside"]):
            disk.remove(path)


def load_weights(model: nn.Module, saved: Mapping[str, Any], source: str) -> None:
    """Copy saved weights and buffers into ``model``, in place.

    Raises:
        RunError: names or shapes differ; the message names the first difference.
    """
    own = model.state_dict()
    for name, value in own.items():
        if name not in saved:
            raise RunError(f"{source} has no {name!r}, which the model has: it is another model's checkpoint")
        if isinstance(value, torch.Tensor) and value.shape != saved[name].shape:
            raise RunError(
                f"{name!r} is {tuple(saved[name].shape)} in {source} and {tuple(value.shape)} in the model: "
                "it is another model's checkpoint"
            )
    extra = next((name for name in saved if name not in own), None)
    if extra is not None:
        raise RunError(f"{source} has {extra!r}, which the model has not: it is another model's checkpoint")
    model.load_state_dict(saved)
