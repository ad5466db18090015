"""The public names, frozen: a change here is a change of the public surface and belongs into CHANGELOG.md."""

import ast
import importlib
from pathlib import Path

import pytest

import equipoise

PUBLIC = {
    "LossScaler": "equipoise.step.scaler",
    "Plan": "equipoise.policy",
    "Policy": "equipoise.policy",
    "Session": "equipoise.session",
    "Task": "equipoise.task",
    "compare": "equipoise.comparison",
    "probe": "equipoise.plan.machine",
}

ERRORS = {
    "EquipoiseError", "FormatError", "MissingExtra", "NonFiniteError", "PolicyError", "RunError",
    "SessionError", "StallError", "TaskError", "UserError",
}  # fmt: skip


def test_the_root_lists_exactly_the_public_names() -> None:
    assert sorted(equipoise.__all__) == sorted([*PUBLIC, "__version__"])
    assert sorted(dir(equipoise)) == sorted(equipoise.__all__)


@pytest.mark.parametrize(("name", "home"), PUBLIC.items())
def test_a_public_name_is_the_one_of_its_home(name: str, home: str) -> None:
    found = getattr(equipoise, name)
    assert found is getattr(importlib.import_module(home), name)
    assert found.__module__ == home
    assert found.__doc__


def test_the_stub_and_the_runtime_agree() -> None:
    stub = ast.parse(Path(equipoise.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imported = {
        alias.asname: f"equipoise.{node.module}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == PUBLIC
    listed = next(node.value for node in stub.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed) == equipoise.__all__


def test_an_unknown_name_says_what_there_is() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Sesion'; it has .*Session"):
        equipoise.Sesion  # noqa: B018
    with pytest.raises(ImportError):
        from equipoise import Sesion  # noqa: F401


def test_the_error_tree_is_frozen_and_drawn() -> None:
    from equipoise import errors

    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert found == ERRORS
    assert all(issubclass(getattr(errors, name), errors.EquipoiseError) for name in ERRORS)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in ERRORS)
