"""``equipoise init-task [FILE]``: a commented example of a task of one's own, ready to train.

Enters: a file name that is still free. Leaves: the file, and the command that trains it. Where: before
everything else; no torch.
"""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import TaskError

EXAMPLE = '''\
"""A training task for Equipoise.

Train it:                 equipoise train {file}:task
Is the faster as good?    equipoise compare {file}:task --repeats 3

It runs as it stands. Put your own data, model, loss and metric in their places.
"""

from itertools import pairwise

import torch
from sklearn.datasets import load_wine
from sklearn.metrics import accuracy_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import equipoise as eq


def task(seed: int, data: str | None) -> eq.Task:
    """What is trained. ``data`` is what --data says, or None.

    The same seed and data must give the same model and the same splits: then runs can
    be repeated, and FP32 and the plan start alike. So seed before the model is made,
    and split under a fixed seed.
    """
    # 1. DATA: three map-style data sets (anything with __len__ and __getitem__).
    #    Choices during training see val only; test is read once, at the end.
    #    TensorDataset is fast; decode pictures in a __getitem__ of your own.
    train, val, test = splits()

    # 2. MODEL and OPTIMIZER, as in any PyTorch script, in FP32.
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)

    steps = 200
    return eq.Task(
        name="wine",
        model=model,
        optimizer=optimizer,
        # Advanced after each step that was taken; without it the rate is constant.
        lr_scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        train=train,
        val=val,
        test=test,
        loss=loss,
        metric=metric,
        metric_name="accuracy",
        higher_is_better=True,
        # The largest loss of the metric that still counts as "not worse", in its own
        # units. It belongs to your problem, and is written down before training.
        # Without it `compare` gives an interval and no verdict.
        margin=0.02,
        batch_size=16,
        steps=steps,  # the length of a run
        eval_every=50,  # steps between two looks at val
        # What else there is:
        # max_grad_norm=1.0                              to clip the gradients
        # predict=lambda model, batch: model(batch[0])   scores; this is the default
        # labels=lambda batch: batch[1]                  labels; this is the default
        # collate=my_collate                             makes a batch of samples
        # group={{"train": [...], "val": [...], "test": [...]}}   whose case each is: no
        #     patient may be in two splits
    )


def splits() -> list[TensorDataset]:
    """Train, val and test: 60, 20 and 20 % of the cases, the same under every seed."""
    values, labels = load_wine(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(values).float()[order], torch.tensor(labels)[order]
    cuts = [0, len(y) * 6 // 10, len(y) * 8 // 10, len(y)]
    seen = x[: cuts[1]]  # val and test must not leak into the statistics
    x = (x - seen.mean(0)) / seen.std(0)
    return [TensorDataset(x[a:b], y[a:b]) for a, b in pairwise(cuts)]


def loss(model: nn.Module, batch) -> torch.Tensor:
    """One number for a batch; called under Equipoise's autocast."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def metric(labels, scores) -> float:
    """One number for all cases: labels (N,), scores (N, classes), both NumPy arrays."""
    return float(accuracy_score(labels, scores.argmax(1)))
'''


def init_task(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("my_task.py"),
) -> None:
    """Write a commented example of a task of your own."""
    if file.suffix != ".py":
        raise TaskError(f"{file} must end in .py to be imported as a task; write {file}.py")
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(EXAMPLE.format(file=file.as_posix()))
    except FileExistsError:
        raise TaskError(f"{file} exists and is left as it is; give another name") from None
    except FileNotFoundError:
        raise TaskError(f"there is no folder {file.parent}; make it, or write the file elsewhere") from None
    typer.echo(f"wrote {file}; train it with: equipoise train {file}:task")
