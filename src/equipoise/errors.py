"""Every exception that Equipoise raises by itself.

    EquipoiseError
    ├── UserError (the user's mistake: exit code 2)
    │   ├── FormatError      unknown, unavailable or emulated number format
    │   ├── PolicyError      a policy or plan that can't be read, or a pattern that matches nothing
    │   ├── SessionError     calls of a Session or LossScaler in an order that can't be right
    │   ├── TaskError        a Task, its data or its metric that can't be used
    │   ├── RunError         a run directory, checkpoint or configuration that can't be used
    │   └── MissingExtra     an optional dependency isn't installed (also an ImportError)
    └── NonFiniteError       a loss or gradient that is not finite, under ``nonfinite="raise"``
        └── StallError       so many skipped steps in a row that training stands still

A message says what came, what is allowed, and what to do.
"""

import difflib
from collections.abc import Iterable


class EquipoiseError(Exception):
    """Root of all errors that Equipoise raises by itself."""


class UserError(EquipoiseError):
    """The user's mistake; the command line exits with 2."""


class FormatError(UserError, ValueError):
    """A number format is unknown, unavailable on this device, or emulated."""


class PolicyError(UserError, ValueError):
    """A policy or plan can't be read, or doesn't fit the model."""


class SessionError(UserError, RuntimeError):
    """A Session or LossScaler was called in an order that can't be right."""


class TaskError(UserError, ValueError):
    """A Task, its data or its metric can't be used."""


class RunError(UserError, RuntimeError):
    """A run directory, checkpoint or configuration can't be used."""


class MissingExtra(UserError, ImportError):
    """An optional dependency isn't installed; the message names the extra."""


class NonFiniteError(EquipoiseError, ArithmeticError):
    """A loss or gradient is not finite and ``nonfinite="raise"`` was asked for."""


class StallError(NonFiniteError):
    """Skipped steps in a row without end: training stands still."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """The end of a message on an unknown word: the nearest allowed one; empty where none is near."""
    near = difflib.get_close_matches(word, list(allowed), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
