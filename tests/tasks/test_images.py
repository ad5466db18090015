"""``images:PATH``: folders and archives of pictures, good and bad."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import evaluate, same_weights, train

from equipoise.errors import MissingExtra, TaskError
from equipoise.step.feed import Feed
from equipoise.tasks import resolve


def paint(folder: Path, colour: int, count: int, *, first: int = 0, size: tuple[int, int] = (50, 40)) -> None:
    image = pytest.importorskip("PIL.Image")
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        pixels = np.random.RandomState(number).randint(0, 60, (size[1], size[0], 3), dtype=np.uint8)
        pixels[..., colour] += 150
        image.fromarray(pixels).save(folder / f"{number}.{('png', 'jpg', 'JPEG')[number % 3]}")


def archive(file: Path, **changes: Any) -> Path:
    draw = np.random.RandomState(0)
    arrays: dict[str, Any] = {}
    for split, n in (("train", 40), ("val", 12), ("test", 12)):
        labels = np.arange(n).reshape(-1, 1) % 2
        pictures = draw.randint(0, 50, (n, 28, 28, 3)) + labels[..., None, None] * 150
        arrays |= {f"{split}_images": pictures.astype(np.uint8), f"{split}_labels": labels.astype(np.uint8)}
    arrays |= changes
    np.savez(file, **{key: value for key, value in arrays.items() if value is not None})
    return file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paint(tmp_path / "cat", 0, 20)
    paint(tmp_path / "dog", 2, 20, first=100)
    (tmp_path / "cat" / "notes.txt").write_text("no picture")
    return tmp_path


@pytest.mark.extra("PIL")
def test_a_folder_for_each_class_is_split_class_by_class(folder: Path) -> None:
    task, other = resolve(f"images:{folder}")(0, None), resolve("images")(1, str(folder))
    splits = {split: getattr(task, split).files for split in ("train", "val", "test")}
    assert {split: len(files) for split, files in splits.items()} == {"train": 28, "val": 6, "test": 6}
    every = [file for files in splits.values() for file, _ in files]
    assert len(set(every)) == 40
    assert all(label == (file.parent.name == "dog") for files in splits.values() for file, label in files)
    assert all(sum(label for _, label in files) * 2 == len(files) for files in splits.values())
    assert splits == {split: getattr(other, split).files for split in splits}
    assert not same_weights(task, other)
    assert "2 classes" in task.about


@pytest.mark.extra("PIL")
def test_pictures_are_decoded_in_workers_and_train(folder: Path) -> None:
    task = resolve(f"images:{folder}")(0, None)
    task.batch_size = 14
    train(task, 6, workers=2)
    assert evaluate(task, "val", workers=2) == evaluate(task, "val")
    one = next(Feed(task.train, batch_size=8, seed=0).batches(9))
    two = next(Feed(task.train, batch_size=8, seed=0, workers=2).batches(9))
    later = next(Feed(task.train, batch_size=28, seed=0).batches(1))
    assert torch.equal(one[0], two[0])
    assert one[0].shape == (8, 3, 64, 64)
    assert one[0].dtype == torch.uint8
    assert not torch.equal(
        later[0].sum(0), next(Feed(task.train, batch_size=28, seed=0).batches(2))[0].sum(0)
    )


@pytest.mark.extra("PIL")
def test_ready_made_splits_are_kept(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 3)):
        paint(tmp_path / split / "cat", 0, count)
        paint(tmp_path / split / "dog", 1, count)
    task = resolve(f"images:{tmp_path}")(0, None)
    assert [len(split) for split in (task.train, task.val, task.test)] == [14, 2, 6]  # type: ignore[arg-type]
    assert all("test" in file.parts for file, _ in task.test.files)  # type: ignore[attr-defined]
    assert all("train" in file.parts for file, _ in task.val.files)  # type: ignore[attr-defined]
    paint(tmp_path / "test" / "cow", 1, 1)
    with pytest.raises(TaskError, match=r"has the class 'cow', train has only cat, dog"):
        resolve(f"images:{tmp_path}")(0, None)


@pytest.mark.extra("PIL")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_picture_is_named(folder: Path, workers: int) -> None:
    task = resolve(f"images:{folder}")(0, None)
    broken = task.val.files[1][0]  # type: ignore[attr-defined]
    broken.write_bytes(broken.read_bytes()[:300])
    with pytest.raises(TaskError, match=rf"{broken.name} is not a picture that Pillow can read"):
        evaluate(task, "val", workers=workers)


@pytest.mark.extra("PIL")
def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="there is no folder or"):
        resolve(f"images:{tmp_path / 'none'}")(0, None)
    paint(tmp_path / "cat", 0, 4)
    with pytest.raises(TaskError, match="holds 1 class folders; at least two are needed"):
        resolve(f"images:{tmp_path}")(0, None)
    paint(tmp_path / "dog", 0, 2)
    with pytest.raises(TaskError, match="class 'dog' has too few pictures"):
        resolve(f"images:{tmp_path}")(0, None)
    for file in [*tmp_path.glob("*/*.*")]:
        file.unlink()
    with pytest.raises(TaskError, match=r"holds no picture in the folders cat, dog; files ending in \.bmp"):
        resolve(f"images:{tmp_path}")(0, None)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cat").mkdir()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"pip install 'equipoise\[images\]'"):
        resolve(f"images:{tmp_path}")(0, None)
    assert len(resolve(f"images:{archive(tmp_path / 'a.npz')}")(0, None).train) == 40  # type: ignore[arg-type]


def test_an_archive_trains(tmp_path: Path) -> None:
    task = resolve(f"images:{archive(tmp_path / 'a.npz')}")(0, None)
    losses = train(task, 12)
    assert losses[-1] < losses[0]
    assert set(evaluate(task, "test")) == {"accuracy", "AUC"}
    grey = {f"{split}_images": np.zeros((4, 8, 8), np.uint8) for split in ("train", "val", "test")}
    labels = {f"{split}_labels": np.array([0, 1, 2, 0]) for split in ("train", "val", "test")}
    task = resolve(f"images:{archive(tmp_path / 'b.npz', **grey, **labels)}")(0, None)
    assert task.train[0][0].shape == (1, 8, 8)
    assert task.extra_metrics is None
    assert task.model(task.train[0][0][None]).shape == (1, 3)  # in training: a last batch may be of one


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"val_images": None}, "lacks val_images; it holds train_images"),
        ({"train_images": np.zeros((40, 28, 28))}, r"float64 of shape \(40, 28, 28\); uint8"),
        ({"train_images": np.zeros((40, 28, 28, 2), np.uint8)}, "1 or 3"),
        ({"train_labels": np.zeros((40, 14), np.int64)}, r"shape \(40, 14\); one whole number a picture"),
        ({"train_labels": np.full(40, 1.5)}, "one whole number a picture"),
        ({"train_labels": np.zeros((40, 1), np.int64)}, "all 40 cases are of class 0"),
        ({"train_labels": np.arange(40) - 1}, "label -1 of case 0 is out of range"),
        ({"val_labels": np.full((12, 1), 2)}, "val: label 2 of case 0 is out of range; with 2 classes"),
        ({"test_labels": np.zeros((11, 1), np.int64)}, "test: 12 cases but 11 labels"),
        ({"test_images": np.zeros((0, 28, 28, 3), np.uint8)}, "test: the data set is empty"),
        ({"test_images": np.zeros((12, 28, 28), np.uint8)}, "differ in colours"),
        ({"train_images": np.array([{}] * 40)}, "is not an .npz of plain arrays"),
    ],
)
def test_archives_that_cannot_be_used(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        resolve(f"images:{archive(tmp_path / 'a.npz', **changes)}")(0, None)


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_text("hello")
    with pytest.raises(TaskError, match=r"a.npz is not an .npz of plain arrays"):
        resolve(f"images:{tmp_path / 'a.npz'}")(0, None)
    with pytest.raises(TaskError, match="there is no file"):
        resolve(f"images:{tmp_path / 'b.npz'}")(0, None)
