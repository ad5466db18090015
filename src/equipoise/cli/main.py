"""``equipoise``: the verbs put together, and what every one of them does with an error.

Enters: the words of the command line. Leaves: the verb's output on stdout, errors on stderr, an exit code:
0; 2 for the user's mistake; 1 for ours; 130 after Ctrl-C. Where: the outermost layer. Neither this file nor a
verb's file imports torch or scikit-learn at its top, so that ``--help`` answers at once: a test
says so.
"""

from __future__ import annotations

import errno
import functools
import platform
import sys
import traceback
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Annotated, Any

import typer

from .. import __version__
from ..errors import EquipoiseError, UserError

VERBS = {
    "demo": "demo",
    "probe": "probe",
    "train": "train",
    "compare": "compare",
    "inspect": "inspect",
    "report": "report",
    "init-task": "init_task",
}
"""Verb -> the module beside this one; its function of the same name takes the options. ``--help``'s order."""

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
_NOT_ALLOWED = {errno.EACCES, errno.EPERM, errno.EROFS}

app = typer.Typer(
    name="equipoise",
    help="PyTorch training as fast as this machine allows, at an accuracy it can prove.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say(message: str) -> None:
    typer.echo(message, err=True)


def _exit_code(error: BaseException) -> int:
    """Say on stderr what went wrong and give the exit code for it."""
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return 130
    if isinstance(error, EquipoiseError):
        _say(f"error: {error}")
        return 2 if isinstance(error, UserError) else 1
    if isinstance(error, OSError) and error.errno in _NO_ROOM | _NOT_ALLOWED:
        todo = "free some space" if error.errno in _NO_ROOM else "change its permissions"
        where = error.filename or "the disk"
        _say(f"error: {where}: {error.strerror}; {todo} or choose another place with --out")
        return 2
    _say("".join(traceback.format_exception(error)).rstrip())
    _say(
        f"internal error: {type(error).__name__}. If the last lines above lie in your own file, mend it "
        f"there; else please report them together with the output of `equipoise --version`."
    )
    return 1


def guarded(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The verb with every error turned into a message on stderr and an exit code."""

    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, **kwargs)
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except BrokenPipeError:
            raise  # the reader of a pipe went away; typer ends such a run quietly
        except (Exception, KeyboardInterrupt) as error:
            raise typer.Exit(_exit_code(error)) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            torch = metadata.version("torch")
        except metadata.PackageNotFoundError:
            torch = "not installed"
        python = platform.python_version()
        typer.echo(f"equipoise {__version__} (torch {torch}, Python {python}, {sys.platform})")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and stop."),
    ] = False,
) -> None:
    pass


for _name, _module in VERBS.items():
    app.command(_name)(guarded(getattr(import_module(f".{_module}", __package__), _module)))


def main() -> None:
    """What the ``equipoise`` script and ``python -m equipoise`` call."""
    app(prog_name="equipoise")
