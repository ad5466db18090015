"""A Task refuses what can't be trained or judged."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from equipoise.errors import TaskError
from equipoise.task import Task


def make(**changes: Any) -> Task:
    model = nn.Linear(2, 3)
    data = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    parts: dict[str, Any] = {
        "name": "t", "model": model, "optimizer": torch.optim.SGD(model.parameters()),
        "train": data, "val": data, "test": data,
        "loss": lambda model, batch: model(batch[0]).sum(), "metric": lambda labels, scores: 0.0,
        "metric_name": "m",
    }  # fmt: skip
    return Task(**parts | changes)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_an_empty_split(split: str) -> None:
    with pytest.raises(TaskError, match=f"the {split} split is empty"):
        make(**{split: TensorDataset(torch.ones(0, 2))})


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("batch_size", 0),
        ("steps", 0),
        ("eval_every", -1),
        ("margin", -0.1),
        ("margin", float("nan")),
        ("batch_size", 2.5),
        ("eval_batch_size", 0),
        ("steps", "5"),
        ("margin", "1%"),
        ("subgroup", {"test": ["a"]}),
        ("subgroup", {"tset": ["a"] * 4}),
        ("group", ["a"]),
        ("val", iter([])),
    ],
)
def test_what_cannot_be(what: str, value: Any) -> None:
    with pytest.raises(TaskError, match=what):
        make(**{what: value})


def test_a_group_in_two_splits() -> None:
    apart = {"train": ["a", "a", "b", "b"], "val": ["c"] * 4, "test": ["d"] * 4}
    assert make(group=apart).group == apart
    with pytest.raises(TaskError, match="group 'a' is in train and in test"):
        make(group=apart | {"test": ["d", "d", "a", "d"]})
    with pytest.raises(TaskError, match=r"group\['val'\] names 1 cases, the split has 4"):
        make(group=apart | {"val": ["c"]})


def test_scores_and_labels_are_what_a_metric_can_read() -> None:
    task = make()
    batch = (torch.ones(2, 2), torch.tensor([1, 2]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = task.scores_of(batch)
    assert scores.dtype == torch.float32
    assert scores.shape == (2, 3)
    assert task.labels_of(batch).tolist() == [1, 2]
    other = make(predict=lambda model, batch: batch[1] * 2, labels=lambda batch: batch[1] + 1)
    assert other.scores_of(batch).tolist() == [2.0, 4.0]
    assert other.labels_of(batch).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"predict": lambda model, batch: batch[1].tolist()}, "predict gives a list for a batch"),
        ({"predict": lambda model, batch: batch[0].mean()}, "predict gives one number for a batch"),
        ({"labels": lambda batch: batch[1].tolist()}, "labels gives a list for a batch"),
    ],
)
def test_scores_and_labels_that_are_no_rows_of_a_tensor(changes: dict[str, Any], says: str) -> None:
    task, batch = make(**changes), (torch.ones(2, 2), torch.tensor([1, 2]))
    with pytest.raises(TaskError, match=says):
        task.labels_of(batch), task.scores_of(batch)
    with pytest.raises(TaskError, match="val has 4 cases, and came to 4 labels and 1 scores"):
        task.check_judged("val", np.zeros(4), np.zeros((1, 2)))
