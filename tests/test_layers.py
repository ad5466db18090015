"""The layers import downwards, and what must not need torch does not import it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import equipoise

PACKAGE = Path(equipoise.__file__).parent

LAYERS = {
    0: {"errors", "formats", "policy", "sensitive", "records", "ranks", "evidence", "foreign_load", "blame"},
    1: {"plan", "step", "watch"},
    2: {
        "session", "task", "planning", "trials", "run", "trainer", "journal", "rundir", "evaluation",
        "comparison", "arms", "tally", "config", "notice", "inspection", "bisection",
    },
    3: {"adapters", "deliver", "tasks", "cli", "__main__", "arm_plain", "arm_plan"},
}  # fmt: skip
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}

KNOW_ALL_TIMES = {"session", "planning", "trials", "run"}
"""The files of L2 that may know more than one of plan, step and watch."""

TORCH_FREE = (
    "errors", "formats", "records", "policy", "ranks", "evidence", "foreign_load", "blame", "plan.machine",
    "comparison", "arms", "tally", "config", "rundir",
)  # fmt: skip
"""Beside these: the root, and everything in deliver/ and cli/."""


def _module_name(path: Path, package: Path) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _import_statements(tree: ast.Module) -> Iterator[tuple[str, int, list[str]]]:
    """Each import of a file: the dotted name, the number of leading dots, the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.level, [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = node.args[0].value
            if called in {"import_module", "__import__"} and isinstance(text, str):
                yield text.lstrip("."), len(text) - len(text.lstrip(".")), []


def _imported(path: Path, package: Path) -> set[str]:
    """The names under this package, dotted and relative to it, that a file imports anywhere in it.

    ``from . import session`` counts as ``session``, and so does ``import_module(".session", ...)``: a literal
    name is an import in all but spelling.
    """
    folder = path.relative_to(package).parent.parts
    found: set[str] = set()
    for dotted, level, names in _import_statements(ast.parse(path.read_text(encoding="utf-8"))):
        if level:
            base = [*folder[: len(folder) - (level - 1)], *filter(None, dotted.split("."))]
        elif dotted.split(".")[0] == "equipoise":
            base = dotted.split(".")[1:]
        else:
            continue
        found |= {".".join([*base, *([name] if name else [])]) for name in names or [""]}
    return found - {""}


def breaches(package: Path) -> list[str]:
    """Every import of a package's files that the layer rule forbids."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = _module_name(path, package)
        if not module:
            continue  # the root: it loads names lazily and belongs to no layer
        own = module.split(".")[0]
        if own not in LAYER_OF:
            found.append(f"{module}: belongs to no layer; add it to LAYERS")
            continue
        targets = {target.split(".")[0] for target in _imported(path, package)}
        for other in sorted(targets - {own}):
            if other not in LAYER_OF:
                continue  # a name of the root, such as __version__
            if LAYER_OF[other] > LAYER_OF[own]:
                found.append(f"{module} (L{LAYER_OF[own]}) imports {other} (L{LAYER_OF[other]})")
            elif LAYER_OF[own] == LAYER_OF[other] == 1:
                found.append(f"{module} imports {other}: plan, step and watch never import each other")
            elif other == "cli" and own != "__main__":
                found.append(f"{module} imports cli: only __main__ does")
        if LAYER_OF[own] == 2 and own not in KNOW_ALL_TIMES and len(targets & LAYERS[1]) > 1:
            found.append(f"{module} knows {sorted(targets & LAYERS[1])}: only {sorted(KNOW_ALL_TIMES)} do")
    return found


def test_the_package_keeps_the_layer_rule() -> None:
    assert breaches(PACKAGE) == []


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("errors", "from . import session", "errors (L0) imports session (L2)"),
        ("errors", "from .step.scaler import LossScaler", "errors (L0) imports step (L1)"),
        ("plan/choose", "from ..step import cast", "plan.choose imports step"),
        ("watch/guard", "import equipoise.plan.machine", "watch.guard imports plan"),
        ("step/cast", "def f():\n    from equipoise.watch import history", "step.cast imports watch"),
        ("step/cast", "import_module('equipoise.run')", "step.cast (L1) imports run (L2)"),
        ("run", "from .tasks import resolve", "run (L2) imports tasks (L3)"),
        ("comparison", "from .plan import cost\nfrom .step import feed", "comparison knows ['plan', 'step']"),
        ("deliver/report", "from ..cli.main import main", "deliver.report imports cli"),
        ("deliver/report", "from .. import cli", "deliver.report imports cli"),
        ("helpers", "x = 1", "helpers: belongs to no layer"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, module: str, source: str, says: str) -> None:
    for name in ("errors", "session", "run"):
        (tmp_path / f"{name}.py").write_text("")
    for folder in ("plan", "step", "watch", "deliver", "cli", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / f"{module}.py").write_text(source)
    assert [line for line in breaches(tmp_path) if line.startswith(says)]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("session", "from .plan import machine\nfrom .step import cast\nfrom .watch import history"),
        ("step/cast", "from ..policy import Policy\nfrom .layout import apply"),
        ("arm_plan", "from .tasks import resolve\nfrom .run import Trainer"),
        ("cli/main", "from .. import __version__\nfrom ..errors import UserError"),
        ("__main__", "from .cli.main import main"),
    ],
)
def test_what_the_rule_allows_passes(tmp_path: Path, module: str, source: str) -> None:
    for folder in ("plan", "step", "watch", "cli", "tasks"):
        (tmp_path / folder).mkdir()
    (tmp_path / f"{module}.py").write_text(source)
    assert breaches(tmp_path) == []


def test_modules_that_work_without_torch_do_not_import_it() -> None:
    paths = [*(PACKAGE / "deliver").glob("*.py"), *(PACKAGE / "cli").glob("*.py")]
    names = {*TORCH_FREE, *(_module_name(path, PACKAGE) for path in paths)}
    modules = ["equipoise", *(f"equipoise.{name}" for name in sorted(names))]
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        print(name); break\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
