"""A Task: what is trained.

Enters: the user's model, optimizer, data and metric. Leaves: one checked value that ``train`` and ``compare``
run. Where: before everything else. A task is a function ``def task(seed: int, data: str | None) -> Task``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
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
            data = getattr(self, split)
            if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
                raise TaskError(
                    f"task {self.name!r}: {split} is a {type(data).__name__}; it must be a map-style data "
                    "set, with __len__ and __getitem__: which case comes when is a function of the seed"
                )
            if len(data) == 0:
                raise TaskError(f"task {self.name!r}: the {split} split is empty; it needs at least one case")
        for what in ("batch_size", "steps", "eval_every", "eval_batch_size"):
            value = getattr(self, what)
            if value is None and what == "eval_batch_size":
                continue
            if not isinstance(value, Integral) or value < 1:
                raise TaskError(
                    f"task {self.name!r}: {what} is {value!r}; it must be a whole number from 1 up"
                )
        margin = self.margin
        if margin is not None and not (isinstance(margin, Real) and 0 <= margin < float("inf")):
            raise TaskError(f"task {self.name!r}: margin is {margin!r}; it must be a finite number from 0 up")
        self._check_names_of_cases("group", self.group)
        self._check_names_of_cases("subgroup", self.subgroup)
        self._check_groups()

    def _check_names_of_cases(self, what: str, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, Mapping) or not set(given) <= {"train", "val", "test"}:
            names = ", ".join(map(repr, given)) if isinstance(given, Mapping) else ""
            came = names or f"a {type(given).__name__}"
            raise TaskError(
                f"task {self.name!r}: {what} has {came}; it must be a dict of 'train', 'val' and 'test', "
                "each with a name for every case"
            )
        for split, members in given.items():
            if len(members) != len(getattr(self, split)):
                raise TaskError(
                    f"task {self.name!r}: {what}[{split!r}] names {len(members)} cases, "
                    f"the split has {len(getattr(self, split))}"
                )

    def _check_groups(self) -> None:
        seen: dict[Any, str] = {}
        for split, members in (self.group or {}).items():
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
        return self._per_case("predict" if self.predict else "the model", scores).float()

    def labels_of(self, batch: Any) -> torch.Tensor:
        """Labels of a batch, (B, ...), on the CPU."""
        labels = batch[1] if self.labels is None else self.labels(batch)
        return self._per_case("labels" if self.labels else "batch[1]", labels)

    def _per_case(self, what: str, found: Any) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or found.dim() == 0:
            came = "one number" if isinstance(found, torch.Tensor) else f"a {type(found).__name__}"
            raise TaskError(
                f"task {self.name!r}: {what} gives {came} for a batch; it must be a tensor, a row a case"
            )
        return found.detach().cpu()

    def check_judged(self, split: str, labels: np.ndarray, scores: np.ndarray) -> None:
        """Refuse labels and scores that are not one of each a case.

        Raises:
            TaskError: says how many there are.
        """
        cases = len(getattr(self, split))
        if not len(labels) == len(scores) == cases:
            raise TaskError(
                f"task {self.name!r}: {split} has {cases} cases, and came to {len(labels)} labels and "
                f"{len(scores)} scores; one of each a case is needed: look at predict, labels and collate"
            )


TaskFunction = Callable[[int, str | None], Task]
