"""A Task: what is trained.

Enters: the user's model, optimizer, data and metric. Leaves: one checked value that ``train`` and ``compare``
run. Where: before everything else. A task is a function ``def task(seed: int, data: str | None) -> Task``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from .errors import TaskError

Metric = Callable[[np.ndarray, np.ndarray], float]
"""``metric(labels, scores)``: labels (N,) or (N, ...), scores (N, ...) float32; one number."""


@dataclass(kw_only=True)
class Task:
    """What is trained, on what, and how good is judged.

    ``train``, ``val`` and ``test`` are map-style data sets. One that draws random numbers in ``__getitem__``
    stays exact under resume: each sample is drawn under its own seed. One with ``get_batch(indices) ->
    batch`` is read a batch at a time (faster), and then must not draw random numbers.
    """

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    train: Dataset[Any]
    val: Dataset[Any]
    test: Dataset[Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    """``loss(model, batch)``: a scalar; called under the session's autocast."""
    metric: Metric
    metric_name: str
    higher_is_better: bool = True
    margin: float | None = None
    """The largest loss of ``metric`` that still counts as "not worse", in the metric's own units. None: no
    verdict."""
    margin_relative: bool = False
    """Whether ``margin`` is a share of FP32's value of the metric."""
    batch_size: int = 32
    steps: int = 1000
    """Default length of a run, in optimizer steps."""
    eval_every: int = 100
    """Steps between two evaluations on ``val``."""
    eval_batch_size: int | None = None
    """None: four times ``batch_size``."""
    predict: Callable[[nn.Module, Any], torch.Tensor] | None = None
    """``predict(model, batch)``: scores (B, ...); default ``model(batch[0])``."""
    labels: Callable[[Any], torch.Tensor] | None = None
    """``labels(batch)``: (B, ...); default ``batch[1]``."""
    collate: Callable[[list[Any]], Any] | None = None
    """Samples to a batch; default torch's ``default_collate``. Not used with ``get_batch``."""
    lr_scheduler: Any = None
    max_grad_norm: float | None = None
    extra_metrics: dict[str, Metric] | None = None
    """Shown beside the metric; never decide."""
    group: dict[str, Sequence[Any]] | None = None
    """Per split, who each case belongs to (patient, file): no group may be in two splits."""
    subgroup: dict[str, Sequence[Any]] | None = None
    """Per split, the subgroup each case is reported under."""
    about: str = ""
    """One line: what this is, and where the data came from."""

    def __post_init__(self) -> None:
        """Refuse what can't be trained or judged.

        Raises:
            TaskError: an empty split, a group in two splits, a length or margin that can't be.
        """
        for split in ("train", "val", "test"):
            if len(getattr(self, split)) == 0:
                raise TaskError(f"task {self.name!r}: the {split} split is empty; it needs at least one case")
        for what in ("batch_size", "steps", "eval_every"):
            if getattr(self, what) < 1:
                raise TaskError(f"task {self.name!r}: {what} is {getattr(self, what)}; it must be at least 1")
        if self.margin is not None and not 0 <= self.margin < float("inf"):
            raise TaskError(
                f"task {self.name!r}: margin is {self.margin}; it must be a finite number from 0 up"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        if not self.group:
            return
        seen: dict[Any, str] = {}
        for split, members in self.group.items():
            if len(members) != len(getattr(self, split)):
                raise TaskError(
                    f"task {self.name!r}: group[{split!r}] names {len(members)} cases, "
                    f"the split has {len(getattr(self, split))}"
                )
            for member in set(members):
                if member in seen:
                    raise TaskError(
                        f"task {self.name!r}: group {member!r} is in {seen[member]} and in {split}; the same "
                        "group in two splits makes the metric too good. Split by group."
                    )
                seen[member] = split

    def scores_of(self, batch: Any) -> torch.Tensor:
        """Scores of a batch, (B, ...), float32 on the CPU; under ``no_grad`` and the session's autocast."""
        scores = self.model(batch[0]) if self.predict is None else self.predict(self.model, batch)
        return scores.float().cpu()

    def labels_of(self, batch: Any) -> torch.Tensor:
        """Labels of a batch, (B, ...), on the CPU."""
        return (batch[1] if self.labels is None else self.labels(batch)).cpu()


TaskFunction = Callable[[int, str | None], Task]
