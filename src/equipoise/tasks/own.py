"""The user's own task: ``package.module:function`` or ``file.py:function``.

Enters: that text. Leaves: the user's function, wrapped so that what goes wrong in it says where. Where:
under ``tasks.resolve``. The current directory is importable, and so is the folder of the file, as under
``python file.py``.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from ..blame import told
from ..errors import TaskError, UserError

if TYPE_CHECKING:
    from ..task import Task, TaskFunction

_SHAPE = "def {name}(seed: int, data: str | None) -> Task"


def load(text: str) -> "TaskFunction":
    """The function that ``text`` names, importing its module.

    Raises:
        TaskError: the module is missing or fails, or has no such function; the original message and line are
            in it.
    """
    where, colon, name = text.rpartition(":")
    if not colon or name.endswith(".py"):  # "file.py", and on Windows "C:file.py"
        where, name = text, ""
    module = _from_file(Path(where), text) if where.endswith(".py") else _from_name(where, text)
    function = getattr(module, name, None) if name else None
    if not callable(function):
        raise TaskError(f"task {text!r}: {_missing(module, where, name)}")
    try:
        inspect.signature(function).bind(0, None)
    except TypeError as error:
        shape = _SHAPE.format(name=name)
        raise TaskError(
            f"task {text!r}: it can't be called with (seed, data): {error}; write {shape}"
        ) from error
    except ValueError:  # a callable without a signature: only calling it can tell
        pass
    return _Own(text, function)


class _Own:
    """The user's function; its errors name their line."""

    def __init__(self, text: str, function: Any) -> None:
        self._text, self._function = text, function

    def __call__(self, seed: int, data: str | None) -> "Task":
        from ..task import Task
        from ._checks import check_task

        try:
            task = self._function(seed, data)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise TaskError(f"task {self._text!r}: the function failed: {told(error)}") from error
        if not isinstance(task, Task):
            raise TaskError(
                f"task {self._text!r}: the function returned {type(task).__name__}, not an equipoise.Task"
            )
        return check_task(task)


def _importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _from_name(where: str, text: str) -> ModuleType:
    _importable(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{where}.".startswith(f"{error.name}."):
            raise TaskError(
                f"task {text!r}: there is no module {error.name!r} here or among the installed packages; "
                "run from the folder that holds it, or write file.py:function"
            ) from error
        raise TaskError(f"task {text!r}: importing {where} failed: {told(error)}") from error


def _from_file(file: Path, text: str) -> ModuleType:
    if not file.is_file():
        raise TaskError(f"task {text!r}: there is no file {file} in {os.getcwd()}")
    _importable(os.getcwd())
    _importable(str(file.parent.resolve()))
    # By its own name where that is free, so that a spawned worker can import it again.
    name = file.stem if file.stem.isidentifier() else "equipoise_user_task"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) != str(file.resolve()):
        name = f"equipoise_user_{name}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise TaskError(f"task {text!r}: {file} can't be read as Python")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise TaskError(f"task {text!r}: importing {file} failed: {told(error)}") from error
    return module


def _missing(module: ModuleType, where: str, name: str) -> str:
    functions = [
        key
        for key, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not key.startswith("_")
    ]
    what = f"{where} has no function {name!r}" if name else "the function's name is missing"
    if not functions:
        return f"{what}; it has no function at all: write {_SHAPE.format(name=name or 'task')}"
    near = difflib.get_close_matches(name, functions, n=1)
    hint = f"did you mean {where}:{near[0]}? " if near else ""
    return (
        f"{what}; {hint}it has {', '.join(functions)}: write {where}:{functions[0] if not near else near[0]}"
    )
