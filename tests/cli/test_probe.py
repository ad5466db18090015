"""What ``equipoise probe`` prints, from a machine that is cached."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.cli.probe import show
from equipoise.plan._host import fingerprint, host_facts
from equipoise.plan.machine import SCHEMA
from equipoise.records import FormatVerdict, Machine


def machine(key: str = "key", note: str = "") -> Machine:
    verdicts = [
        FormatVerdict(format="fp32", verdict="use", reason="the reference", claimed=True,
                      gemm_speedup=1.0, conv_speedup=1.0),
        FormatVerdict(format="bf16", verdict="use", reason="products [4x] faster", claimed=True,
                      gemm_speedup=4.04, conv_speedup=1.6),
        FormatVerdict(format="fp16", verdict="unusable", reason="no kernel", claimed=None),
    ]  # fmt: skip
    facts = {
        "cpu": "Example 9000",
        "cpu_features": ["avx2"],
        "threads": 2,
        "quick": True,
        "measured_at": "2026-12-01",
    }
    return Machine(fingerprint=key, device="cpu", name="Example 9000", note=note, facts=facts,
                   formats={v.format: v for v in verdicts})  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home whose cache answers for this very machine."""
    monkeypatch.setenv("HOME", str(tmp_path))
    key = fingerprint(host_facts(), "auto", SCHEMA)
    folder = tmp_path / ".cache" / "equipoise"
    folder.mkdir(parents=True)
    (folder / f"probe-{key}.json").write_text(json.dumps(machine(key, "filed").as_dict()))
    return tmp_path


def test_json_is_one_object_and_nothing_else(home: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--quick", "--json"])
    assert result.exit_code == 0
    assert result.stderr == ""
    said = json.loads(result.stdout)
    assert said["formats"]["bf16"] == {"format": "bf16", "verdict": "use", "reason": "products [4x] faster",
                                       "claimed": True, "emulated": False, "gemm_speedup": 4.04,
                                       "conv_speedup": 1.6}  # fmt: skip
    assert set(said) == {"fingerprint", "device", "name", "formats", "facts", "readings", "trusted", "note"}


def test_out_gets_the_same_object(home: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--quick", "--json", "--out", str(home / "machine.json")])
    assert result.exit_code == 0
    assert json.loads((home / "machine.json").read_text()) == json.loads(result.stdout)


def test_an_out_that_cannot_be_written_is_the_users_mistake(home: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--quick", "--out", str(home / "no" / "machine.json")])
    assert result.exit_code == 2
    assert "can't write" in result.stderr
    assert "existing, writable folder" in result.stderr


def test_an_unknown_device_is_the_users_mistake(home: Path) -> None:
    result = CliRunner().invoke(app, ["probe", "--device", "tpu"])
    assert result.exit_code == 2
    assert "'tpu' was asked for" in result.stderr


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_table_has_a_row_for_each_format_and_its_reason_in_full(width: int) -> None:
    paper = io.StringIO()
    show(machine(note="others were busy [50%]"), Console(file=paper, width=width))
    text = " ".join(paper.getvalue().split())
    assert "bf16: products [4x] faster" in text
    assert "fp16: no kernel" in text
    assert "note: others were busy [50%]" in text
    if width >= 80:
        (row,) = (line for line in paper.getvalue().splitlines() if line.startswith("│ bf16"))
        assert [cell.strip() for cell in row.strip("│").split("│")] == [
            "bf16",
            "yes",
            "4.04x",
            "1.60x",
            "use",
        ]


def test_facts_that_are_missing_do_not_stop_the_printing() -> None:
    paper = io.StringIO()
    bare = Machine(fingerprint="key", device="cpu", name="?", formats={})
    show(bare, Console(file=paper, width=80))
    assert "memory" in paper.getvalue()
