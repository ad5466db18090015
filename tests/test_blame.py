"""An error in one line that names the user's own line."""

import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from equipoise import blame

TORCH = str(Path(sysconfig.get_path("purelib"), "torch", "nn", "functional.py"))
OURS = str(Path(blame.__file__).parent / "trainer.py")


def _raised(do):
    try:
        do()
    except (Exception, SystemExit) as error:
        return error
    raise AssertionError("nothing was raised")


def test_the_innermost_line_that_is_no_librarys_is_named():
    frames = [(OURS, 1), ("/home/me/task.py", 7), ("/home/me/loss.py", 9), (TORCH, 3)]
    assert blame.sentence("ValueError", "no\nmore", frames) == (
        "ValueError: no (/home/me/loss.py, line 9)",
        True,
    )
    assert blame.sentence("ValueError", "", [(OURS, 1), (TORCH, 3)]) == ("ValueError", False)


def test_an_error_tells_its_line_and_whose_it_is():
    error = _raised(lambda: {}["x"])
    assert blame.told(error).startswith(f"KeyError: 'x' ({__file__}, line ") and blame.is_users(error)


class _Failing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        raise OSError("no picture 3")


@pytest.mark.filterwarnings("ignore")
def test_an_error_from_a_worker_is_read_from_its_text():
    loader = DataLoader(_Failing(), num_workers=1, multiprocessing_context="fork")
    text = blame.told(_raised(lambda: next(iter(loader))))
    assert text.startswith(f"OSError: no picture 3 ({__file__}, line ")


@pytest.mark.parametrize(
    ("do", "says"),
    [
        (lambda: default_collate([torch.zeros(2), torch.zeros(3)]), "must have one shape"),
        (lambda: default_collate([object()]), "give a collate"),
        (lambda: torch.zeros(()).backward(), "no weight that is trained"),
        (lambda: float([1]), "a metric gives one number"),
    ],
)
def test_what_torch_says_of_a_users_mistake_is_known(do, says):
    error = _raised(do)
    text, users = blame.sentence(type(error).__name__, str(error), [(TORCH, 1)])
    assert says in text and users
