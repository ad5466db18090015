"""The command line, frozen: the options of each verb and the keys of ``--json``; users rest on it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from equipoise.cli.main import app
from equipoise.evidence import Verdict, judge, paired_ratio
from equipoise.records import FormatVerdict, Machine

OPTIONS = {
    "demo": {"--out"},
    "probe": {"--quick", "--fresh", "--device", "--json", "--out"},
    "train": {
        "TASK", "--seed", "--data", "--out", "--precision", "--plan", "--device", "--workers", "--max-steps",
        "--max-time", "--checkpoint-every", "--resume", "--list", "--emulate", "--json",
    },
    "compare": {
        "TASK", "--repeats", "--margin", "--metric", "--alpha", "--with-autocast", "--max-steps",
        "--max-time", "--data", "--out", "--seed", "--device", "--precision", "--plan", "--workers",
        "--emulate", "--check", "--json",
    },
    "inspect": {
        "TASK", "--steps", "--max-steps", "--format", "--bisect", "--margin", "--seed", "--data", "--device",
        "--out", "--json",
    },
    "report": {"RUNS", "--price-per-hour", "--json"},
    "init-task": {"FILE"},
}  # fmt: skip


def test_each_verb_has_exactly_its_options() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {
            option if option.startswith("-") else option.upper()
            for parameter in command.params
            for option in parameter.opts
            if option != "--help"
        }
        for name, command in commands.items()
    }
    assert found == OPTIONS


def test_compare_json_keys() -> None:
    judgement = judge([0.9, 0.91, 0.92], [0.9, 0.91, 0.92], margin=0.01)
    speed = paired_ratio([2.0, 2.1, 1.9, 2.0], [1.0, 1.0, 1.1, 1.0])
    result = {"formats": {"fp32": 3}}
    found = Verdict(judgement=judgement, speed=speed, metric_name="auc", result=result).as_json()
    assert {"verdict", "speedup", "autocast_speedup", "metric", "formats"} <= set(found)
    assert set(found["speedup"]) == {"median", "low", "high"}
    assert set(found["metric"]) == {"name", "fp32", "plan", "difference", "low", "high", "margin"}
    assert found["formats"] == {"fp32": 3}
    assert found["verdict"] == "not-worse"
    json.dumps(found, allow_nan=False)


def test_probe_json_keys() -> None:
    verdict = FormatVerdict(format="bf16", verdict="use", reason="measured", claimed=True)
    found = Machine(fingerprint="f", device="cpu", name="a CPU", formats={"bf16": verdict}).as_dict()
    assert {"fingerprint", "device", "name", "formats", "facts", "readings", "trusted", "note"} == set(found)
    assert found["formats"]["bf16"]["verdict"] == "use"
    assert {"verdict", "reason", "claimed", "emulated"} <= set(found["formats"]["bf16"])


def test_train_json_keys_and_rows_of_steps(tmp_path: Path, tmp_cache: Path) -> None:
    out = tmp_path / "run"
    words = ["train", "breast-cancer", "--max-steps", "3", "--precision", "fp32", "--json", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", *words], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"metric", "run"}
    assert {"name", "value", "higher_is_better"} <= set(found["metric"])
    assert found["run"] == str(out)
    rows = [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all({"step", "loss", "skipped", "scale"} <= set(row) for row in rows)


@pytest.mark.parametrize(
    ("verb", "word"),
    [("train", "no-task"), ("compare", "no-task"), ("inspect", "no-task"), ("report", "nowhere")],
)
def test_with_json_an_error_goes_to_stderr_alone(verb: str, word: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "equipoise", verb, word, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert word in done.stderr
    assert "Traceback" not in done.stderr
