"""A run directory: one run's files, held by one process.

Enters: a path and what a run has to keep. Leaves: the files listed below, each complete or absent. Where:
under ``run.py``; no torch. Source: flock(2).

``run.toml`` what was asked · ``machine.json`` · ``costs.json`` what was timed to plan · ``plan.toml`` ·
``steps.jsonl`` one row a step · ``decisions.jsonl`` what was changed or found on the way ·
``metrics.json`` the evaluations and the result · ``predictions/`` · ``checkpoints/`` · ``lock`` held while a
process trains in it.
"""

import csv
import io
import json
import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import RunError
from .records import finite_only
from .watch.files import Disk, Rows, explained, make_directories, put, put_json

RUN, PLAN, MACHINE, METRICS, STEPS = "run.toml", "plan.toml", "machine.json", "metrics.json", "steps.jsonl"
COSTS, DECISIONS = "costs.json", "decisions.jsonl"
_LOCK = "lock"
_HARMLESS = {_LOCK, f".{RUN}.part"}
"""What a run leaves that ended before it began."""
_MAX_SCORES = 1000
"""Columns of a predictions table; a case with more scores (a map, a sequence) is kept as an array."""


class RunDirectory:
    """The files of one run; closed by ``close`` or ``with``."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path, self.disk = path, disk
        self.checkpoints = path / "checkpoints"
        self._lock = _take_lock(path)

    @classmethod
    def create(cls, path: Path, disk: Disk) -> "RunDirectory":
        """A new directory, or an empty one, for a new run.

        Raises:
            RunError: it isn't empty, can't be made, or another process has it.
        """
        refuse_used(path)
        make_directories(disk, path)
        return cls(path, disk)

    @classmethod
    def reopen(cls, path: Path, disk: Disk) -> "RunDirectory":
        """A run's directory, to go on in it.

        Raises:
            RunError: it isn't there, or another process has it.
        """
        if not path.is_dir():
            raise RunError(
                f"there is no run directory {str(path)!r}; give the one that `equipoise train` named"
            )
        if not (path / RUN).is_file():
            raise RunError(
                f"{str(path)!r} has no {RUN}: it is not a run directory, or its run ended before it began. "
                "Start it with `equipoise train TASK --out ...`"
            )
        return cls(path, disk)

    def put_text(self, name: str, text: str) -> None:
        """Write a file whole."""
        put(self.disk, self.path / name, text.encode())

    def put_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file whole."""
        put_json(self.disk, self.path / name, value)

    def put_rows(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a JSONL file whole."""
        self.put_text(name, "".join(json.dumps(finite_only(row)) + "\n" for row in rows))

    def read_json(self, name: str) -> dict[str, Any]:
        """The content of a JSON file; nothing when there is no such file.

        Raises:
            RunError: it can't be read.
        """
        path = self.path / name
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunError(f"{str(path)!r} can't be read: {error}; remove it, it is made anew") from error
        return value if isinstance(value, dict) else {}

    def rows(self, name: str, keep: int) -> Rows:
        """A JSONL file, cut to the bytes that a checkpoint vouches for."""
        return Rows(self.disk, self.path / name, keep)

    def put_predictions(self, stem: str, labels: np.ndarray, scores: np.ndarray,
                        subgroup: Sequence[Any] | None) -> Path:  # fmt: skip
        """``predictions/STEM.csv``: case, label, score, subgroup; ``.npz`` where a case has a whole array.

        Args:
            stem: ``SEED-ARM``.
            labels: (N, ...).
            scores: (N, ...) float32; with C scores a case, the columns are ``score_0`` to ``score_{C-1}``.
            subgroup: each case's subgroup, in order.
        """
        folder = self.path / "predictions"
        make_directories(self.disk, folder)
        flat = scores.reshape(len(scores), -1)
        if labels.ndim > 1 or flat.shape[1] > _MAX_SCORES:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, labels=labels, scores=scores)
            path = folder / f"{stem}.npz"
            put(self.disk, path, buffer.getvalue())
            return path
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        width = flat.shape[1]
        names = ["score"] if width == 1 else [f"score_{i}" for i in range(width)]
        table.writerow(["case", "label", *names, "subgroup"])
        for case, (label, row) in enumerate(zip(labels.tolist(), flat, strict=True)):
            # The shortest text that gives the same float32 back.
            table.writerow([case, label, *map(str, row), "" if subgroup is None else subgroup[case]])
        path = folder / f"{stem}.csv"
        put(self.disk, path, text.getvalue().encode())
        return path

    def close(self) -> None:
        """Give the directory free."""
        self._lock.close()

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def refuse_used(path: Path) -> None:
    """Refuse a place that already holds something.

    Raises:
        RunError: the path is a file or a directory with something in it.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{str(path)!r} is a file; --out names a new or empty directory")
    if path.is_dir() and any(p.name not in _HARMLESS for p in path.iterdir()):
        what = "holds a run" if (path / RUN).exists() else "is not empty"
        raise RunError(
            f"{str(path)!r} {what}; --out names a new or empty directory. To go on with a run: "
            f"equipoise train --resume {path}"
        )


def _take_lock(path: Path) -> IO[str]:
    """An open file whose lock goes with the process, however that ends."""
    with explained(f"write in {str(path)!r}"):
        file = open(path / _LOCK, "a+", encoding="ascii")
    try:
        _lock(file)
    except OSError as error:
        file.seek(0)
        holder = file.read(30).strip()
        file.close()
        raise RunError(
            f"another process{f' ({holder})' if holder else ''} is training in {str(path)!r}; wait for it, "
            "stop it, or choose another --out"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()}\n")
    file.flush()
    _leave_to_parent(file)
    return file


_held: "weakref.WeakSet[IO[str]]" = weakref.WeakSet()
_hooked: list[bool] = []


def _leave_to_parent(file: IO[str]) -> None:
    """Keep the lock out of forked children: a data worker that outlives a killed run would still hold it."""
    _held.add(file)
    if not _hooked and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: [f.close() for f in list(_held)])
        _hooked.append(True)


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(0)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
