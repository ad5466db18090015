"""The baseline arms of a comparison: a training loop as a careful user writes it, in a process of its own.

Enters: requests, one JSON object a line, on stdin. Leaves: answers the same way on stdout; what the task
prints goes to stderr. Where: a child of `comparison`; it imports nothing of Equipoise but the task, so that
no part of ours can slow the baseline or help it. Source: PyTorch's automatic mixed precision recipe.

Requests: ``setup`` (build the task for a seed), ``advance`` (that many steps), ``evaluate`` (a split),
``finish``. Between requests the process blocks and takes no CPU: whoever works holds the token. When stdin
closes, because the parent is done or dead, the process ends at once, even amid a request.

    python -m equipoise.arm_plain TASK --precision fp32|bf16|fp16 [--data D] [--device cpu] [--workers N]
"""

import argparse
import csv
import json
import os
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

MAX_SCORES = 1000
"""Columns of a predictions table; with more scores a case (a map, a sequence) it is kept as an array."""

Key = tuple[int, np.ndarray]
"""An epoch and the numbers of one batch's samples."""


def order(n: int, batch_size: int, seed: int) -> Iterator[Key]:
    """Shuffled batches without end, the short last one kept: those of the plan's feed (a test compares)."""
    epoch = 0
    while True:
        state = np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, epoch & 0xFFFFFFFF])
        shuffled = state.permutation(n).astype(np.int64, copy=False)
        for at in range(0, n, batch_size):
            yield epoch, shuffled[at : at + batch_size]
        epoch += 1


def in_order(n: int, batch_size: int) -> Iterator[Key]:
    """Every sample once, in its place."""
    for at in range(0, n, batch_size):
        yield 0, np.arange(at, min(at + batch_size, n))


def whole_reader(dataset: Any) -> Callable[[np.ndarray], Any] | None:
    """How a data set gives a whole batch at once; None when it gives samples only."""
    if hasattr(dataset, "get_batch"):
        get_batch: Callable[[np.ndarray], Any] = dataset.get_batch
        return get_batch
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda indices: [t.index_select(0, torch.from_numpy(indices)) for t in tensors]
    if type(dataset) is Subset:
        inner, rows = whole_reader(dataset.dataset), np.asarray(dataset.indices, dtype=np.int64)
        return None if inner is None else lambda indices: inner(rows[indices])
    return None


class Loader(Dataset[Any]):
    """Reads a batch in the fastest way that the data set has; ``loader[epoch, indices]``."""

    def __init__(self, dataset: Any, collate: Any, seed: int) -> None:
        self._dataset, self._collate, self._seed = dataset, collate or default_collate, seed
        self._whole = whole_reader(dataset) if collate is None or hasattr(dataset, "get_batch") else None
        self._draws = self._whole is None and (collate is not None or _draws_random_numbers(dataset))

    def __getitem__(self, key: Key) -> Any:
        epoch, indices = key
        if self._whole is not None:
            return self._whole(indices)
        if not self._draws:
            return self._collate([self._dataset[i] for i in indices.tolist()])
        before = _generators()
        samples = []
        for index in indices.tolist():
            _seed_all(_mix(self._seed, epoch, index))
            samples.append(self._dataset[index])
        _seed_all(_mix(self._seed, epoch, -1 - int(indices[0])))  # a collate of the user's may draw too
        batch = self._collate(samples)
        _restore(before)
        return batch

    def batches(self, keys: Iterator[Key], workers: int) -> Iterator[Any]:
        """The batches of ``keys``, read here or in worker processes."""
        if workers == 0:
            return map(self.__getitem__, keys)
        context = "fork" if sys.platform == "linux" else None
        loader = DataLoader(
            self, batch_size=None, sampler=keys, num_workers=workers, collate_fn=_unchanged,
            worker_init_fn=_die_with_parent, multiprocessing_context=context,
            generator=torch.Generator(),  # else it would draw from the one that dropout uses
        )  # fmt: skip
        return iter(loader)


def _unchanged(batch: Any) -> Any:
    return batch


def _die_with_parent(_: int) -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _mix(*words: int) -> int:
    """A seed for one sample in one epoch (splitmix64), as the plan's feed has: both arms augment alike."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        state = ((state ^ state >> 27) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def _generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _restore(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def _draws_random_numbers(dataset: Any) -> bool:
    """Whether reading a few samples moves a random generator; if not, no sample needs a seed."""
    before = _generators()
    for index in range(min(4, len(dataset))):
        dataset[index]
    after = _generators()
    _restore(before)
    same_numpy = before[1][2] == after[1][2] and bool((before[1][1] == after[1][1]).all())
    return not (before[0] == after[0] and same_numpy and torch.equal(before[2], after[2]))


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch of nested tensors on ``device``."""
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [to_device(value, device) for value in batch]
    return batch.to(device, non_blocking=True) if hasattr(batch, "to") else batch


class PlainArm:
    """FP32 or plain autocast, as in PyTorch's recipe."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._device = pick_device(options.device)
        self._half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.precision)
        self._make = import_module("equipoise.tasks").resolve(options.task)
        self._emulated: Callable[[], Any] | None = None
        if options.emulate and self._half is not None:
            operators = import_module("equipoise.step.operators")
            self._kernels = operators.Kernels(self._device.type, "emulate")
            self._emulated = partial(
                operators.autocast, self._device.type, self._half, table=False, emulate=True
            )

    def setup(self, seed: int) -> dict[str, Any]:
        """Build the task for a seed."""
        begin = time.perf_counter()
        self._task = task = self._make(seed, self._options.data)
        task.model.to(self._device).train()
        built = time.perf_counter()
        self._step = 0
        self._scaler = torch.amp.GradScaler(self._device.type) if self._half is torch.float16 else None
        self._loaders = {s: Loader(getattr(task, s), task.collate, seed) for s in ("train", "val", "test")}
        keys = order(len(task.train), task.batch_size, seed)
        self._batches = self._loaders["train"].batches(keys, self._options.workers)
        # What building the task drew doesn't decide what dropout draws: all arms start from here.
        seed_everything(seed)
        return {"build_s": built - begin, "setup_s": time.perf_counter() - built, **describe(task)}

    def advance(self, steps: int, curve_every: int) -> dict[str, Any]:
        """Train that many steps."""
        clock, losses, parts = time.perf_counter, [], [0.0] * 4
        synchronize(self._device)
        begin = clock()
        for _ in range(steps):
            loss, ticks = self._one_step()
            for i in range(4):
                parts[i] += ticks[i + 1] - ticks[i]
            self._step += 1
            if self._step % curve_every == 0:
                losses.append((self._step, ticks[4] - begin, loss))
        synchronize(self._device)
        time_s = clock() - begin
        names = ("data_s", "forward_s", "backward_s", "optimizer_s")
        return {
            "time_s": time_s,
            "losses": [(step, at_s, finite(loss)) for step, at_s, loss in losses],
            # A queue hides from the clock where a GPU's time goes.
            "parts": dict(zip(names, parts, strict=True)) if self._device.type == "cpu" else None,
        }

    def _one_step(self) -> tuple[torch.Tensor, tuple[float, ...]]:
        task, scaler, clock = self._task, self._scaler, time.perf_counter
        t0 = clock()
        batch = next(self._batches)
        if self._device.type != "cpu":
            batch = to_device(batch, self._device)
        t1 = clock()
        with self._autocast():
            loss = task.loss(task.model, batch)
        t2 = clock()
        (loss if scaler is None else scaler.scale(loss)).backward()
        t3 = clock()
        if task.max_grad_norm is not None:
            if scaler is not None:
                scaler.unscale_(task.optimizer)
            torch.nn.utils.clip_grad_norm_(task.model.parameters(), task.max_grad_norm)
        taken = self._update(task.optimizer)
        task.optimizer.zero_grad()
        if task.lr_scheduler is not None and taken:
            task.lr_scheduler.step()
        return loss.detach(), (t0, t1, t2, t3, clock())

    def _update(self, optimizer: torch.optim.Optimizer) -> bool:
        """The optimizer's step; whether it was taken."""
        if self._scaler is None:
            optimizer.step()
            return True
        scale = self._scaler.get_scale()
        self._scaler.step(optimizer)
        self._scaler.update()
        return self._scaler.get_scale() >= scale

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._half is None:
            return nullcontext()
        if self._emulated is not None:
            emulated: AbstractContextManager[Any] = self._emulated()
            return emulated
        return torch.autocast(self._device.type, self._half)

    def evaluate(self, split: str, save: str | None = None) -> dict[str, Any]:
        """The metric on a split; ``save``: where the predictions go."""
        task, dataset = self._task, getattr(self._task, split)
        keys = in_order(len(dataset), task.eval_batch_size or 4 * task.batch_size)
        labels, scores = [], []
        begin = time.perf_counter()
        task.model.eval()
        for batch in self._loaders[split].batches(keys, self._options.workers):
            with torch.no_grad(), self._autocast():
                scores.append(task.scores_of(to_device(batch, self._device)))
            labels.append(task.labels_of(batch))
        task.model.train()
        whole = torch.cat(labels).numpy(), torch.cat(scores).numpy()
        task.check_judged(split, *whole)
        found = metrics_of(task, *whole)
        time_s = time.perf_counter() - begin
        if save is not None:
            write_predictions(Path(save), *whole, (task.subgroup or {}).get(split))
        return found | {"time_s": time_s}


def seed_everything(seed: int) -> None:
    """Seed the generators that a step may draw from."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def pick_device(name: str) -> torch.device:
    """``auto``: the accelerator that is there, else the CPU."""
    if name != "auto":
        return torch.device(name)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def finite(value: Any) -> float | None:
    """A number for JSON, which has no NaN."""
    number = float(value)
    return number if np.isfinite(number) else None


def describe(task: Any) -> dict[str, Any]:
    """What the parent has to know of a task."""
    return {
        "name": task.name, "about": task.about, "metric_name": task.metric_name, "margin": task.margin,
        "higher_is_better": task.higher_is_better, "margin_relative": task.margin_relative,
        "steps": task.steps, "eval_every": task.eval_every, "batch_size": task.batch_size,
        "train_size": len(task.train), "extra_metrics": sorted(task.extra_metrics or {}),
        "threads": torch.get_num_threads(),
    }  # fmt: skip


def metrics_of(task: Any, labels: np.ndarray, scores: np.ndarray) -> dict[str, Any]:
    """The task's metric and the extra ones; None for one that isn't a finite number."""
    if not np.isfinite(scores).all():
        # scikit-learn refuses such scores; a model that gives them has no metric.
        return {"metric": None, "extra": dict.fromkeys(task.extra_metrics or {})}
    extra = {name: finite(metric(labels, scores)) for name, metric in (task.extra_metrics or {}).items()}
    return {"metric": finite(task.metric(labels, scores)), "extra": extra}


def write_predictions(path: Path, labels: np.ndarray, scores: np.ndarray, subgroup: Any) -> None:
    """``case,label,score,subgroup`` as CSV, or an ``.npz`` where a case has a whole array."""
    flat = scores.reshape(len(scores), -1)
    width = flat.shape[1]
    if labels.ndim > 1 or width > MAX_SCORES:
        np.savez_compressed(path.with_suffix(".npz"), labels=labels, scores=scores)
        return
    names = ["score"] if width == 1 else [f"score_{i}" for i in range(width)]
    with path.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["case", "label", *names, "subgroup"])
        for case, (label, row) in enumerate(zip(labels.tolist(), flat, strict=True)):
            rows.writerow([case, label, *map(str, row), "" if subgroup is None else subgroup[case]])


def peak_memory_bytes() -> int | None:
    """The most memory this process has held at once; on a GPU, the GPU's."""
    if torch.accelerator.is_available() and hasattr(torch.accelerator, "max_memory_allocated"):
        device_bytes = int(torch.accelerator.max_memory_allocated())
        if device_bytes:
            return device_bytes
    try:
        # getrusage's figure starts with the size of the parent that forked us; this one doesn't.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        return None


WAKE_S = 0.02
"""Long against waking threads and filling caches, short against a slice."""


class Arm(Protocol):
    """What `serve` can run: each request's ``do`` is a method, its other keys the arguments."""

    def setup(self, seed: int) -> dict[str, Any]:
        """Build the task for a seed."""

    def advance(self, steps: int, curve_every: int) -> dict[str, Any]:
        """Train that many steps."""

    def evaluate(self, split: str, save: str | None = None) -> dict[str, Any]:
        """The metric on a split."""


def serve(make_arm: Callable[[], Arm]) -> None:
    """Answer requests until ``finish`` or the end of stdin."""
    # Whatever the task prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # Not sys.stdin: whoever waits in it holds its lock, and a forked data worker starts by closing it.
    asked = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(asked, requests), daemon=True).start()
    try:
        arm = make_arm()
        _answer(answers, {"peak_mem_bytes": peak_memory_bytes()})
        while (request := requests.get()).get("do") != "finish":
            if request["do"] == "advance":
                wake()
            do = getattr(arm, request.pop("do"))
            _answer(answers, {**do(**request), "peak_mem_bytes": peak_memory_bytes()})
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        _answer(answers, {"error": str(error), "kind": type(error).__name__, "frames": frames})
        sys.exit(1)


def wake() -> None:
    """Run all threads for a moment: after a wait they sleep, and a slice of tiny steps would pay for that."""
    a = torch.ones(256, 256)
    until = time.perf_counter() + WAKE_S
    while time.perf_counter() < until:
        a @ a


def _listen(lines: TextIO, requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in lines:
        requests.put(json.loads(line))
    os._exit(0)  # nobody is left to answer, and the main thread may be in the middle of a long step


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line of an arm."""
    parser = argparse.ArgumentParser(prog="equipoise arm")
    parser.add_argument("task")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--data")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--plan")
    parser.add_argument("--workers", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    serve(lambda: PlainArm(options()))
