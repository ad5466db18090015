"""A CNN that segments, trained by the soft Dice loss: FP16's sum over the pixels of a batch is infinite.

64 pictures of 64x64 are 262,144 pixels, FP16's largest number is 65,504. Autocast on a CPU leaves ``sum``
in half, so the loss is 1 whatever the model says, its gradient is 0, and nothing is learned or reported. (On
CUDA ``sum`` is on autocast's FP32 list.) Source of the loss: V-Net (Milletari and others, 2016).

    equipoise compare bench/fp16/dice.py:task --precision fp16 --emulate --with-autocast --repeats 5
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from equipoise import Task

SIZE = 64
NOISE = 0.5


def task(seed: int, data: str | None) -> Task:
    """Find the ink in scikit-learn's digits, enlarged to 64x64 and under noise."""
    from sklearn.datasets import load_digits

    images = torch.from_numpy(load_digits().images).float().unsqueeze(1) / 16
    clean = F.interpolate(images, size=(SIZE, SIZE), mode="bilinear")
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    pictures, ink = clean + NOISE * noise, (clean > 0.5).float()
    parts = {"train": slice(0, 1200), "val": slice(1200, 1400), "test": slice(1400, None)}
    splits: Any = {name: TensorDataset(pictures[rows], ink[rows]) for name, rows in parts.items()}
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1, dilation=1), nn.ReLU(),
        nn.Conv2d(16, 1, 3, padding=1),
    )  # fmt: skip
    return Task(
        name="dice",
        about="CNN that segments noisy digits, soft Dice loss over the batch",
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        **splits,
        loss=lambda model, batch: 1 - dice(torch.sigmoid(model(batch[0])), batch[1]),
        predict=dice_of_each,
        labels=lambda batch: torch.ones(len(batch[1])),
        metric=lambda labels, scores: float(np.mean(scores)),
        metric_name="Dice",
        margin=0.01,
        batch_size=64,
        eval_batch_size=100,
        steps=80,
        eval_every=40,
    )


def dice(found: Tensor, ink: Tensor) -> Tensor:
    """Soft Dice of a whole batch, as it is written everywhere: (B, 1, H, W) twice -> 0-d."""
    return (2 * (found * ink).sum() + 1) / (found.sum() + ink.sum() + 1)


def dice_of_each(model: nn.Module, batch: Any) -> Tensor:
    """Dice of each picture at a threshold of one half, (B,)."""
    found, ink = (model(batch[0]).float() > 0).float().flatten(1), batch[1].flatten(1)
    return (2 * (found * ink).sum(1) + 1) / (found.sum(1) + ink.sum(1) + 1)
