"""The wheel holds what a user needs, and nothing heavy is loaded before it is used."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import equipoise

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "sklearn", "scipy", "matplotlib", "numpy")


def _loaded(code: str) -> set[str]:
    """The heavy modules that a fresh interpreter has loaded after running ``code``."""
    script = f"import sys\n{code}\nprint('LOADED', *[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_importing_the_root_loads_nothing_heavy() -> None:
    assert _loaded("import equipoise; equipoise.__version__; dir(equipoise)") == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["compare", "--help"], ["train", "--help"]])
def test_help_loads_no_torch_no_sklearn_no_matplotlib(words: list[str]) -> None:
    code = (
        "from equipoise.cli.main import main\n"
        f"sys.argv = ['equipoise', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    )
    assert _loaded(code) & {"torch", "sklearn", "matplotlib"} == set()


def test_wheel_has_types_stub_and_template(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    command = [*pip, *offline, "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"equipoise-{equipoise.__version__}-py3-none-any.whl"
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"equipoise/py.typed", "equipoise/__init__.pyi", "equipoise/deliver/report.html.j2"} <= names
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for ending in ("*.py", "*.j2", "*.css")
        for path in (ROOT / "src/equipoise").rglob(ending)
    }
    assert sources <= names
    about = f"equipoise-{equipoise.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"equipoise", about}
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_metadata_names_licence_script_and_oldest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"
    assert project["scripts"] == {"equipoise": "equipoise.cli.main:main"}
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert "torch>=2.11" in project["dependencies"]
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
