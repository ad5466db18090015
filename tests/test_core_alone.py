"""What is installed without any extra is enough to probe, train, compare, and for a loop of one's own."""

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUICK_START = (ROOT / "docs/quick-start.md").read_text()

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a fresh environment that holds the core and nothing else."""
    home = tmp_path_factory.mktemp("core")
    venv.create(home / "env", with_pip=True, symlinks=os.name != "nt")
    place = home / "env" / ("Scripts" if os.name == "nt" else "bin")
    pip = [str(place / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(ROOT)], check=True)
    return place


def _run(core: Path, folder: Path, *words: str) -> str:
    """Stdout of a command of that environment; the repository's own sources are out of its sight."""
    paths = {"HOME": str(folder), "PATH": f"{core}{os.pathsep}{os.environ['PATH']}"}
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "XDG_CACHE_HOME")} | paths
    done = subprocess.run(
        [str(core / words[0]), *words[1:]], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{words}: {done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_environment_holds_no_extra(core: Path, tmp_path: Path) -> None:
    where = _run(core, tmp_path, "python", "-c", "import equipoise; print(equipoise.__file__)")
    assert Path(where.strip()).is_relative_to(core.parent)
    extras = ("lightning", "transformers", "accelerate", "pytest", "hypothesis", "playwright", "mkdocs")
    code = f"import importlib.util as u; print([n for n in {extras!r} if u.find_spec(n)])"
    assert _run(core, tmp_path, "python", "-c", code).strip() == "[]"


def test_probe_says_a_verdict_for_each_format(core: Path, tmp_path: Path) -> None:
    found = json.loads(_run(core, tmp_path, "equipoise", "probe", "--quick", "--json"))
    assert {"fp32", "bf16", "fp16"} <= set(found["formats"])


def test_the_four_lines_run_as_pasted(core: Path, tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", QUICK_START, re.DOTALL | re.MULTILINE)
    (tmp_path / "loop.py").write_text(code + "print(session.explain())\n")
    assert "plan (" in _run(core, tmp_path, "python", "loop.py")


def test_the_commands_for_a_task_of_ones_own_run_as_written(core: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"^## Your own task\n\n```\n(.*?)^```", QUICK_START, re.DOTALL | re.MULTILINE)
    lines = block.splitlines()
    assert len(lines) == 3 and all(line.startswith("equipoise ") for line in lines)
    outputs = [_run(core, tmp_path, *line.split()) for line in lines]
    assert "accuracy on test" in outputs[1] and (tmp_path / "runs/first/report.html").is_file()


def test_train_and_compare_give_their_figures(core: Path, tmp_path: Path) -> None:
    trained = json.loads(_run(core, tmp_path, "equipoise", "train", "digits", "--max-steps", "20", "--json"))
    assert trained["metric"]["name"] == "accuracy"
    short = ("--repeats", "3", "--max-steps", "20", "--json")
    judged = json.loads(_run(core, tmp_path, "equipoise", "compare", "breast-cancer", *short))
    assert judged["verdict"] in ("not-worse", "worse", "inconclusive")
    assert Path(tmp_path, judged["report"]).is_file()
