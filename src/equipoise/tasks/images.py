"""``images:PATH``: a ResNet on the user's own pictures.

Enters: a folder for each class, or a MedMNIST-style ``.npz``. Leaves: a Task judged by accuracy. Where:
``equipoise train images:PATH``. Source: the layout of torchvision's ``ImageFolder``; MedMNIST (Yang and
others, 2023).

A folder holds ``train/CLASS/*``, ``val/CLASS/*`` and ``test/CLASS/*``, or just ``CLASS/*``. What is missing
of val and test is taken from the rest, class by class, by the hash of the file's name: fixed, under every
seed. Pictures are decoded when they are asked for, in the feed's worker processes.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..errors import MissingExtra, TaskError
from ..task import Task
from ._checks import check_labels, check_paired
from ._common import accuracy, auc, cross_entropy, name_hash, seeded, warmup_cosine
from ._pictures import Pictures
from ._resnet import ResNet

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 64
"""Pictures of a folder are brought to this height and width, in pixels."""
_WIDTH = 32
_SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
_SHARE = 0.15
"""Of each class, to val and to test, where the folder doesn't say."""
_Files = list[tuple[Path, int]]
_Splits = dict[str, Pictures] | dict[str, "PictureFiles"]


def task(seed: int, data: str | None) -> Task:
    """A ResNet of width 32 on the pictures under ``data``.

    Raises:
        TaskError: no pictures, a class without enough of them, an ``.npz`` that can't be used.
        MissingExtra: the pictures are files, and Pillow is not installed.
    """
    path = Path(data or "")
    splits, classes, (channels, *sides) = _from_npz(path) if path.suffix == ".npz" else _from_folder(path)
    train = splits["train"]
    # A byte's middle and a usual spread: a pass over all pictures would cost more than exact values bring.
    stride = 2 if min(sides) >= 16 else 1  # tiny pictures would shrink to one pixel
    model = seeded(
        seed, lambda: ResNet(channels, classes, width=_WIDTH, mean=127.5, std=64.0, stem_stride=stride)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    batch_size = 64
    steps = max(200, min(2000, 10 * len(train) // batch_size))
    return Task(
        name="images",
        about=f"ResNet of width {_WIDTH} on {path.name} ({classes} classes, {len(train)} training pictures)",
        model=model,
        optimizer=optimizer,
        lr_scheduler=warmup_cosine(optimizer, steps, floor=0.0),
        train=train,
        val=splits["val"],
        test=splits["test"],
        loss=cross_entropy,
        metric=accuracy,
        metric_name="accuracy",
        margin=0.01,
        batch_size=batch_size,
        steps=steps,
        eval_every=max(steps // 10, 1),
        extra_metrics={"AUC": auc} if classes == 2 else None,
    )


class PictureFiles(Dataset[tuple[Tensor, int]]):
    """Pictures decoded from files: bytes (3, SIZE, SIZE) and a class.

    In training a random box of four fifths to all of the picture's area is taken, else the largest square
    in its middle.
    """

    def __init__(self, files: _Files, *, training: bool) -> None:
        self.files, self._training = files, training

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file, label = self.files[index]
        pillow = _pillow()
        try:
            with pillow.open(file) as opened:
                opened.draft("RGB", (SIZE, SIZE))  # a JPEG is decoded at a fraction of its size
                picture = opened.convert("RGB")
            small = picture.resize((SIZE, SIZE), pillow.Resampling.BILINEAR, box=self._box(picture))
        except Exception as error:  # Pillow's decoders raise a dozen types
            raise TaskError(
                f"{file} is not a picture that Pillow can read ({error}); mend it or take it away"
            ) from error
        return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous(), label

    def _box(self, picture: "Image") -> tuple[float, float, float, float]:
        side = float(min(picture.size))
        if self._training:
            side *= random.uniform(0.8, 1.0) ** 0.5
            left, top = (random.uniform(0, full - side) for full in picture.size)
        else:
            left, top = ((full - side) / 2 for full in picture.size)
        return left, top, left + side, top + side


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingExtra("reading picture files needs Pillow: pip install 'equipoise[images]'") from error
    return Image


def _from_folder(root: Path) -> tuple[_Splits, int, tuple[int, ...]]:
    if not root.is_dir():
        raise TaskError(
            f"task 'images': there is no folder or .npz file {root}; give one with a folder for each class"
        )
    _pillow()
    parts = {name: root / name for name in ("train", "val", "test") if (root / name).is_dir()}
    if "train" not in parts:
        parts = {"train": root}
    classes = _subfolders(parts["train"])
    if len(classes) < 2:
        raise TaskError(
            f"task 'images': {parts['train']} holds {len(classes)} class folders; at least two are needed, "
            "each with the pictures of one class"
        )
    found = {name: _pictures(folder, classes) for name, folder in parts.items()}
    for name in ("test", "val"):
        if name not in found:
            found["train"], found[name] = _take(found["train"], classes)
    splits = {name: PictureFiles(files, training=name == "train") for name, files in found.items()}
    return splits, len(classes), (3, SIZE, SIZE)


def _subfolders(folder: Path) -> list[str]:
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")
    )


def _pictures(folder: Path, classes: list[str]) -> _Files:
    unknown = sorted(set(_subfolders(folder)) - set(classes))
    if unknown:
        raise TaskError(
            f"task 'images': {folder} has the class {unknown[0]!r}, train has only {', '.join(classes)}"
        )
    files = [
        (file, label)
        for label, name in enumerate(classes)
        for file in sorted((folder / name).rglob("*"))
        if file.suffix.lower() in _SUFFIXES and file.is_file()
    ]
    if not files:
        raise TaskError(
            f"task 'images': {folder} holds no picture in the folders {', '.join(classes)}; "
            f"files ending in {', '.join(sorted(_SUFFIXES))} count"
        )
    return files


def _take(files: _Files, classes: list[str]) -> tuple[_Files, _Files]:
    """What stays, and the share of each class that is taken away."""
    stays: _Files = []
    taken: _Files = []
    for label, name in enumerate(classes):
        mine = sorted(
            (entry for entry in files if entry[1] == label),
            key=lambda entry: (name_hash(entry[0].name), entry[0]),
        )
        count = max(round(len(mine) * _SHARE), 1)
        if count >= len(mine):
            raise TaskError(
                f"task 'images': class {name!r} has too few pictures to split; at least 3 are needed: "
                "add pictures, or take the folder away"
            )
        taken += mine[:count]
        stays += mine[count:]
    return stays, taken


def _from_npz(file: Path) -> tuple[_Splits, int, tuple[int, ...]]:
    try:
        with np.load(file, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise TaskError(f"task 'images': there is no file {file}") from None
    except Exception as error:  # a zip that isn't one, a pickle inside, a short read
        raise TaskError(f"task 'images': {file} is not an .npz of plain arrays ({error})") from error
    wanted = [f"{split}_{what}" for split in ("train", "val", "test") for what in ("images", "labels")]
    missing = [key for key in wanted if key not in arrays]
    if missing:
        raise TaskError(
            f"task 'images': {file} lacks {', '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}, "
            f"and needs {', '.join(wanted)}"
        )
    splits = {}
    classes = 0
    for split in ("train", "val", "test"):
        where = f"task 'images', {split}"
        pictures = _as_bytes(where, arrays[f"{split}_images"])
        labels = _as_classes(where, arrays[f"{split}_labels"])
        check_paired(where, pictures, labels)
        classes = classes or int(labels.max()) + 1
        check_labels(where, labels, classes, two=split == "train")
        splits[split] = Pictures(pictures, labels)
    shapes = {split: tuple(data[0][0].shape) for split, data in splits.items()}
    if len({shape[0] for shape in shapes.values()}) > 1:
        raise TaskError(f"task 'images': the splits of {file} differ in colours: {shapes}")
    return splits, classes, shapes["train"]


def _as_bytes(where: str, pictures: np.ndarray) -> Tensor:
    """(N, H, W) or (N, H, W, C) bytes to (N, C, H, W)."""
    if (
        pictures.dtype != np.uint8
        or pictures.ndim not in (3, 4)
        or (pictures.ndim == 4 and pictures.shape[3] not in (1, 3))
    ):
        raise TaskError(
            f"{where}: pictures are {pictures.dtype} of shape {pictures.shape}; uint8 of (N, height, width) "
            "or (N, height, width, 1 or 3) can be read"
        )
    tensor = torch.from_numpy(pictures)
    return tensor.unsqueeze(1) if tensor.dim() == 3 else tensor.permute(0, 3, 1, 2).contiguous()


def _as_classes(where: str, labels: np.ndarray) -> Tensor:
    """(N,) or (N, 1) whole numbers to (N,) int64."""
    if (
        labels.dtype.kind not in "iu"
        or labels.ndim not in (1, 2)
        or (labels.ndim == 2 and labels.shape[1] != 1)
    ):
        raise TaskError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; one whole number a picture can "
            "be read, (N,) or (N, 1); several labels a picture can't"
        )
    return torch.from_numpy(labels.reshape(-1).astype(np.int64))
