"""``fashion-mnist``: a ResNet on pictures of clothes.

Enters: the four gzipped idx files of Fashion-MNIST. Leaves: a Task judged by accuracy. Where: ``equipoise
train fashion-mnist``. Source: Xiao and others, 2017 (MIT licence); the idx format as LeCun describes it for
MNIST.
"""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import torch

from ..errors import TaskError
from ..step.feed import epoch_order
from ..task import Task
from ._checks import check_labels, check_paired
from ._common import accuracy, cross_entropy, seeded, warmup_cosine
from ._pictures import Pictures
from ._resnet import ResNet

_FOLDER = Path("/usr/share/datasets/fashion-mnist")
_GET = "`apt-get install dataset-fashion-mnist` gets it on Debian and Ubuntu"
WIDTH = 64
_VAL = 5000
_SPLIT_SEED = 0
_MEAN, _STD = 72.9, 90.0
"""Of the training pictures, on the scale of a byte."""


def task(seed: int, data: str | None) -> Task:
    """A ResNet of width 64 (three stages of 64, 128 and 256 channels).

    Raises:
        TaskError: the files are missing or damaged.
    """
    folder = Path(data) if data else _FOLDER
    train_x, train_y = _read(folder, "train")
    test_x, test_y = _read(folder, "t10k")
    order = epoch_order(len(train_y), _SPLIT_SEED, 0)
    val = min(_VAL, len(order) // 10)
    if val == 0:
        raise TaskError(f"task 'fashion-mnist': {folder} holds {len(order)} training pictures; 10 are needed")
    model = seeded(seed, lambda: ResNet(1, 10, width=WIDTH, mean=_MEAN, std=_STD))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = 1300
    return Task(
        name="fashion-mnist",
        about=f"ResNet of width {WIDTH} on Fashion-MNIST (60,000 + 10,000 pictures of 28x28)",
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps, floor=0.0),
        train=Pictures(train_x, train_y, order[:-val]),
        val=Pictures(train_x, train_y, order[-val:]),
        test=Pictures(test_x, test_y),
        loss=cross_entropy,
        metric=accuracy,
        metric_name="accuracy",
        margin=0.01,
        batch_size=128,
        eval_batch_size=500,
        steps=steps,
        eval_every=260,
    )


def _read(folder: Path, part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures (N, 1, 28, 28) uint8 and labels (N,) int64 of one part."""
    where = f"task 'fashion-mnist', {part}"
    pictures = torch.from_numpy(_idx(folder / f"{part}-images-idx3-ubyte", dims=3)).unsqueeze(1)
    labels = torch.from_numpy(_idx(folder / f"{part}-labels-idx1-ubyte", dims=1)).long()
    check_paired(where, pictures, labels)
    check_labels(where, labels, 10)
    return pictures, labels


def _idx(file: Path, *, dims: int) -> np.ndarray:
    """An idx file of bytes, gzipped (``.gz``) or not."""
    packed = file.with_name(file.name + ".gz")
    try:
        raw = gzip.decompress(packed.read_bytes()) if packed.is_file() else file.read_bytes()
    except FileNotFoundError:
        raise TaskError(
            f"Fashion-MNIST is not here ({packed} is missing): {_GET}; "
            "or give the folder of its four idx files as fashion-mnist:PATH"
        ) from None
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(
            f"{packed if packed.is_file() else file} can't be read: {error}; get it again: {_GET}"
        ) from error
    # Big-endian: two zero bytes, the type (8: bytes), the number of dimensions, then each dimension.
    head = 4 + 4 * dims
    shape = struct.unpack(f">{dims}I", raw[4:head]) if len(raw) >= head else ()
    if raw[:4] != bytes([0, 0, 8, dims]) or len(raw) != head + int(np.prod(shape, dtype=np.int64)):
        raise TaskError(
            f"{file.name} is damaged or no idx file of {dims} dimensions of bytes; get it again: {_GET}"
        )
    return np.frombuffer(bytearray(raw), dtype=np.uint8, offset=head).reshape(shape)
