"""Cheap checks of a task's data, before the first step.

Enters: a Task. Leaves: the same Task, or a `TaskError`. Where: at the end of every task function that
``resolve`` gives. Only data that already lie in memory as tensors are looked at; what is read from disk is
checked when read.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from ..errors import TaskError
from ..task import Task

_IGNORED = -100
"""The label that torch's losses skip unless told otherwise."""


def check_task(task: Task) -> Task:
    """Look at the tensors of each split: NaN, labels that the model has no output for, one class only.

    Raises:
        TaskError: names the split, the first bad case, and what is allowed.
    """
    known = task.labels is None and task.collate is None and not hasattr(task.train, "get_batch")
    classes = _classes(task) if known else None
    for split in ("train", "val", "test"):
        tensors = _tensors(getattr(task, split))
        for place, tensor in enumerate(tensors):
            check_finite(f"task {task.name!r}, {split}", tensor, f"tensor {place}")
        if known and len(tensors) == 2 and _is_labels(tensors[1]):
            allowed = classes if classes is not None else int(tensors[1].max()) + 1
            check_labels(
                f"task {task.name!r}, {split}", tensors[1], allowed, ignored=_IGNORED, two=split == "train"
            )
    return task


def check_finite(where: str, values: Tensor, what: str) -> None:
    """Refuse NaN and infinity in ``values`` (N, ...).

    Raises:
        TaskError: names the first case that has one.
    """
    if not values.is_floating_point() or values.numel() == 0:
        return
    # A sum is finite unless a value isn't (or it overflows, and then the exact look says so).
    if bool(torch.isfinite(values.sum(dtype=torch.float64))):
        return
    bad = ~torch.isfinite(values).flatten(1).all(1) if values.dim() > 1 else ~torch.isfinite(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise TaskError(
            f"{where}: {int(bad.sum())} of {len(values)} cases have NaN or infinity in {what}, "
            f"first case {first}; only finite numbers can be trained on: drop these cases or fill them in"
        )


def check_labels(
    where: str, labels: Tensor, classes: int, *, ignored: int | None = None, two: bool = True
) -> None:
    """Refuse labels (N,) outside 0..classes-1, and, with ``two``, labels that are all the same.

    Raises:
        TaskError: names the first bad label.
    """
    bad = (labels < 0) | (labels >= classes)
    if ignored is not None:
        bad &= labels != ignored
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise TaskError(
            f"{where}: label {int(labels[first])} of case {first} is out of range; with {classes} classes "
            f"the labels are 0 to {classes - 1}: renumber them, or give the model more outputs"
        )
    if two and len(labels) > 1 and bool((labels == labels[0]).all()):
        raise TaskError(
            f"{where}: all {len(labels)} cases are of class {int(labels[0])}; at least two classes are "
            "needed: check how the labels are read and how the data are split"
        )


def check_paired(where: str, cases: Sequence[Any] | Tensor, labels: Sequence[Any] | Tensor) -> None:
    """Refuse data without cases, or with another number of labels.

    Raises:
        TaskError: says how many of each there are.
    """
    if len(cases) == 0:
        raise TaskError(f"{where}: the data set is empty; it needs at least one case")
    if len(cases) != len(labels):
        raise TaskError(
            f"{where}: {len(cases)} cases but {len(labels)} labels; there must be one label a case"
        )


def _tensors(dataset: Any) -> tuple[Tensor, ...]:
    if type(dataset) is Subset:
        chosen = torch.as_tensor(dataset.indices, dtype=torch.int64)
        return tuple(tensor[chosen] for tensor in _tensors(dataset.dataset))
    return dataset.tensors if isinstance(dataset, TensorDataset) else ()


def _is_labels(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 1
        and not tensor.is_floating_point()
        and not tensor.is_complex()
        and tensor.numel() > 0
    )


def _classes(task: Task) -> int | None:
    """How many classes the model tells apart: by its scores of one case, or None where that says nothing."""
    tensors = _tensors(task.train)
    if len(tensors) != 2 or not _is_labels(tensors[1]):
        return None
    training = [module for module in task.model.modules() if module.training]
    task.model.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            scores = task.scores_of([tensor[:2] for tensor in tensors])
    except Exception:  # the first real step says it better
        return None
    finally:
        for module in training:
            module.training = True
    return scores.shape[1] if scores.dim() == 2 and scores.shape[1] > 1 else None
