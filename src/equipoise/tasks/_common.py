"""What several shipped tasks share: seeded models, the schedule, the metrics, splits by name.

Enters: a task's parts. Leaves: the same, ready for a Task. Where: inside the task functions. Source:
metrics are scikit-learn's.
"""

import hashlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..task import Metric

Made = TypeVar("Made")


def seeded(seed: int, make: Callable[[], Made]) -> Made:
    """``make()`` under torch's CPU generator seeded with ``seed``; the caller's generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make()


def stratified(labels: np.ndarray) -> dict[str, np.ndarray]:
    """Rows of ``labels`` (N,): 60 % train, 20 % val, 20 % test, with like shares of each class.

    The same under every seed, so that seeds differ in training alone.
    """
    from sklearn.model_selection import train_test_split

    rest, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, val = train_test_split(rest, test_size=0.25, stratify=labels[rest], random_state=0)
    return {"train": train, "val": val, "test": test}


def _warmup_cosine(step: int, *, warmup: int, steps: int, floor: float) -> float:
    if step < warmup:
        return (step + 1) / warmup
    way = min((step - warmup) / max(steps - warmup, 1), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * way))


def warmup_cosine(
    optimizer: torch.optim.Optimizer, steps: int, *, warmup: float = 0.1, floor: float = 0.02
) -> torch.optim.lr_scheduler.LRScheduler:
    """Up in the first ``warmup`` share of ``steps``, then down a cosine to ``floor``, and there from then on.

    (OneCycleLR would raise where a run goes on past ``steps``.)
    """
    shape = partial(_warmup_cosine, warmup=max(round(warmup * steps), 1), steps=steps, floor=floor)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, shape)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of ``model(batch[0])`` (B, C) against ``batch[1]`` (B,), in FP32."""
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def accuracy(labels: np.ndarray, scores: np.ndarray) -> float:
    """Share of cases whose highest score is at their label: labels (N,), scores (N, C)."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(labels, scores.argmax(1)))


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Area under the ROC curve: labels (N,) of 0 and 1, scores (N,), or (N, 2) of both classes."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels, scores if scores.ndim == 1 else scores[:, 1] - scores[:, 0]))


def sensitivity_at(specificity: float) -> Metric:
    """The share of positives found at the threshold that clears at least ``specificity`` of the negatives."""

    def sensitivity(labels: np.ndarray, scores: np.ndarray) -> float:
        from sklearn.metrics import roc_curve

        false_alarms, found, _ = roc_curve(labels, scores, drop_intermediate=False)
        return float(found[false_alarms <= 1 - specificity + 1e-12].max())

    return sensitivity


def name_hash(name: str) -> int:
    """A number in 0..2**32-1 that depends on the name alone: the same on every machine, under every seed."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
