"""Real training tasks that ship with the package, and the user's own, found by their text.

Enters: TASK as the command line has it. Leaves: a function ``(seed, data) -> Task`` that has checked its
data. Where: before everything else. No torch at import: the list of names answers at once.
"""

import difflib
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from ..errors import TaskError

if TYPE_CHECKING:
    from ..task import Task, TaskFunction


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shipped:
    module: str
    about: str
    takes_data: bool = False
    needs_data: bool = False


_SHIPPED = {
    "text": _Shipped(
        module="text",
        about="byte-level GPT on the source of Python's standard library, or on text:PATH",
        takes_data=True,
    ),
    "breast-cancer": _Shipped(
        module="breast_cancer", about="MLP on scikit-learn's Wisconsin breast cancer set, AUC"
    ),
    "digits": _Shipped(module="digits", about="small CNN on scikit-learn's 8x8 digits, accuracy"),
    "fashion-mnist": _Shipped(
        module="fashion_mnist",
        about="ResNet on Fashion-MNIST, accuracy; from Debian's package or fashion-mnist:PATH",
        takes_data=True,
    ),
    "images": _Shipped(
        module="images",
        about="ResNet on images:PATH, a folder for each class or a MedMNIST-style .npz, accuracy",
        takes_data=True,
        needs_data=True,
    ),
}


def names() -> list[tuple[str, str]]:
    """The shipped tasks: name as it is asked for, and one line on each."""
    return [(f"{name}:PATH" if task.needs_data else name, task.about) for name, task in _SHIPPED.items()]


def resolve(text: str) -> "TaskFunction":
    """The task function that ``text`` names.

    ``text`` is a shipped name, such a name with a path (``images:PATH``, ``text:PATH``),
    ``package.module:function`` or ``file.py:function``. The data are read, and checked, when the function
    is called.

    Raises:
        TaskError: there is no such task, or the user's file can't be imported.
    """
    name, colon, path = text.partition(":")
    shipped = _SHIPPED.get(name)
    if shipped is not None:
        if colon and not path:
            raise TaskError(f"task {text!r}: a path is missing after the colon")
        if path and not shipped.takes_data:
            raise TaskError(f"task {text!r}: {name} brings its own data and takes no path; write {name!r}")
        return partial(_shipped_task, name, path or None)
    if not colon and not text.endswith(".py"):
        near = difflib.get_close_matches(text, _SHIPPED, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TaskError(
            f"no task {text!r}.{hint} Shipped: {', '.join(shown for shown, _ in names())}; "
            "your own: package.module:function or file.py:function"
        )
    from .own import load  # only now: it is not needed for shipped names

    return load(text)


def _shipped_task(name: str, path: str | None, seed: int, data: str | None) -> "Task":
    from ._checks import check_task

    shipped = _SHIPPED[name]
    if path and data and path != data:
        raise TaskError(f"task {name}: {path!r} after the colon and {data!r} as data; give one of them")
    data = path or data
    if data and not shipped.takes_data:
        raise TaskError(
            f"task {name}: it brings its own data and takes none; {data!r} was given: leave it out"
        )
    if shipped.needs_data and not data:
        raise TaskError(f"task {name}: it needs data; write {name}:PATH, or give --data PATH")
    function: TaskFunction = import_module(f".{shipped.module}", __package__).task
    return check_task(function(seed, data))
