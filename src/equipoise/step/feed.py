"""The feed: from a data set to batches on the device.

Enters: a map-style data set, or any iterable of batches. Leaves: batches, nested tensors on the device.
Where: the first thing inside a step. Source: PyTorch's notes on reproducibility; splitmix64 (Steele, 2014).

Order and augmentation are functions of seed, epoch and sample index, so the batch at global step ``s`` is the
same after a resume, and with any number of workers. With ``n`` samples and batches of ``b``, an epoch has
``k = ceil(n / b)`` steps (the last one short), and step ``s`` is batch ``s % k`` of epoch ``s // k``: a
position needs no state but the step.
"""

import copy
import ctypes
import os
import random
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from ..blame import told
from ..errors import TaskError, UserError

Batch = TypeVar("Batch")
Collate = Callable[[list[Any]], Any]
_MASK64 = 2**64 - 1
_PARENT_CHECK_S = 1.0
"""How often a worker looks whether its parent still lives."""


def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits ``n`` samples: (n,) int64, a pure function.

    ``RandomState`` and not ``Generator``: NumPy promises that its stream never changes (NEP 19), so a run can
    be resumed under another NumPy.
    """
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF]
    return np.random.RandomState(words).permutation(n).astype(np.int64, copy=False)


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A 64-bit seed for one sample in one epoch (three rounds of splitmix64)."""
    state = 0
    for word in (seed, epoch, index):
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state


class _OwnSeeds:
    """Python's, NumPy's and torch's CPU generators, lent to the samples and given back as they were."""

    def __enter__(self) -> "_OwnSeeds":
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.default_generator.get_state()
        return self

    def __exit__(self, *exc: object) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)

    @staticmethod
    def use(seed: int) -> None:
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        # torch.manual_seed would seed the accelerators too, which nobody gives back.
        torch.default_generator.manual_seed(seed)


class _Watch:
    """Whether anything was drawn since, a few times cheaper than saving and restoring.

    ``numpy.random.get_state`` makes 624 Python numbers (some 25 us); NumPy documents the address of the words
    themselves. Not among them is the second of two normal numbers, which NumPy keeps back: it is forgotten
    when a data set that had not drawn before does.
    """

    def __init__(self) -> None:
        self._python = random.getstate()
        self._torch = torch.default_generator.get_state()
        self._numpy = self._words()

    def moved(self) -> bool:
        """Whether a generator holds something else now."""
        return (
            self._numpy != self._words()
            or self._python != random.getstate()
            or not torch.equal(self._torch, torch.default_generator.get_state())
        )

    def put_back(self) -> None:
        """Make the generators hold what they held."""
        random.setstate(self._python)
        torch.default_generator.set_state(self._torch)
        if self._numpy:
            key, place = self._numpy[: 4 * 624], self._numpy[4 * 624 :]
            words = np.frombuffer(key, dtype=np.uint32)
            np.random.set_state(("MT19937", words, int.from_bytes(place, sys.byteorder), 0, 0.0))

    def _words(self) -> bytes:
        at = _twister_at()
        return ctypes.string_at(at, _TWISTER_BYTES) if at else b""


_TWISTER_BYTES = 4 * 624 + 4
"""Of a Mersenne twister: its key, and the position in it."""


def _twister_at() -> int:
    """Where lies what ``numpy.random`` draws from; 0 where the user put another kind of generator there."""
    generator: Any = np.random.mtrand.get_bit_generator()
    return generator.ctypes.state_address if type(generator) is np.random.MT19937 else 0


class _Key(NamedTuple):
    """What to fetch: an epoch and the samples of one batch."""

    epoch: int
    indices: np.ndarray


@dataclass(frozen=True, slots=True)
class _Failed:
    """A user error on its way from a worker; torch would wrap its message into a traceback."""

    error: UserError


def batch_reader(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """How to read a whole batch at once, or None where only single samples can be read."""
    own = getattr(dataset, "get_batch", None)
    if callable(own):
        return lambda indices: own(indices)
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        tensors = dataset.tensors

        def read(indices: np.ndarray) -> list[torch.Tensor]:
            rows = torch.from_numpy(indices)
            return [t.index_select(0, rows) for t in tensors]

        # index_select wants the rows where the data are.
        return read if all(t.device.type == "cpu" for t in tensors) else None
    if type(dataset) is Subset:
        inner = batch_reader(dataset.dataset)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return None if inner is None else lambda indices: inner(chosen[indices])
    return None


class _Fetch:
    """A data set read by the batch; what a worker process holds."""

    def __init__(self, dataset: Any, seed: int, collate: Collate | None) -> None:
        self._dataset, self._seed = dataset, seed
        self._collate = collate or default_collate
        self._draws = False
        # A collate of the user's decides what a batch is, so the samples must go through it.
        self._read = batch_reader(dataset) if collate is None or hasattr(dataset, "get_batch") else None

    def __getitem__(self, key: _Key) -> Any:
        if self._read is not None:
            return self._read(key.indices)
        if not self._draws:
            watch = _Watch()
            batch = self._collate([self._dataset[index] for index in key.indices.tolist()])
            # Seeding costs more than many a sample; where nothing was drawn, no seed would change a thing.
            if not watch.moved():
                return batch
            watch.put_back()
            self._draws = True
        with _OwnSeeds() as seeds:
            return self._seeded(key, seeds)

    def _seeded(self, key: _Key, seeds: _OwnSeeds) -> Any:
        samples = []
        for index in key.indices.tolist():
            seeds.use(sample_seed(self._seed, key.epoch, index))
            samples.append(self._dataset[index])
        # A collate of the user's may draw too (mixup); its draws belong to the batch, so to its first sample.
        seeds.use(sample_seed(self._seed, key.epoch, -1 - int(key.indices[0])))
        return self._collate(samples)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._dataset, self._seed, self._collate, self._read is not None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._dataset, self._seed, self._collate, fast = state
        self._draws = False
        self._read = batch_reader(self._dataset) if fast else None


class _InWorker:
    """A `_Fetch` whose user errors come back as values."""

    def __init__(self, fetch: _Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, key: _Key) -> Any:
        try:
            return self._fetch[key]
        except UserError as error:
            return _Failed(error)
        except SystemExit as error:
            # Not an Exception: it would end the worker, and nobody would hear why.
            return _Failed(TaskError(f"reading the data failed: {told(error)}"))


class _Keys:
    """An iterable of keys that can be gone through again."""

    def __init__(self, make: Callable[[], Iterator[_Key]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[_Key]:
        return self._make()


def _unchanged(batch: Any) -> Any:
    return batch


def _die_with_parent(worker: int) -> None:
    """End this worker when its parent is gone, even while it waits in a full pipe."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="equipoise-parent-watch").start()


class Feed:
    """Batches of a data set, from any step on.

    A data set with ``get_batch(indices)`` is read a batch at a time, as is a plain ``TensorDataset`` (and a
    ``Subset`` of either). Otherwise each sample is read under its own seed for ``random``, ``numpy.random``
    and torch's CPU generator; what the caller's generators held is put back. (A batch is first read without
    seeds; if that drew anything it is read again with them, and so is every later one.)
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        seed: int,
        workers: int = 0,
        collate: Collate | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        self.samples = len(dataset)
        if batch_size < 1 or workers < 0:
            raise TaskError(
                f"batch_size={batch_size}, workers={workers}: use at least 1 sample, 0 or more workers"
            )
        self.steps_per_epoch = self.samples // batch_size if drop_last else -(-self.samples // batch_size)
        if self.steps_per_epoch == 0:
            why = (
                "the short last batch is dropped: use a smaller one"
                if self.samples
                else "the data set is empty"
            )
            raise TaskError(f"{self.samples} samples make no batch of {batch_size}; {why}")
        self.batch_size, self.seed, self.workers, self.shuffle = batch_size, seed, workers, shuffle
        self._fetch = _Fetch(dataset, seed, collate)
        self._ordered: dict[int, _Ordered] = {}

    def batches(self, start_step: int = 0) -> Iterator[Any]:
        """Batches from global step ``start_step`` on, endlessly over epochs.

        Each call has its own workers; they live over all epochs, until the iterator is closed or dropped.
        """
        order = partial(epoch_order, self.samples, self.seed) if self.shuffle else _as_they_are(self.samples)
        keys = partial(_epochs, order, start_step, self.batch_size, self.steps_per_epoch)
        if self.workers == 0:
            return map(self._fetch.__getitem__, keys())
        return _from_workers(_loader(self._fetch, keys, self.workers, persistent=False))

    def ordered(self, batch_size: int | None = None) -> "_Ordered":
        """Each sample once, in its place, for evaluation; can be gone through again (workers stay up)."""
        size = self.batch_size if batch_size is None else batch_size
        if size not in self._ordered:
            self._ordered[size] = _Ordered(self._fetch, self.samples, size, self.workers)
        return self._ordered[size]

    def close(self) -> None:
        """End the workers that ``ordered`` keeps."""
        self._ordered.clear()


def _as_they_are(n: int) -> Callable[[int], np.ndarray]:
    return lambda epoch: np.arange(n)


def _epochs(
    order_of: Callable[[int], np.ndarray], start_step: int, batch_size: int, steps_per_epoch: int
) -> Iterator[_Key]:
    epoch, batch = divmod(start_step, steps_per_epoch)
    while True:
        order = order_of(epoch)
        for at in range(batch * batch_size, steps_per_epoch * batch_size, batch_size):
            yield _Key(epoch, order[at : at + batch_size])
        epoch, batch = epoch + 1, 0


def _in_order(samples: int, batch_size: int) -> Iterator[_Key]:
    for at in range(0, samples, batch_size):
        yield _Key(0, np.arange(at, min(at + batch_size, samples)))


class _Ordered:
    """The samples in order, once; what `Feed.ordered` gives."""

    def __init__(self, fetch: _Fetch, samples: int, batch_size: int, workers: int) -> None:
        if batch_size < 1:
            raise TaskError(f"batch_size={batch_size}: an evaluation batch needs at least 1 sample")
        self._length = -(-samples // batch_size)
        self._fetch, self._keys = fetch, partial(_in_order, samples, batch_size)
        self._loader = _loader(fetch, self._keys, workers, persistent=True) if workers else None

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        if self._loader is None:
            return map(self._fetch.__getitem__, self._keys())
        return _from_workers(self._loader)


def _loader(
    fetch: _Fetch, keys: Callable[[], Iterator[_Key]], workers: int, *, persistent: bool
) -> "DataLoader[Any]":
    return DataLoader(
        _InWorker(fetch),  # type: ignore[arg-type]
        batch_size=None,
        sampler=_Keys(keys),
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=_die_with_parent,
        persistent_workers=persistent,
        # Without a generator of its own the loader draws its base seed from the user's.
        generator=torch.Generator().manual_seed(0),
        # A spawned worker would import the user's script again and can't unpickle what a file.py defines.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
    )


_HAND_OVER = (ConnectionError, EOFError, FileNotFoundError)
"""What is raised where a worker ends between announcing a tensor and handing it over."""


def _from_workers(loader: "DataLoader[Any]") -> Iterator[Any]:
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads (torch's own); the workers touch none of their locks.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
        # More workers than cores are the caller's choice.
        warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
        batches = iter(loader)
    batch = None
    try:
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except _HAND_OVER as error:
                if str(error).startswith("Caught "):
                    raise  # the data set's own, as torch brings it here
                raise RuntimeError(f"DataLoader worker ended amid a batch: {error!r}.") from error
            if isinstance(batch, _Failed):
                raise batch.error
            yield batch
    finally:
        # The error's traceback holds this frame, and would keep the workers until the garbage is collected.
        batch = None
        del batches


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` with every tensor on ``device``; the same object where nothing had to move.

    Goes through dicts, lists, tuples and named tuples; anything else with a ``to`` method (a packed sequence,
    a tokenizer's output) is moved by it; the rest is left alone.
    """
    if isinstance(batch, torch.Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, dict):
        values = {key: to_device(value, device) for key, value in batch.items()}
        if all(values[key] is value for key, value in batch.items()):
            return batch
        moved = copy.copy(batch)  # keeps a subclass, and a defaultdict's factory
        moved.update(values)
        return moved
    if isinstance(batch, (list, tuple)):
        items = [to_device(value, device) for value in batch]
        if all(new is old for new, old in zip(items, batch, strict=True)):
            return batch
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch


class DeviceFeed(Generic[Batch]):
    """Any iterable of batches, each moved to a device; what ``session.feed(loader)`` returns."""

    def __init__(self, loader: Iterable[Batch], device: torch.device | str) -> None:
        self.loader = loader
        wanted = torch.device(device)
        # Tensors say "cuda:0" where the user says "cuda".
        self.device = torch.empty(0, device=wanted).device if wanted.type not in ("cpu", "meta") else wanted

    def __iter__(self) -> Iterator[Batch]:
        device = self.device
        for batch in self.loader:
            yield to_device(batch, device)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]
