"""What every test gets: a known state of the generators and threads, and skips that say why.

A test's marker names what it needs (see pyproject.toml); where that is absent the test is skipped, and the
end of pytest's output lists what did not run.
"""

import importlib.util
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

# Before torch is loaded, and inherited by child processes: with more threads, parallel runs stall each other.
os.environ.setdefault("OMP_NUM_THREADS", "2")

FASHION = Path("/usr/share/datasets/fashion-mnist")
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")

_not_run: Counter[str] = Counter()


def chromium() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in CHROMIUM if (path := shutil.which(name))), None)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _missing(marker: pytest.Mark) -> str | None:
    """Why a test with this marker can't run here; None when it can."""
    if marker.name == "browser":
        if not _has("playwright"):
            return "browser: needs `pip install playwright`"
        return None if chromium() else "browser: needs a Chromium (Debian: apt-get install chromium)"
    if marker.name == "fashion":
        return None if FASHION.is_dir() else "fashion: needs `apt-get install dataset-fashion-mnist`"
    if marker.name == "extra":
        absent = [name for name in marker.args if not _has(name)]
        return f"extra: needs `pip install {' '.join(absent)}`" if absent else None
    if marker.name == "gpu":
        import torch

        return None if torch.cuda.is_available() else "gpu: needs a CUDA device"
    if marker.name == "dist":
        import torch.distributed

        return None if torch.distributed.is_available() else "dist: needs a torch with torch.distributed"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers():
            reason = _missing(marker)
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))
                _not_run[reason] += 1
                break


def pytest_deselected(items: list[pytest.Item]) -> None:
    slow = sum(1 for item in items if item.get_closest_marker("slow"))
    if slow:
        _not_run["slow: run them with `make test-slow`"] += slow


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _not_run:
        terminalreporter.section("not run here")
        for reason, count in sorted(_not_run.items()):
            terminalreporter.line(f"{count:4d} x {reason}")


@pytest.fixture(autouse=True)
def known_state() -> Iterator[None]:
    """Seeds for every test, and the thread count put back after one that changed it."""
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def tmp_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of this test's own, so that nothing is read from or left in the user's ~/.cache."""
    home = tmp_path / "home"
    home.mkdir()
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(home))
    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home / ".cache"
