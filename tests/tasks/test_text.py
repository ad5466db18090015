"""``text``: the split by file, the windows, the model, bits per byte."""

import math
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from training import same_weights, train

from equipoise.errors import TaskError
from equipoise.tasks import resolve
from equipoise.tasks.text import GPT, WINDOW, mean_bits


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small files, and things that are not text."""
    for number in range(40):
        file = tmp_path / f"part{number % 3}" / f"file{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes([65 + number % 26]) * (2 * WINDOW + 40))
    (tmp_path / ".hidden").write_text("x" * 1000)
    (tmp_path / "picture.bin").write_bytes(b"\0" * 1000)
    return tmp_path


def test_the_library_is_split_by_file_and_always_alike() -> None:
    task, other = resolve("text")(0, None), resolve("text")(1, None)
    assert task.group is not None
    assert task.group == other.group
    assert {split: len(set(files)) > 20 for split, files in task.group.items()} == {
        "train": True, "val": True, "test": True,
    }  # fmt: skip
    every = {file for files in task.group.values() for file in files}
    assert not any(part in file.split("/") for file in every for part in ("test", "tests", "site-packages"))
    assert len(task.train) > 20_000
    assert (len(task.val), len(task.test)) == (128, 256)
    assert (task.margin, task.margin_relative, task.higher_is_better) == (0.01, True, False)
    assert task.max_grad_norm == 1.0

    x, y = task.val[5]
    text = (Path(sysconfig.get_path("stdlib")) / task.group["val"][5]).read_bytes()
    assert bytes([*x.tolist(), int(y[-1])]) in text
    assert torch.equal(x[1:], y[:-1])

    losses = train(task, 3)
    assert losses[-1] < losses[0]
    # Nothing known yet: about 8 bits a byte, under the spread of the first logits.
    assert 7.5 < losses[0] / math.log(2) < 9.5


def test_a_folder_is_split_by_file_and_windows_never_cross_files(folder: Path) -> None:
    task = resolve(f"text:{folder}")(0, None)
    assert task.group is not None
    files = {file for members in task.group.values() for file in members}
    assert files == {f"part{n % 3}/file{n}.txt" for n in range(40)}
    for split in ("train", "val", "test"):
        data = getattr(task, split)
        assert len(data) == 2 * len(set(task.group[split]))
        assert all(
            len(set(x.tolist()) | set(y.tolist())) == 1 for x, y in (data[i] for i in range(len(data)))
        )
    assert str(folder) in task.about


def test_a_single_file_is_split_by_position(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(bytes(range(1, 251)) * 30)
    task = resolve("text")(3, str(file))
    assert task.group is None
    lengths = [len(split) for split in (task.train, task.val, task.test)]  # type: ignore[arg-type]
    assert sum(lengths) == (250 * 30 - 1) // WINDOW
    assert lengths[0] > 5 * lengths[1] > 0
    assert same_weights(task, resolve("text")(3, None))


def test_too_little_text_and_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(TaskError, match="5 bytes in 1 files are too little text"):
        resolve(f"text:{tmp_path}")(0, None)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(TaskError, match="holds no text file"):
        resolve(f"text:{tmp_path}")(0, None)


def test_no_byte_sees_the_ones_after_it() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=32, heads=2, window=16)
    text = torch.randint(0, 256, (1, 16))
    changed = text.clone()
    changed[0, 9] += 1
    changed %= 256
    with torch.no_grad():
        difference = (model(text) - model(changed)).abs().amax(2)[0]
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 0).all()
    assert model(text[:, :1]).shape == (1, 1, 256)
    with pytest.raises(TaskError, match="16 bytes at most; 17 came"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_bits_per_byte_against_float64() -> None:
    task = resolve("text")(0, None)
    batch = [torch.stack(parts) for parts in zip(*(task.test[i] for i in range(3)), strict=True)]
    with torch.no_grad():
        scores, logits = task.scores_of(batch), task.model(batch[0]).double()
    chosen = logits.log_softmax(2).gather(2, batch[1][..., None])[..., 0]
    # FP32 logits into an FP32 loss: a few ulp of 8 bits.
    assert torch.allclose(scores.double(), -chosen.mean(1) / math.log(2), atol=1e-5)
    assert task.labels_of(batch).tolist() == [WINDOW] * 3
    assert mean_bits(np.array([100, 300]), np.array([1.0, 2.0], dtype=np.float32)) == 1.75
    with torch.no_grad():
        loss = task.loss(task.model, batch).item()
    assert loss / math.log(2) == pytest.approx(scores.mean().item(), abs=1e-4)
