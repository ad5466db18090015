"""What the command line does with an error, whatever the verb."""

import errno
import subprocess
import sys

import pytest
import typer

from equipoise.cli.main import VERBS, app, guarded
from equipoise.errors import NonFiniteError, TaskError


def _exit_of(error: BaseException) -> int:
    def verb() -> None:
        raise error

    with pytest.raises(typer.Exit) as stop:
        guarded(verb)()
    return int(stop.value.exit_code)


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (TaskError("unknown task 'txet'; use 'text'"), 2, "error: unknown task 'txet'; use"),
        (NonFiniteError("the loss is nan"), 1, "error: the loss is nan"),
        (OSError(errno.ENOSPC, "No space left", "out/plan.toml"), 2, "out/plan.toml: No space left"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), 2, "out: Permission denied; change"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ZeroDivisionError("division by zero"), 1, "internal error: ZeroDivisionError"),
    ],
)
def test_an_error_becomes_a_message_and_an_exit_code(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_of(error) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert says in printed.err
    assert ("Traceback" in printed.err) == isinstance(error, ZeroDivisionError)


def test_a_verb_that_chose_its_exit_code_keeps_it() -> None:
    assert _exit_of(typer.Exit(3)) == 3


def test_a_guarded_verb_keeps_its_options_and_result() -> None:
    def verb(task: str, *, seed: int = 0) -> str:
        """Do it."""
        return f"{task} {seed}"

    assert guarded(verb)("text", seed=3) == "text 3"
    assert guarded(verb).__doc__ == "Do it."


def test_every_verb_is_registered() -> None:
    assert [command.name for command in app.registered_commands] == list(VERBS)


def _equipoise(*words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "equipoise", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [["no-such-verb"], ["--no-such-option"], ["compare", "--no-such-option"]])
def test_a_wrong_word_is_the_users_mistake(words: list[str]) -> None:
    done = _equipoise(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert words[-1] in done.stderr


def test_version_names_what_a_report_of_a_fault_needs() -> None:
    done = _equipoise("--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("equipoise 0.")
    assert "torch 2." in done.stdout
    assert "Python 3." in done.stdout
