"""How good a model is on a split, and what is wrong with data that can't be judged.

Enters: labels and scores of every case. Leaves: an Evaluation, or an error that names the case. Where:
between steps and at a run's end, under ``trainer.py``.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .blame import told
from .errors import NonFiniteError, TaskError
from .task import Task
from .watch.rng import own_rng, seed_everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A split judged."""

    split: str
    metric: float
    extra: dict[str, float]
    """The task's extra metrics; they never decide."""
    labels: np.ndarray
    """(N, ...), in the order of the data set."""
    scores: np.ndarray
    """(N, ...) float32."""
    time_s: float
    """Seconds that scoring and judging took."""


def judge(task: Task, split: str, labels: np.ndarray, scores: np.ndarray, time_s: float) -> Evaluation:
    """The task's metrics of a split's scores.

    Raises:
        TaskError: the metric raises, or is not a finite number.
        NonFiniteError: a score is NaN.
    """
    task.check_judged(split, labels, scores)
    bad = np.isnan(scores.reshape(len(scores), -1)).any(axis=1)
    if bad.any():
        raise NonFiniteError(
            f"task {task.name!r}: {int(bad.sum())} of {len(bad)} scores on {split} are NaN (the first is "
            f"case {int(bad.argmax())}): training diverged. Lower the learning rate, or use --precision fp32"
        )
    value = _value(task, split, task.metric_name, task.metric, labels, scores)
    extra = {
        name: _value(task, split, name, metric, labels, scores)
        for name, metric in (task.extra_metrics or {}).items()
    }
    return Evaluation(split=split, metric=value, extra=extra, labels=labels, scores=scores, time_s=time_s)


def _value(task: Task, split: str, name: str, metric: Any, labels: np.ndarray, scores: np.ndarray) -> float:
    what = (
        f"task {task.name!r}: the metric {name!r} on {split} (labels {labels.shape}, scores {scores.shape})"
    )
    try:
        value = float(metric(labels, scores))
    except (Exception, SystemExit) as error:
        raise TaskError(f"{what} failed: {told(error)}") from error
    if not math.isfinite(value):
        raise TaskError(
            f"{what} is {value}; it must be a finite number. Does {split} hold more than one class?"
        )
    return value


@contextlib.contextmanager
def undisturbed(model: nn.Module, seed: int) -> Iterator[None]:
    """Evaluation mode without gradients, under generators of its own; all is put back as it was.

    Each module gets back its own mode: a frozen norm stays frozen.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), own_rng(seed):
            yield
    finally:
        for module in training:
            module.training = True


def first_nonfinite(batch: Any) -> int | None:
    """The first row of a batch with a NaN or infinity in one of its tensors; None when all are finite."""
    if isinstance(batch, torch.Tensor):
        if not batch.is_floating_point() or batch.dim() == 0:
            return None
        bad = ~torch.isfinite(batch).reshape(len(batch), -1).all(dim=1)
        return int(bad.int().argmax()) if bool(bad.any()) else None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        rows = [row for row in map(first_nonfinite, batch) if row is not None]
        return min(rows) if rows else None
    return None


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory; the CPU's allocator raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def nonfinite_message(task: Task, split: str, case: int | None) -> str:
    """What is said of a case whose data are not finite; None: it isn't known which."""
    which = "a case" if case is None else f"case {case}"
    return (
        f"task {task.name!r}: {which} of {split} holds a NaN or infinity. Training on it would ruin the "
        "weights: repair or remove it (for example with numpy.nan_to_num), then train again"
    )


__all__ = [
    "Evaluation",
    "first_nonfinite",
    "judge",
    "nonfinite_message",
    "out_of_memory",
    "seed_everything",
    "undisturbed",
]
