"""``equipoise init-task``: the file it writes really trains, and no file is overwritten."""

import sys
from itertools import islice
from pathlib import Path

import pytest
import torch

from equipoise.cli.init_task import init_task
from equipoise.errors import TaskError
from equipoise.step.feed import Feed
from equipoise.tasks import resolve


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_the_written_file_trains(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init_task(Path("wine_task.py"))
    assert "equipoise train wine_task.py:task" in capsys.readouterr().out
    text = (here / "wine_task.py").read_text()
    assert "equipoise compare wine_task.py:task" in text
    assert "{{" not in text
    assert max(map(len, text.splitlines())) <= 88

    task, again = resolve("wine_task.py:task")(0, None), resolve("wine_task.py:task")(0, None)
    assert all(
        torch.equal(a, b) for a, b in zip(task.model.parameters(), again.model.parameters(), strict=True)
    )
    for batch in islice(Feed(task.train, batch_size=task.batch_size, seed=0).batches(), 60):
        task.loss(task.model, batch).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        task.lr_scheduler.step()
    (x, y) = next(iter(Feed(task.val, batch_size=100, seed=0).ordered()))
    with torch.no_grad():
        assert task.metric(y.numpy(), task.scores_of((x, y)).numpy()) > 0.85
    sys.modules.pop("wine_task")


def test_nothing_is_overwritten(here: Path) -> None:
    (here / "my_task.py").write_text("mine")
    with pytest.raises(TaskError, match=r"my_task\.py exists and is left as it is"):
        init_task()
    assert (here / "my_task.py").read_text() == "mine"


@pytest.mark.parametrize(
    ("file", "said"), [("task", "must end in .py"), ("none/task.py", "there is no folder none")]
)
def test_places_that_cannot_be_written(here: Path, file: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        init_task(Path(file))
    assert not list(here.iterdir())
