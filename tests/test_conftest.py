"""A test whose need is absent is skipped, and the end of the output says so."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_what_did_not_run_is_listed_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_markers.py").write_text(
        "import pytest\n"
        "@pytest.mark.extra('no_such_module')\n"
        "def test_extra(): assert False, 'must not run'\n"
        "@pytest.mark.extra('pytest')\n"
        "def test_present(): pass\n"
        "@pytest.mark.slow\n"
        "def test_slow(): assert False, 'must not run'\n"
    )
    settings = str(HERE.parent / "pyproject.toml")
    pytest_ = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", settings]
    command = [*pytest_, "--rootdir", str(tmp_path), "-m", "not slow", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped, 1 deselected" in done.stdout
    assert "1 x extra: needs `pip install no_such_module`" in done.stdout
    assert "1 x slow: run them with `make test-slow`" in done.stdout


def test_the_cache_fixture_moves_the_home_directory(tmp_cache: Path, tmp_path: Path) -> None:
    assert Path.home() / ".cache" == tmp_cache
    assert tmp_path in tmp_cache.parents
