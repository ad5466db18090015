"""``breast-cancer``: a small MLP on the Wisconsin set that scikit-learn brings.

Enters: 569 cases of 30 numbers. Leaves: a Task judged by the area under the ROC curve. Where: ``equipoise
train breast-cancer``. Source: Wolberg and others, 1995 (UCI), as packaged by scikit-learn.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ..task import Task
from ._common import auc, seeded, sensitivity_at, stratified, warmup_cosine

_WIDTH = 64


def task(seed: int, data: str | None) -> Task:
    """An MLP of 64 wide; label 1 is malignant, so that sensitivity means finding the disease."""
    splits = _splits()
    model = seeded(seed, _mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    steps = 400
    return Task(
        name="breast-cancer",
        about="MLP of 64 wide on scikit-learn's Wisconsin breast cancer set (569 cases)",
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps),
        train=splits["train"],
        val=splits["val"],
        test=splits["test"],
        loss=_loss,
        predict=_probability,
        labels=_malignant,
        metric=auc,
        metric_name="AUC",
        margin=0.01,
        batch_size=32,
        eval_batch_size=256,
        steps=steps,
        eval_every=50,
        extra_metrics={"sensitivity at 95 % specificity": sensitivity_at(0.95)},
    )


def _mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(30, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1)
    )


def _loss(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).float().squeeze(1), batch[1])


def _probability(model: nn.Module, batch: Any) -> Tensor:
    return model(batch[0]).float().squeeze(1).sigmoid()  # type: ignore[no-any-return]


def _malignant(batch: Any) -> Tensor:
    return batch[1].long()  # type: ignore[no-any-return]


def _splits() -> dict[str, TensorDataset]:
    """Three splits with like shares of both classes, standardised as train is."""
    from sklearn.datasets import load_breast_cancer

    values, benign = load_breast_cancer(return_X_y=True)
    labels = 1 - benign
    rows = stratified(labels)
    values = (values - values[rows["train"]].mean(0)) / values[rows["train"]].std(0)
    x, y = torch.from_numpy(values).float(), torch.from_numpy(labels).float()
    return {split: TensorDataset(x[chosen], y[chosen]) for split, chosen in rows.items()}
