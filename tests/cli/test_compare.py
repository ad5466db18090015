"""``equipoise compare``: what it prints, and what it exits with."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equipoise.cli.compare import EXIT_OF, INCONCLUSIVE, _line_of, _new_name, print_result
from equipoise.cli.main import app
from equipoise.errors import RunError

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from equipoise import Task

def accuracy(labels, scores):
    return float((scores.argmax(-1) == labels).mean())

def task(seed, data):
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    torch.manual_seed(seed)
    model = nn.Linear(8, 2)
    return Task(name="line", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
                train=data, val=data, test=data, steps=30, eval_every=15, margin=0.02,
                loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]),
                metric=accuracy, metric_name="accuracy")
"""


def _compare(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "line.py").write_text(TASK)
    command = [sys.executable, "-m", "equipoise", "compare", "line.py:task", "--precision", "fp32", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_json_is_one_object_with_the_frozen_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = _compare(tmp_path, "--json", "--check", "--repeats", "1", "--with-autocast", "--out", "result")
    assert done.returncode == INCONCLUSIVE, done.stderr
    shown = json.loads(done.stdout)
    assert {"verdict", "speedup", "autocast_speedup", "metric", "formats", "report"} <= set(shown)
    assert set(shown["speedup"]) == set(shown["autocast_speedup"]) == {"median", "low", "high"}
    assert set(shown["metric"]) == {"name", "fp32", "plan", "difference", "low", "high", "margin"}
    assert (shown["verdict"], shown["formats"]) == ("inconclusive", {"fp32": 1})
    assert "seed 0, test: fp32 " in done.stderr
    assert (tmp_path / shown["report"]).stat().st_size > 10_000
    names = {path.name for path in (tmp_path / "result").iterdir()}
    assert names >= {
        "comparison.json",
        "plan.toml",
        "machine.json",
        "report.html",
        "report.json",
        "predictions",
    }
    tables = sorted(path.name for path in (tmp_path / "result" / "predictions").iterdir())
    assert tables == ["0-autocast.csv", "0-fp32.csv", "0-plan.csv"]
    kept = json.loads((tmp_path / "result" / "comparison.json").read_text())
    assert kept["repeat"].startswith("equipoise compare line.py:task --repeats 1 --seed 0")


@pytest.mark.parametrize(
    "words", [["--margin", "much"], ["--repeats", "0"], ["--metric", "auc"], ["--plan", "no.toml"]]
)
def test_a_users_mistake_is_one_line_and_exit_code_2(tmp_path: Path, words: list[str]) -> None:
    done = _compare(tmp_path, *words, "--out", "result")
    assert (done.returncode, done.stdout) == (2, "")
    assert words[0].strip("-") in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "result").exists()


def test_exit_codes() -> None:
    assert (EXIT_OF, INCONCLUSIVE) == ({"not-worse": 0, "worse": 3}, 4)


def _result(**changes: Any) -> dict[str, Any]:
    arm = {
        "metric": {"mean": 0.91, "low": 0.9, "high": 0.92}, "samples_per_s": {"median": 1230.0},
        "time_to_metric_s": 12.0, "peak_mem_bytes": 2**30, "setup_s": 0.5,
    }  # fmt: skip
    stopped = {**arm, "metric": {"mean": None, "low": None, "high": None}, "time_to_metric_s": None}
    return {
        "task": "text", "seeds": [0, 1, 2], "helped": "", "notes": ["A note [bold]."], "verdict": "not-worse",
        "reason": "At worst equal.", "formats": {"bf16": 6, "fp32": 2},
        "metric": {"name": "auc", "fp32": 0.91, "plan": 0.91, "difference": 0.0, "low": -0.001, "high": 0.001,
                   "margin": 0.01, "higher_is_better": True},
        "speedup": {"median": 1.9, "low": 1.8, "high": 2.0},
        "autocast_speedup": {"median": 1.5, "low": 1.4, "high": 1.6},
        "arms": {"fp32": arm, "plan": arm, "autocast": stopped}, **changes,
    }  # fmt: skip


def test_the_table_has_each_figure_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(_result())
    out = capsys.readouterr().out
    figures = ("0.910", "1,230", "1.90×", "12.0", "1.00", "500", "6 layers in bf16")
    for text in ("FP32", "Plain autocast", "Plan", "A note [bold].", "not-worse. At worst equal.", *figures):
        assert text in out, text
    assert re.search(r"0\.900* to 0\.920*", out)
    two = {name: _result()["arms"][name] for name in ("fp32", "plan")}
    print_result(_result(verdict=None, autocast_speedup=None, arms=two))
    out = capsys.readouterr().out
    assert "Verdict: none." in out
    assert "autocast" not in out


def test_a_speed_that_proves_nothing_is_not_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    noisy = {"median": 1.04, "low": 0.67, "high": 2.58, "trusted": False}
    print_result(_result(speedup=noisy))
    out = capsys.readouterr().out
    assert "1.04×" not in out and "can't tell its speed (95 % interval 0.67× to 2.58×)" in out
    assert "1.50×" in out  # plain autocast's is as it was measured


def test_a_time_limit_is_written_as_for_train(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def run(task: str, **settings: object) -> None:
        asked.update(settings)
        raise RunError("enough")

    monkeypatch.setattr("equipoise.comparison.compare", run)
    words = ["compare", "text", "--max-time"]
    CliRunner().invoke(app, [*words, "1.5m"])
    assert asked["max_time"] == 90.0
    asked.clear()
    assert CliRunner().invoke(app, [*words, "soon"]).exit_code
    assert not asked


def test_what_helped_is_the_first_line_where_no_format_pays(capsys: pytest.CaptureFixture[str]) -> None:
    print_result(_result(helped="No narrow format pays. What did help: fused optimizer (1.10x)."))
    assert capsys.readouterr().out.startswith(
        "No narrow format pays. What did help: fused optimizer (1.10x).\n"
    )


def test_a_whole_loop_has_a_table_too(capsys: pytest.CaptureFixture[str]) -> None:
    arm = {
        "metric": {"mean": 0.9, "low": None, "high": None}, "samples_per_s": None, "time_to_metric_s": None,
        "peak_mem_bytes": None, "setup_s": None,
    }  # fmt: skip
    print_result(_result(arms={"fp32": arm, "plan": arm}, formats={}))
    assert "–" in capsys.readouterr().out


def test_progress_lines_say_what_happens() -> None:
    setup = {"event": "setup", "arm": "plan", "seed": 3, "number": 0, "of": 2}
    assert _line_of(setup) == "seed 3 (1 of 2): planning plan"
    assert _line_of({**setup, "number": 1}) == "seed 3 (2 of 2): setting up plan"
    assert _line_of({"event": "test", "arm": "fp32", "seed": 3, "metric": None}) == "seed 3, test: fp32 –"
    assert _line_of({"event": "round"}) == ""


def test_results_of_a_second_never_share_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("equipoise.cli.compare.time.strftime", lambda form: "20270101-120000")
    first = _new_name("pkg/my.task.py:make")
    assert first == Path("runs/compare-my-task-20270101-120000")
    first.mkdir(parents=True)
    second = _new_name("pkg/my.task.py:make")
    second.mkdir()
    assert len({first, second, _new_name("pkg/my.task.py:make")}) == 3
