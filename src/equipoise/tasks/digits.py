"""``digits``: a small CNN on the 8x8 digits that scikit-learn brings.

Enters: 1,797 images of 8x8 grey values from 0 to 16. Leaves: a Task judged by accuracy. Where: ``equipoise
train digits``. Source: Alpaydin and Kaynak, 1998 (UCI), the test half, as packaged by scikit-learn.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ..task import Task
from ._common import accuracy, cross_entropy, seeded, stratified, warmup_cosine


def task(seed: int, data: str | None) -> Task:
    """A CNN of two convolutions and two linear layers."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    rows = stratified(labels)
    # Grey values are 0 to 16.
    x, y = torch.from_numpy(images / 16).float().view(-1, 1, 8, 8), torch.from_numpy(labels)
    model = seeded(seed, _cnn)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    steps = 400
    return Task(
        name="digits",
        about="CNN on scikit-learn's 8x8 digits (1,797 images)",
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps),
        train=TensorDataset(x[rows["train"]], y[rows["train"]]),
        val=TensorDataset(x[rows["val"]], y[rows["val"]]),
        test=TensorDataset(x[rows["test"]], y[rows["test"]]),
        loss=cross_entropy,
        metric=accuracy,
        metric_name="accuracy",
        margin=0.01,
        batch_size=64,
        eval_batch_size=512,
        steps=steps,
        eval_every=50,
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip
