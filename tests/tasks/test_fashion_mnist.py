"""``fashion-mnist``: the idx files, the split, and what is said when they are missing or damaged."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from training import evaluate, same_data, same_weights, train

from equipoise.errors import TaskError
from equipoise.tasks import fashion_mnist, resolve


def write(folder: Path, part: str, pictures: np.ndarray, labels: np.ndarray, *, packed: bool = True) -> None:
    for kind, values in (("images-idx3-ubyte", pictures), ("labels-idx1-ubyte", labels)):
        head = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape)
        raw = head + values.astype(np.uint8).tobytes()
        file = folder / f"{part}-{kind}{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(raw) if packed else raw)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small set in which the class is how bright the left half is."""
    draw = np.random.RandomState(0)
    for part, n in (("train", 400), ("t10k", 50)):
        labels = draw.randint(0, 10, n)
        pictures = draw.randint(0, 20, (n, 28, 28))
        pictures[:, :, :14] += labels[:, None, None] * 20
        write(tmp_path, part, pictures, labels, packed=part == "train")
    return tmp_path


def test_a_folder_of_idx_files_trains(folder: Path) -> None:
    task = resolve(f"fashion-mnist:{folder}")(0, None)
    again, other = resolve("fashion-mnist")(0, str(folder)), resolve("fashion-mnist")(1, str(folder))
    assert [len(split) for split in (task.train, task.val, task.test)] == [360, 40, 50]  # type: ignore[arg-type]
    assert same_weights(task, again)
    assert not same_weights(task, other)
    assert all(same_data(task, other, split) for split in ("train", "val", "test"))
    pictures, labels = task.train.get_batch(np.arange(5))  # type: ignore[attr-defined]
    assert pictures.dtype == torch.uint8
    assert pictures.shape == (5, 1, 28, 28)
    assert torch.equal(task.train[3][0], pictures[3])
    assert (pictures[:, 0, :, :14].float().mean((1, 2)) // 20).tolist() == labels.tolist()

    losses = train(task, 4)
    assert losses[-1] < losses[0]
    assert 0 <= evaluate(task, "test")["accuracy"] <= 1


def test_no_picture_is_in_two_splits(folder: Path) -> None:
    task = resolve(f"fashion-mnist:{folder}")(0, None)
    rows = [set(split._rows.tolist()) for split in (task.train, task.val)]  # type: ignore[attr-defined]
    assert not rows[0] & rows[1]
    assert rows[0] | rows[1] == set(range(400))


def test_missing_files_give_the_command_that_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in ("fashion-mnist", f"fashion-mnist:{tmp_path}"):
        monkeypatch.setattr(fashion_mnist, "_FOLDER", tmp_path / "nowhere")
        with pytest.raises(TaskError, match="apt-get install dataset-fashion-mnist") as caught:
            resolve(text)(0, None)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda raw: raw[:-100], "can't be read"),
        (lambda raw: b"not gzip", "can't be read"),
        (lambda raw: gzip.compress(gzip.decompress(raw)[:-5]), "is damaged"),
        (lambda raw: gzip.compress(b""), "is damaged"),
        (lambda raw: gzip.compress(b"\0\0\x0d\x03" + gzip.decompress(raw)[4:]), "is damaged"),
    ],
)
def test_damaged_files_are_named(folder: Path, damage: object, said: str) -> None:
    file = folder / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]
    with pytest.raises(TaskError, match=f"train-images-idx3-ubyte.* {said}.*get it again"):
        resolve(f"fashion-mnist:{folder}")(0, None)


def test_labels_out_of_range_and_too_few(folder: Path) -> None:
    write(folder, "t10k", np.zeros((3, 28, 28)), np.array([1, 12, 3]))
    with pytest.raises(TaskError, match="t10k: label 12 of case 1 is out of range"):
        resolve(f"fashion-mnist:{folder}")(0, None)
    write(folder, "t10k", np.zeros((3, 28, 28)), np.array([1, 2]))
    with pytest.raises(TaskError, match="t10k: 3 cases but 2 labels"):
        resolve(f"fashion-mnist:{folder}")(0, None)


@pytest.mark.fashion
def test_the_real_set() -> None:
    task = resolve("fashion-mnist")(0, None)
    assert [len(split) for split in (task.train, task.val, task.test)] == [55_000, 5000, 10_000]  # type: ignore[arg-type]
    pictures, labels = task.train.get_batch(np.arange(2000))  # type: ignore[attr-defined]
    assert torch.bincount(labels, minlength=10).min() > 150
    assert abs(pictures.float().mean() - task.model.mean) < 2  # type: ignore[operator]
    assert abs(pictures.float().std() - task.model.std) < 2  # type: ignore[operator]
    losses = train(task, 3)
    assert losses[0] < 4
