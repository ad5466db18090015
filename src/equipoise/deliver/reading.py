"""What a comparison or a run left on disk, read for the report.

Enters: a directory. Leaves: plain data. Where: after the run; no torch. A file that must be there and isn't,
or can't be read, is a :class:`RunError`; a part that may be missing is left out; a torn last row of a JSONL
(a run that was killed) is passed over, and any other row that can't be read is counted and said.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import RUN_SCHEMA
from ..errors import RunError
from ..rundir import MACHINE, METRICS, PLAN, RUN, STEPS
from ..tally import SCHEMA

COMPARISON = "comparison.json"


def read(directory: Path) -> tuple[str, dict[str, Any]]:
    """("comparison" | "run", the data of the directory).

    Raises:
        RunError: no directory, neither kind of it, or a file of it that can't be read.
    """
    if not directory.is_dir():
        what = "a file" if directory.exists() else "not there"
        raise RunError(
            f"{str(directory)!r} is {what}; give the directory that `equipoise train` or `compare` wrote"
        )
    if (directory / COMPARISON).is_file():
        return "comparison", _comparison(directory)
    if (directory / RUN).is_file():
        return "run", _run(directory)
    raise RunError(
        f"{str(directory)!r} holds neither {COMPARISON} nor {RUN}, so it is neither a comparison nor a "
        "run; give the directory that `equipoise train` or `compare` wrote"
    )


def _comparison(directory: Path) -> dict[str, Any]:
    path = directory / COMPARISON
    data = _json(path)
    if data.get("schema", SCHEMA) != SCHEMA:
        raise RunError(
            f"{str(path)!r} has schema {data['schema']!r}; this version reads {SCHEMA}: compare again"
        )
    arms = data.get("arms")
    missing = [
        k for k in ("fp32", "plan") if not isinstance(arms, Mapping) or not isinstance(arms.get(k), Mapping)
    ]
    if missing:
        raise RunError(
            f"{str(path)!r} lacks the arm {' and '.join(missing)}; a comparison has both: compare again"
        )
    if not data.get("plan_toml"):
        data["plan_toml"] = _text(directory / PLAN)
    if not data.get("machine"):
        data["machine"] = _optional_json(directory / MACHINE)
    return data


def _run(directory: Path) -> dict[str, Any]:
    notes: list[str] = []
    path = directory / RUN
    try:
        asked = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{str(path)!r} can't be read: {error}; a run's report needs it") from error
    if asked.get("schema", RUN_SCHEMA) != RUN_SCHEMA:
        raise RunError(f"{str(path)!r} has schema {asked['schema']!r}; this version reads {RUN_SCHEMA}")
    machine = _optional_json(directory / MACHINE)
    steps = _rows(directory / STEPS, notes)
    metrics = _optional_json(directory / METRICS) or {}
    if not steps and not metrics:
        raise RunError(
            f"{str(directory)!r} has neither a row in steps.jsonl nor metrics.json: nothing was trained yet"
        )
    versions = (
        metrics.get("versions")
        or asked.get("versions")
        or ((machine or {}).get("facts") or {}).get("versions")
    )
    return {
        "asked": asked,
        "machine": machine,
        "plan_toml": _text(directory / PLAN),
        "steps": steps,
        "metrics": metrics,
        "versions": dict(versions) if isinstance(versions, Mapping) else {},
        "repeat": str(asked.get("repeat") or ""),
        "notes": notes,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{str(path)!r} can't be read: {error}; write it anew or remove it") from error
    if not isinstance(data, dict):
        raise RunError(f"{str(path)!r} holds a {type(data).__name__}, not an object; write it anew")
    return data


def _optional_json(path: Path) -> dict[str, Any] | None:
    return _json(path) if path.is_file() else None


def _rows(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    lines = [line for line in _text(path).split("\n") if line.strip()]
    rows, bad = [], 0
    for index, line in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            bad += index < len(lines) - 1
            continue
        if isinstance(row, dict):
            rows.append(row)
        else:
            bad += 1
    if bad:
        notes.append(f"{bad} of {len(lines)} rows of {path.name} can't be read and are left out.")
    return rows
