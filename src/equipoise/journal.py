"""What a run has done so far, kept in its directory: rows, evaluations, best weights, checkpoints, metrics.

Enters: rows of steps, evaluations, the trainer's state. Leaves: the run directory's files, and all of it read
back at a resume. Where: between steps, under ``run.py``.

What is promised by a file is on the disk before the file has its name: rows before the checkpoint that counts
them, best weights before the checkpoint that refers to them.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .config import EXACT, NOT_EXACT, RunConfig
from .errors import RunError
from .evaluation import Evaluation
from .rundir import DECISIONS, METRICS, STEPS, RunDirectory
from .task import Task
from .watch import snapshot
from .watch.files import Rows, make_directories

METRICS_SCHEMA = 1


class Journal:
    """The record of one run; closed by :meth:`close`."""

    def __init__(self, directory: RunDirectory, task: Task, config: RunConfig) -> None:
        self.directory, self.task, self.config = directory, task, config
        self.evals: list[dict[str, Any]] = []
        """Evaluations on ``val``, in order: {step, time_s, metric, extra?}."""
        self.best: dict[str, Any] | None = None
        """The best of them, and the file that has its weights: {step, metric, file}."""
        self.inexact: list[str] = [] if config.resume == EXACT else [config.resume.partition(": ")[2]]
        """Why the bits of this run may differ from those of one that was never stopped."""
        self.resumes = 0
        self.elapsed_s = 0.0
        """Seconds that earlier processes gave to this run, up to the checkpoint."""
        self.setup_s = 0.0
        self.unsaved = False
        """Whether anything was added since the last checkpoint."""
        self._rows: Rows | None = None
        self._decisions = 0

    # -- at the start --

    def read(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Load the newest complete checkpoint: the weights into the task's model.

        Returns:
            the trainer's state, None when there was no checkpoint; and what is to be said of damaged ones.

        Raises:
            RunError: the task is not the one that was trained here, or no checkpoint can be used.
        """
        saved, notes = snapshot.load_newest(self.directory.disk, self.directory.checkpoints)
        if saved is None:
            return None, notes
        if saved.get("task") != self._identity():
            changed = next(key for key, value in self._identity().items() if saved["task"].get(key) != value)
            raise RunError(
                f"the checkpoints of {str(self.directory.path)!r} were made with {changed} "
                f"{saved['task'].get(changed)!r}, the task now has {self._identity()[changed]!r}: bring the "
                "task and its data back to what they were, or start a new run"
            )
        source = f"the checkpoint of step {saved['trainer']['step']}"
        snapshot.load_weights(self.task.model, saved["model"], source)
        for name in ("evals", "best", "inexact", "elapsed_s", "setup_s"):
            setattr(self, name, saved[name])
        self.resumes = saved["resumes"] + 1
        self._rows = self.directory.rows(STEPS, saved["offsets"][STEPS])
        trainer: dict[str, Any] = saved["trainer"]
        return trainer, notes

    def begin(self) -> None:
        """Start with no rows, unless :meth:`read` found some to keep."""
        make_directories(self.directory.disk, self.directory.checkpoints)
        if self._rows is None:
            self._rows = self.directory.rows(STEPS, 0)

    def _identity(self) -> dict[str, Any]:
        """What must be alike for a resume to be the same run; the model is compared name by name."""
        return {
            "optimizer": type(self.task.optimizer).__name__,
            "batch_size": self.task.batch_size,
            "number of training cases": len(self.task.train),  # type: ignore[arg-type]
        }

    # -- during the run --

    def add_rows(self, rows: list[dict[str, Any]]) -> None:
        """Take the rows of some steps."""
        for row in rows:
            self._open_rows.add(row)
        self.unsaved = True
        self._open_rows.write()

    def put_decisions(self, decisions: list[dict[str, Any]]) -> None:
        """Write all decisions up to now, where there are more than were written."""
        if len(decisions) != self._decisions:
            self.directory.put_rows(DECISIONS, decisions)
            self._decisions = len(decisions)

    @property
    def _open_rows(self) -> Rows:
        if self._rows is None:
            raise RunError("the journal takes rows after begin()")
        return self._rows

    @property
    def evaluated_step(self) -> int:
        """The step of the last evaluation; 0 when there was none."""
        return int(self.evals[-1]["step"]) if self.evals else 0

    def add_evaluation(self, step: int, time_s: float, evaluation: Evaluation) -> bool:
        """Take an evaluation on ``val``; when it is the best so far, keep the model's weights.

        Returns:
            whether it is the best.
        """
        row = {"step": step, "time_s": time_s, "metric": evaluation.metric}
        self.evals.append({**row, "extra": evaluation.extra} if evaluation.extra else row)
        self.unsaved = True
        sign = 1 if self.task.higher_is_better else -1
        better = self.best is None or sign * evaluation.metric > sign * self.best["metric"]
        if better:
            path = self.directory.checkpoints / f"best-{step:08d}.pt"
            snapshot.save(self.directory.disk, path, {"model": self.task.model.state_dict()}, step=step)
            self.best = {"step": step, "metric": evaluation.metric, "file": f"checkpoints/{path.name}"}
        return better

    def save(self, trainer: Mapping[str, Any], elapsed_s: float) -> None:
        """Write a checkpoint, then remove what it makes needless."""
        offsets = {STEPS: self._open_rows.sync()}
        step = trainer["step"]
        state = {
            "trainer": trainer, "model": self.task.model.state_dict(), "offsets": offsets,
            "task": self._identity(), "evals": self.evals,
            "best": self.best, "inexact": self.inexact, "resumes": self.resumes, "elapsed_s": elapsed_s,
            "setup_s": self.setup_s,
        }  # fmt: skip
        folder, disk = self.directory.checkpoints, self.directory.disk
        best = None if self.best is None else self.best["file"].removeprefix("checkpoints/")
        # A name of its own: one that replaced another would, for a moment, not be what its manifest says.
        path = folder / f"step-{step:08d}-{len(self.evals):04d}.pt"
        snapshot.save(disk, path, state, step=step, best=best)
        snapshot.prune(disk, folder)
        self.unsaved = False

    def best_weights(self) -> tuple[Mapping[str, Any], str]:
        """The weights of the best evaluation, and the file that they come from."""
        if self.best is None:
            raise RunError("nothing was evaluated yet, so there are no best weights")
        path = self.directory.path / self.best["file"]
        weights: Mapping[str, Any] = snapshot.load(path)["model"]
        return weights, path.name

    # -- at the end --

    @property
    def resume_label(self) -> str:
        """``exact``, or ``resumes, not exact`` with the reasons."""
        return f"{NOT_EXACT}: {'; '.join(self.inexact)}" if self.inexact else EXACT

    def put_metrics(self, facts: Mapping[str, Any], test: Evaluation | None = None) -> dict[str, Any]:
        """Write ``metrics.json``: the evaluations so far, and with ``test`` the result."""
        task = self.task
        metric: dict[str, Any] = {"name": task.metric_name, "higher_is_better": task.higher_is_better}
        if task.margin is not None:
            metric |= {"margin": task.margin, "margin_relative": task.margin_relative}
        metrics: dict[str, Any] = {
            "schema": METRICS_SCHEMA, "task": task.name, "about": task.about, "metric": metric,
            "finished": test is not None, "evals": self.evals, "best": self.best, **facts,
            "setup_s": self.setup_s, "batch_size": task.batch_size, "resume": self.resume_label,
            "resumes": self.resumes, "peak_mem_bytes": peak_mem_bytes(), "versions": self.config.versions,
        }  # fmt: skip
        if test is not None:
            metric |= {"value": test.metric, "split": "test"}
            metrics |= {"test": test.metric, "extra": test.extra}
        self.directory.put_json(METRICS, metrics)
        return metrics

    def put_predictions(self, test: Evaluation, stem: str) -> None:
        """Write the test cases' scores."""
        subgroup = (self.task.subgroup or {}).get("test")
        self.directory.put_predictions(stem, test.labels, test.scores, subgroup)

    def close(self) -> None:
        """Close the files and give the directory free."""
        if self._rows is not None:
            self._rows.close()
        self.directory.close()


def peak_mem_bytes() -> int | None:
    """The most memory used: the accelerator's by its allocator, else this process's; None where unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return None
    try:
        # getrusage's figure starts with the size of the parent that forked us; this one doesn't.
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    import resource

    # Most systems count in KiB, macOS in bytes.
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(size) if sys.platform == "darwin" else int(size) * 1024
