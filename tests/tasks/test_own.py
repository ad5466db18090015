"""The user's own task: found, imported, called; what goes wrong in it says where."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from equipoise.errors import TaskError
from equipoise.tasks import resolve

GOOD = """
import torch
from torch.utils.data import TensorDataset
import equipoise as eq
from helper_of_mine import NAME

def task(seed: int, data: str | None) -> eq.Task:
    model = torch.nn.Linear(2, 2)
    rows = TensorDataset(torch.ones(4, 2), torch.tensor([0, 1, 1, LABEL]))
    sgd = torch.optim.SGD(model.parameters())
    return eq.Task(name=NAME + str(seed) + str(data), model=model, optimizer=sgd,
                   train=rows, val=rows, test=rows, metric=lambda labels, scores: 1.0, metric_name="one",
                   loss=lambda model, batch: model(batch[0]).sum())
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, with what was imported from it forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    (tmp_path / "helper_of_mine.py").write_text("NAME = 'mine'\n")
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(tmp_path)) or name.endswith("_of_mine"):
            del sys.modules[name]


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    "text", ["tasks_of_mine.py:task", "tasks_of_mine:task", "{here}/tasks_of_mine.py:task"]
)
def test_a_function_of_a_module_or_file_with_the_current_directory_importable(here: Path, text: str) -> None:
    write(here / "tasks_of_mine.py", GOOD.replace("LABEL", "0"))
    task = resolve(text.format(here=here))(3, "some data")
    assert task.name == "mine3some data"


def test_a_file_elsewhere_imports_its_neighbours(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here / "elsewhere" / "run_of_mine.py", GOOD.replace("LABEL", "0").replace("helper_of", "near_of"))
    write(here / "elsewhere" / "near_of_mine.py", "NAME = 'near'\n")
    assert resolve("elsewhere/run_of_mine.py:task")(0, None).name == "near0None"


def test_a_package_and_a_changed_file(here: Path) -> None:
    write(here / "pack_of_mine" / "__init__.py", "")
    write(here / "pack_of_mine" / "inner.py", GOOD.replace("LABEL", "0"))
    assert resolve("pack_of_mine.inner:task")(0, None).name == "mine0None"
    write(here / "tasks_of_mine.py", GOOD.replace("LABEL", "0"))
    assert resolve("tasks_of_mine.py:task")(0, None).name == "mine0None"
    write(here / "tasks_of_mine.py", GOOD.replace("LABEL", "0").replace("NAME + ", "'changed' + "))
    assert resolve("tasks_of_mine.py:task")(0, None).name == "changed0None"


def test_a_file_named_like_a_library_does_not_replace_it(here: Path) -> None:
    write(here / "random.py", GOOD.replace("LABEL", "0"))
    library = sys.modules["random"]
    assert resolve("random.py:task")(0, None).name == "mine0None"
    assert sys.modules["random"] is library


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "x = 1\nundefined_name\n",
            r"importing bad_of_mine\S* failed: NameError: name 'undefined_name'.*line 2\)",
        ),
        ("def task(:\n", r"SyntaxError: .*bad_of_mine.py, line 1\)"),
        ("\nimport nothing_of_mine\n", r"ModuleNotFoundError: No module named 'nothing_of_mine'.*line 2\)"),
        ("import sys\nsys.exit('usage: ...')\n", r"SystemExit: usage: .*line 2\)"),
        ("import json\njson.loads('[')\n", r"JSONDecodeError: .*bad_of_mine.py, line 2\)"),
    ],
)
@pytest.mark.parametrize("text", ["bad_of_mine.py:task", "bad_of_mine:task"])
def test_an_import_that_fails_says_what_and_where(here: Path, body: str, said: str, text: str) -> None:
    write(here / "bad_of_mine.py", body)
    with pytest.raises(TaskError, match=said):
        resolve(text)
    assert "bad_of_mine" not in sys.modules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gone_of_mine.py:task", "there is no file gone_of_mine.py in"),
        ("gone_of_mine:task", "there is no module 'gone_of_mine'"),
        ("helper_of_mine.sub:task", "there is no module|not a package"),
        (
            "tasks_of_mine.py",
            "the function's name is missing; it has task, other: write tasks_of_mine.py:task",
        ),
        ("tasks_of_mine.py:", "the function's name is missing"),
        ("tasks_of_mine.py:taks", "has no function 'taks'; did you mean tasks_of_mine.py:task?"),
        ("tasks_of_mine:NAME", "has no function 'NAME'; it has task, other"),
        ("helper_of_mine:task", "it has no function at all: write def task"),
    ],
)
def test_a_function_that_is_not_there(here: Path, text: str, said: str) -> None:
    write(
        here / "tasks_of_mine.py",
        GOOD.replace("LABEL", "0") + "\ndef other(seed, data): ...\ndef _inner(): ...\n",
    )
    with pytest.raises(TaskError, match=said.replace("?", r"\?")):
        resolve(text)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def task(seed): ...\n", r"can't be called with \(seed, data\).*write def task"),
        ("def task(seed, data):\n    return {}\n", "returned dict, not an equipoise.Task"),
        ("def task(seed, data):\n    return None\n", "returned NoneType"),
        (
            "def task(seed, data):\n    return open('gone')\n",
            r"the function failed: FileNotFoundError.*line 2\)",
        ),
        (
            "import torch\ndef task(seed, data):\n    x = 1\n    return torch.ones(2) @ torch.ones(3)\n",
            r"the function failed: RuntimeError: .*tasks_of_mine.py, line 4\)",
        ),
    ],
)
def test_a_function_that_gives_no_task(here: Path, body: str, said: str) -> None:
    write(here / "tasks_of_mine.py", body)
    with pytest.raises(TaskError, match=said):
        resolve("tasks_of_mine.py:task")(0, None)


def test_the_users_data_are_checked_and_their_own_errors_kept(here: Path) -> None:
    write(here / "tasks_of_mine.py", GOOD.replace("LABEL", "5"))
    with pytest.raises(TaskError, match="task 'mine0None', train: label 5 of case 3 is out of range"):
        resolve("tasks_of_mine.py:task")(0, None)
    write(
        here / "other_of_mine.py",
        "from equipoise.errors import TaskError as E\ndef task(seed, data):\n    raise E('get it there')\n",
    )
    with pytest.raises(TaskError, match=r"^get it there$"):
        resolve("other_of_mine.py:task")(0, None)


def test_importing_leaves_torch_as_it_is(here: Path) -> None:
    write(here / "tasks_of_mine.py", GOOD.replace("LABEL", "0"))
    before = torch.get_default_dtype(), torch.get_num_threads()
    resolve("tasks_of_mine.py:task")
    assert (torch.get_default_dtype(), torch.get_num_threads()) == before
