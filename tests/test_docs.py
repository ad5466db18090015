"""Every Python block in README and docs runs, each as a reader would paste it."""

import re
from pathlib import Path

import pytest

from recorded import machine

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks() -> list:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [
        pytest.param(code, id=f"{page.name}-{i}")
        for page in pages
        for i, code in enumerate(FENCE.findall(page.read_text()))
    ]


@pytest.mark.parametrize("code", blocks())
def test_a_block_runs_as_pasted(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equipoise.planning.probe", lambda **_: machine(bf16="use"))
    exec(compile(code, "a block of the docs", "exec"), {"__name__": "__main__"})


def test_there_are_blocks_to_run() -> None:
    pages = {block.id.rsplit("-", 1)[0] for block in blocks()}
    assert {"README.md", "cheat-sheet.md", "quick-start.md"} <= pages
