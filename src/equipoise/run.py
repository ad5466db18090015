"""A Task to a run directory: plan, train, evaluate, save, go on after any stop.

Enters: a Task and what was asked of the run. Leaves: a run directory (see ``rundir.py``) and a RunResult.
Where: under ``equipoise train``. Source: DESIGN, rule 9.

A run is a function of its configuration, and a checkpoint holds all that a step changes: weights, the
session's state, the position in the data, the evaluations, the length of each JSONL. So a run that was
stopped anywhere and resumed ends with the same bits as one that was not.
"""

import platform
import shlex
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .config import EXACT, NOT_EXACT, RunConfig
from .errors import EquipoiseError, TaskError
from .evaluation import Evaluation, seed_everything
from .journal import Journal
from .records import Machine
from .rundir import COSTS, MACHINE, METRICS, PLAN, RUN, RunDirectory, refuse_used
from .task import Task, TaskFunction
from .trainer import ReadersGone, Stopped, Trainer, never, pick_device
from .watch.files import Disk
from .watch.snapshot import load_weights

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""``on_event(kind, facts)``: ``start``, ``planned``, ``progress``, ``evaluated``, ``saved``, ``notice``."""

CHECKPOINT_EVERY_S = 30.0
CHECKPOINT_SHARE = 0.01
"""Of a run so long that 30 s are less than this share of it, this share may be lost instead."""

_LOOK_EVERY_S = 0.25
"""About how often a run looks up from its steps: for a stop, the clock, a checkpoint."""
_MOST_STEPS = 50
_ARM = "plan"
"""The arm under which a run's predictions are kept."""


def silent(kind: str, facts: Mapping[str, Any]) -> None:
    """No one is told how it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run went."""

    directory: Path
    finished: bool
    """False when it was stopped: it can be resumed."""
    step: int
    metrics: Mapping[str, Any]
    """The content of ``metrics.json``."""
    was_finished: bool = False
    """There was nothing left to do when it was resumed."""


class _Run:
    """One process's share of a run: from a start or a checkpoint to the end or a stop."""

    def __init__(
        self, trainer: Trainer, journal: Journal, on_event: OnEvent, stop: Callable[[], bool]
    ) -> None:
        self.trainer, self.journal, self.config = trainer, journal, journal.config
        self.on_event, self.stop = on_event, stop
        self._began = self._saved_at = time.perf_counter()
        self._eval_s = 0.0
        self._rate: list[tuple[float, int]] = [(trainer.time_s, trainer.samples)]
        self._first_step = trainer.step

    def run(self) -> RunResult:
        """Train to the end, or until someone asks to stop."""
        try:
            if not self._train():
                raise Stopped
            test = self._test()
        except Stopped:
            if self.journal.unsaved:
                self._save()
            return self._result(self.journal.put_metrics(self._facts()), finished=False)
        self.journal.put_predictions(test, f"{self.config.seed}-{_ARM}")
        return self._result(self.journal.put_metrics(self._facts(), test), finished=True)

    def _result(self, metrics: Mapping[str, Any], finished: bool) -> RunResult:
        return RunResult(directory=self.journal.directory.path, finished=finished, step=self.trainer.step,
                         metrics=metrics)  # fmt: skip

    def _train(self) -> bool:
        """Steps, evaluations and checkpoints; False when asked to stop."""
        trainer, every = self.trainer, self.trainer.task.eval_every
        while not self.stop():
            ended = trainer.step >= self.config.steps or self._time_is_over()
            due = trainer.step > 0 and (ended or trainer.step % every == 0)
            if due and self.journal.evaluated_step != trainer.step:
                self._save_if_due(ahead_s=self._eval_s)
                self._evaluate()
            if ended:
                if self.journal.unsaved:
                    self._save()
                return True
            self._save_if_due()
            to_evaluation = every - trainer.step % every
            try:
                rows = trainer.advance(min(self._chunk(), to_evaluation, self.config.steps - trainer.step))
            except ReadersGone:
                if self.stop():
                    break  # the signal that stops this process has ended them
                raise
            self.journal.add_rows(rows)
            self.journal.put_decisions([d.as_dict() for d in trainer.session.decisions])
            self._progress(rows[-1])
        return False

    def _chunk(self) -> int:
        """Steps until the run looks up again."""
        steps = self.trainer.step
        if steps == 0 or self.trainer.time_s <= 0:
            return 1
        return max(1, min(_MOST_STEPS, int(_LOOK_EVERY_S * steps / self.trainer.time_s)))

    def _elapsed_s(self) -> float:
        return self.journal.elapsed_s + time.perf_counter() - self._began

    def _time_is_over(self) -> bool:
        limit = self.config.max_time
        return limit is not None and self.trainer.step > 0 and self._elapsed_s() >= limit

    def _save_if_due(self, ahead_s: float = 0.0) -> None:
        """Write a checkpoint when more than a run may lose would be lost in ``ahead_s`` seconds."""
        if not self.journal.unsaved:
            return
        limit_s = self.config.checkpoint_every
        if limit_s is None:
            whole_s = self._elapsed_s() * self.config.steps / max(self.trainer.step, 1)
            limit_s = max(CHECKPOINT_EVERY_S, CHECKPOINT_SHARE * whole_s)
        if time.perf_counter() - self._saved_at + ahead_s >= limit_s:
            self._save()

    def _save(self) -> None:
        self.journal.save(self.trainer.state_dict(), self._elapsed_s())
        self._saved_at = time.perf_counter()
        self.on_event("saved", {"step": self.trainer.step})

    def _evaluate(self) -> None:
        trainer, journal = self.trainer, self.journal
        evaluation = trainer.evaluate("val", self.stop)
        self._eval_s = evaluation.time_s
        best = journal.add_evaluation(trainer.step, trainer.time_s, evaluation)
        journal.put_metrics(self._facts())
        self.on_event("evaluated", {"step": trainer.step, "metric": evaluation.metric, "best": best,
                                    "extra": evaluation.extra})  # fmt: skip

    def _test(self) -> Evaluation:
        """The test split, read this once, with the weights that were best on ``val``."""
        weights, source = self.journal.best_weights()
        load_weights(self.trainer.task.model, weights, source)
        return self.trainer.evaluate("test", self.stop)

    def _facts(self) -> dict[str, Any]:
        trainer, plan = self.trainer, self.trainer.session.plan
        rate = trainer.samples / trainer.time_s if trainer.time_s > 0 else None
        return {"steps": trainer.step, "time_s": trainer.time_s, "samples_per_s": rate,
                "formats": {} if plan is None else plan.counts()}  # fmt: skip

    def _progress(self, row: Mapping[str, Any]) -> None:
        trainer, journal = self.trainer, self.journal
        self._rate = [*self._rate[-19:], (trainer.time_s, trainer.samples)]
        (t0, n0), (t1, n1) = self._rate[0], self._rate[-1]
        here = trainer.step - self._first_step
        left_s = (time.perf_counter() - self._began) / here * (self.config.steps - trainer.step)
        if self.config.max_time is not None:
            left_s = min(left_s, max(0.0, self.config.max_time - self._elapsed_s()))
        self.on_event("progress", {
            "step": trainer.step, "steps": self.config.steps, "loss": row["loss"], "left_s": left_s,
            "metric": journal.evals[-1]["metric"] if journal.evals else None,
            "samples_per_s": (n1 - n0) / (t1 - t0) if t1 > t0 else None,
        })  # fmt: skip


def train(make: TaskFunction, config: RunConfig, out: Path, *, on_event: OnEvent = silent,
          stop: Callable[[], bool] = never, disk: Disk | None = None) -> RunResult:  # fmt: skip
    """A new run in a new directory.

    Nothing is written before the task, the plan file and the place have been found good.

    Args:
        make: makes the task from the configuration's seed and data.
        config: what is asked; ``steps`` 0 means the task's own number, ``device`` may be ``auto``.
        out: the directory.
        on_event: is told how it goes.
        stop: asked between steps; when it says True the run is saved and ends.
        disk: the operations that change the disk.

    Raises:
        RunError: the directory is used or can't be written.
        TaskError: the task or its data can't be used.
        StallError: training stands still.
    """
    refuse_used(out)
    task = _make_task(make, config)
    config = _completed(config, task)
    trainer = Trainer(task, seed=config.seed, precision=config.precision, emulate=config.emulate,
                      plan=config.plan, workers=config.workers, device=config.device)  # fmt: skip
    directory = RunDirectory.create(out, disk or Disk())
    try:
        directory.put_text(RUN, config.to_toml())
    except BaseException:
        directory.close()
        raise
    return _carry_on(trainer, Journal(directory, task, config), on_event, stop)


def resume(path: Path, resolve: Callable[[str], TaskFunction], *, on_event: OnEvent = silent,
           stop: Callable[[], bool] = never, disk: Disk | None = None) -> RunResult:  # fmt: skip
    """Go on with a run from its last complete checkpoint, after any stop; never plans again.

    Args:
        path: the run directory.
        resolve: gives the function that makes the task of a name.
        on_event: is told how it goes.
        stop: as for :func:`train`.
        disk: as for :func:`train`.

    Raises:
        RunError: not a run directory, of another version, held by another process, or of another model.
    """
    directory = RunDirectory.reopen(path, disk or Disk())
    try:
        config = RunConfig.load(path / RUN)
        metrics = directory.read_json(METRICS)
        if metrics.get("finished"):
            directory.close()
            return RunResult(directory=path, finished=True, step=metrics["steps"], metrics=metrics,
                             was_finished=True)  # fmt: skip
        task = _make_task(resolve(config.task), config)
        journal = Journal(directory, task, config)
        state, notes = journal.read()
        plan = path / PLAN
        trainer = Trainer(task, seed=config.seed, precision=config.precision, emulate=config.emulate,
                          workers=config.workers,
                          plan=str(plan) if plan.exists() else config.plan, device=config.device)  # fmt: skip
        if state is not None:
            trainer.load_state_dict(state)
        for note in [*notes, *_differences(config, journal)]:
            on_event("notice", {"text": note})
    except BaseException:
        directory.close()
        raise
    return _carry_on(trainer, journal, on_event, stop)


def _carry_on(trainer: Trainer, journal: Journal, on_event: OnEvent, stop: Callable[[], bool]) -> RunResult:
    directory, config = journal.directory, journal.config
    try:
        on_event("start", {"task": trainer.task.name, "about": trainer.task.about, "step": trainer.step,
                           "steps": config.steps, "run": directory.path,
                           "metric": trainer.task.metric_name})  # fmt: skip
        journal.begin()
        if not (directory.path / PLAN).exists():
            plan = trainer.prepare()
            journal.setup_s = trainer.session.setup_s
            journal.elapsed_s += journal.setup_s  # a time limit is on the whole run
            directory.put_json(MACHINE, _machine(trainer).as_dict())
            if trainer.session.timings:
                directory.put_json(COSTS, trainer.session.timings)
            directory.put_text(PLAN, plan.to_toml())
        plan = trainer.prepare()
        on_event("planned", {"plan": plan, "setup_s": journal.setup_s})
        return _Run(trainer, journal, on_event, stop).run()
    finally:
        trainer.close()
        journal.close()


def _make_task(make: TaskFunction, config: RunConfig) -> Task:
    seed_everything(config.seed)
    try:
        task = make(config.seed, config.data)
    except EquipoiseError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise TaskError(
            f"making the task {config.task!r} failed: {type(error).__name__}: {error} "
            f"({last.filename}, line {last.lineno})"
        ) from error
    if not isinstance(task, Task):
        raise TaskError(f"{config.task!r} gave a {type(task).__name__}; it must return an equipoise.Task")
    return task


def _completed(config: RunConfig, task: Task) -> RunConfig:
    """The configuration with nothing left to guess."""
    names = ("equipoise", "torch", "numpy")
    return replace(
        config,
        steps=config.steps or task.steps,
        device=str(pick_device(config.device)),
        threads=torch.get_num_threads(),
        repeat=config.repeat or _command(config),
        resume=EXACT if config.max_time is None else f"{NOT_EXACT}: a time limit decides where it ends",
        versions={"python": platform.python_version(), **{name: metadata.version(name) for name in names}},
    )


def _command(config: RunConfig) -> str:
    words = ["equipoise", "train", config.task, "--seed", str(config.seed)]
    for option in ("data", "precision", "plan", "workers", "max_time"):
        value = getattr(config, option)
        if value not in (None, 0):
            words += [f"--{option.replace('_', '-')}", str(value)]
    words += ["--emulate"] * config.emulate
    return shlex.join(words + (["--max-steps", str(config.steps)] if config.steps else []))


def _differences(config: RunConfig, journal: Journal) -> list[str]:
    """What has changed since the run began and may change its bits; kept in the journal."""
    now = {"threads": str(torch.get_num_threads()), "torch": metadata.version("torch")}
    then = {"threads": str(config.threads), "torch": config.versions.get("torch", "unknown")}
    found = [f"{name} is {now[name]}, was {then[name]}" for name in now if now[name] != then[name]]
    journal.inexact += [text for text in found if text not in journal.inexact]
    return [f"{text}: the run goes on, but its last digits may differ" for text in found]


def _machine(trainer: Trainer) -> Machine:
    """The machine as planning measured it; without a measurement where the formats were named."""
    from .plan.machine import host_facts, probe

    plan, kind = trainer.session.plan, trainer.device.type
    if plan is None or plan.source in ("auto", "static"):
        return probe(quick=True, device=kind)
    facts = host_facts()
    return Machine(fingerprint="", device=kind, name=facts["cpu"], formats={}, facts=facts,
                   note="the formats were named, so nothing was measured")  # fmt: skip


__all__ = ["RunResult", "Trainer", "resume", "train"]
