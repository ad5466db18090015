"""Data that can't be trained on are refused before the first step, with the first bad case named."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Subset, TensorDataset

from equipoise.errors import TaskError
from equipoise.task import Task
from equipoise.tasks._checks import check_finite, check_labels, check_paired, check_task
from equipoise.tasks._common import auc, sensitivity_at, warmup_cosine


def task(x: Any = None, y: Any = None, **changes: Any) -> Task:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 3))
    data = TensorDataset(
        torch.ones(4, 2) if x is None else torch.tensor(x), torch.tensor([0, 1, 2, 0] if y is None else y)
    )
    good = TensorDataset(torch.ones(2, 2), torch.tensor([0, 1]))
    parts: dict[str, Any] = {
        "name": "t", "model": model, "optimizer": torch.optim.SGD(model.parameters()),
        "train": data, "val": good, "test": good,
        "loss": lambda model, batch: model(batch[0]).sum(), "metric": lambda labels, scores: 0.0,
        "metric_name": "m",
    }  # fmt: skip
    return Task(**parts | changes)


def test_good_data_pass_and_leave_model_and_generator_alone() -> None:
    made = task()
    before, weights = torch.get_rng_state(), {k: v.clone() for k, v in made.model.state_dict().items()}
    frozen = made.model[0].eval()  # type: ignore[index]
    assert check_task(made) is made
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weights[key], value) for key, value in made.model.state_dict().items())
    assert [m.training for m in made.model.modules()] == [True, False, True, True]
    assert not frozen.training


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_named_by_their_case(bad: float) -> None:
    x = [[0.0, 1.0], [1.0, 1.0], [bad, 1.0], [1.0, bad]]
    with pytest.raises(TaskError, match=r"task 't', train: 2 of 4 cases have NaN .* first case 2"):
        check_task(task(x))


def test_numbers_that_overflow_a_sum_are_still_numbers() -> None:
    check_finite("here", torch.full((4, 2), 1.7e308, dtype=torch.float64), "x")


@pytest.mark.parametrize("label", [3, -1, 255])
def test_labels_the_model_has_no_output_for(label: int) -> None:
    with pytest.raises(TaskError, match=rf"label {label} of case 1 is out of range; .* 0 to 2"):
        check_task(task(y=[0, label, 1, 2]))


def test_labels_are_checked_in_every_split_and_under_a_subset() -> None:
    bad = Subset(TensorDataset(torch.ones(3, 2), torch.tensor([0, 1, 9])), [0, 2])
    with pytest.raises(TaskError, match=r"task 't', val: label 9 of case 1"):
        check_task(task(val=bad))
    check_task(task(val=Subset(bad.dataset, [0, 1])))


def test_the_label_that_losses_ignore_is_no_mistake() -> None:
    check_task(task(y=[0, -100, 1, 2]))


def test_one_class_only() -> None:
    with pytest.raises(TaskError, match="all 4 cases are of class 1; at least two classes are needed"):
        check_task(task(y=[1, 1, 1, 1]))


def test_what_is_no_label_is_left_alone() -> None:
    check_task(task(y=[7.0, 7.0, 7.0, -3.0]))  # regression
    check_task(task(y=[[7], [7], [8], [9]]))  # counts
    check_task(task(y=[0, 0, 9, 9], labels=lambda batch: batch[1] // 9))


def test_labels_without_a_model_to_ask_and_pairs() -> None:
    check_labels("here", torch.tensor([0, 0]), 1, two=False)
    with pytest.raises(TaskError, match="here: the data set is empty"):
        check_paired("here", [], [])
    with pytest.raises(TaskError, match="here: 2 cases but 3 labels"):
        check_paired("here", [1, 2], [1, 2, 3])


def test_auc_and_sensitivity_on_numbers_done_by_hand() -> None:
    labels = np.array([0] * 20 + [1] * 4)
    scores = np.array([*np.linspace(0, 0.95, 20), 0.97, 0.92, 0.5, 0.1], dtype=np.float32)
    # One of 20 negatives may clear the threshold (0.95 does): 0.97 is found, and 0.92.
    assert sensitivity_at(0.95)(labels, scores) == 0.5
    assert sensitivity_at(1.0)(labels, scores) == 0.25
    wins = sum((p > n) + 0.5 * (p == n) for p in scores[20:] for n in scores[:20])
    assert auc(labels, scores) == pytest.approx(wins / 80)
    assert auc(labels, np.stack([-scores, scores], 1)) == pytest.approx(wins / 80)


def test_the_schedule_of_one_step() -> None:
    made = task()
    assert warmup_cosine(made.optimizer, 1).get_last_lr() == [pytest.approx(1e-3)]
    assert replace(made).name == "t"
