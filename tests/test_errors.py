"""The exception tree: one root, exit code 2 for the user's mistakes, and types that people already catch."""

import pytest

from equipoise import errors
from equipoise.errors import EquipoiseError, UserError, did_you_mean

OURS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]


@pytest.mark.parametrize("error", OURS, ids=lambda e: e.__name__)
def test_every_error_has_our_root_and_stands_in_the_drawing(error: type[Exception]) -> None:
    assert issubclass(error, EquipoiseError)
    assert error.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        ("FormatError", ValueError),
        ("PolicyError", ValueError),
        ("TaskError", ValueError),
        ("SessionError", RuntimeError),
        ("RunError", RuntimeError),
        ("MissingExtra", ImportError),
        ("NonFiniteError", ArithmeticError),
    ],
)
def test_who_catches_pythons_own_type_catches_ours(ours: str, builtin: type[Exception]) -> None:
    assert issubclass(getattr(errors, ours), builtin)
    assert issubclass(getattr(errors, ours), UserError) is (ours != "NonFiniteError")


def test_the_nearest_word_is_offered_and_a_far_one_is_not() -> None:
    assert did_you_mean("bf61", ["fp32", "bf16"]) == "; did you mean 'bf16'?"
    assert did_you_mean("xyz", ["fp32", "bf16"]) == did_you_mean("a", []) == ""
