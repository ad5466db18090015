"""One task in training: steps, evaluations and the whole state between them.

Enters: a Task and how it is to be trained. Leaves: trained weights, rows of steps, Evaluations, its own
state. Where: under ``run.py`` and a comparison's arm. Source: DESIGN, rule 9.

The batch is a function of the step, and evaluation runs under generators of its own; so the state is the
model's weights, the session's, and the step.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from .blame import is_users, told
from .errors import EquipoiseError, NonFiniteError, RunError, SessionError, TaskError
from .evaluation import (
    Evaluation,
    first_nonfinite,
    judge,
    nonfinite_message,
    out_of_memory,
    seed_everything,
    undisturbed,
)
from .policy import Plan
from .records import StepReport
from .session import Session
from .step.feed import Feed, epoch_order
from .task import Task

SAMPLED_STEPS = 20
"""At least this many steps of a task's default run say where their time went."""


class Stopped(Exception):
    """Someone asked to stop while a split was evaluated; nothing of the training has changed."""


class ReadersGone(TaskError):
    """A process that reads the data ended by itself; no step is half done."""


def never() -> bool:
    """No one asks to stop."""
    return False


def pick_device(name: str) -> torch.device:
    """``auto``: cuda, xpu, mps or cpu, the first that is there; else the one named.

    Raises:
        RunError: the device isn't there.
    """
    there = [kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available()] + ["cpu"]
    if name == "auto":
        return torch.device(there[0])
    if name.split(":")[0] not in there:
        raise RunError(f"device {name!r} isn't there; this machine has {', '.join(there)}")
    return torch.device(name)


class Trainer:
    """One task in training: ``prepare``, ``advance``, ``evaluate``, and its whole state.

    Args:
        task: what is trained; its model is moved to the device, in place.
        seed: of the order of the data, and of everything drawn in training.
        precision: as for a Session.
        emulate: as for a Session.
        plan: as for a Session.
        workers: processes that read the data; 0 reads them here.
        plan_time_s: as for a Session.
        device: ``auto`` or torch's name of one.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        precision: Any = "auto",
        emulate: bool = False,
        plan: Plan | str | None = None,
        workers: int = 0,
        plan_time_s: float | None = None,
        device: str = "auto",
    ) -> None:
        self.task, self.seed, self.workers = task, seed, workers
        self.device = pick_device(device)
        task.model.to(self.device)
        if not task.model.training:
            task.model.train()  # not always: a part that the task froze by eval() stays so
        self.session = Session(
            task.model, task.optimizer, precision=precision, emulate=emulate, plan=plan,
            lr_scheduler=task.lr_scheduler, plan_time_s=plan_time_s,
            report_every=max(1, min(50, task.steps // SAMPLED_STEPS)),
        )  # fmt: skip
        self.step = 0
        """Batches trained on, skipped ones too."""
        self.time_s = 0.0
        """Seconds spent in :meth:`advance`."""
        self.samples = 0
        """Cases trained on, with repeats."""
        self._feed = self._feed_of("train", workers)
        self._eval_feeds: dict[str, Feed] = {}
        self._eval_batch = task.eval_batch_size or 4 * task.batch_size
        self._batches: Iterator[Any] | None = None
        self._source: Any = None
        self._readers_gone: RuntimeError | None = None
        # What making the task drew doesn't decide what training draws.
        seed_everything(seed)

    def _feed_of(self, split: str, workers: int) -> Feed:
        return Feed(getattr(self.task, split), batch_size=self.task.batch_size, seed=self.seed,
                    workers=workers, collate=self.task.collate)  # fmt: skip

    def prepare(self) -> Plan:
        """Plan now, on the first batch; weights and generators are as before.

        Raises:
            TaskError: the first batch holds a NaN, or there is no memory for one step.
        """
        if self.session.plan is None:
            with self._explained("planning"):
                first = next(iter(self._feed_of("train", 0).batches(0)))
                self._refuse_nonfinite(first, 1)
                (batch,) = self.session.feed([first])
                self.session.prepare(batch, self.task.loss)
            seed_everything(self.seed)
        if self.session.plan is None:
            raise RunError("the session made no plan; name a format with --precision")
        return self.session.plan

    def advance(self, steps: int) -> list[dict[str, Any]]:
        """Train ``steps`` steps.

        Returns:
            a row each: {step, loss, skipped, scale, time_s since training began, grad_norm?, parts?}. Values
            are read from the device after the last of these steps.

        Raises:
            TaskError: a batch holds a NaN, can't be read, or needs more memory than there is.
            NonFiniteError: the very first loss is not finite, and not by its data.
            StallError: training stands still.
            ReadersGone: a process that reads the data ended; when some steps were done before, these are
                returned, and the next call raises.
        """
        task, session = self.task, self.session
        reports: list[tuple[StepReport, float]] = []
        began = time.perf_counter() - self.time_s
        with self._explained(f"training after step {self.step}"):
            for _ in range(steps):
                batch = self._next()
                if batch is None:
                    break
                with session.autocast():
                    loss = task.loss(task.model, batch)
                try:
                    report = session.step(loss, max_grad_norm=task.max_grad_norm)
                except NonFiniteError:
                    self._blame(self.step + len(reports) + 1)
                    raise
                reports.append((report, time.perf_counter() - began))
            if self.device.type != "cpu":
                torch.accelerator.synchronize()
        self.time_s = time.perf_counter() - began
        if not reports and self._readers_gone is not None:
            raise self._gone(self._readers_gone) from self._readers_gone
        rows = []
        for report, time_s in reports:
            self.step += 1
            self.samples += self._size_of(self.step)
            row = report.as_dict()
            parts = {"parts": row.pop("parts")} if "parts" in row else {}
            rows.append({**row, "step": self.step, "scale": float(row["scale"]), "time_s": time_s, **parts})
            if row["skipped"] or (row["loss"] is not None and row["loss"] - row["loss"] != 0):
                self._blame(self.step)
        return rows

    def _next(self) -> Any:
        """The next batch; None when the processes that read the data are gone."""
        if self._batches is None:
            self._source = self._feed.batches(self.step)
            self._batches = iter(self.session.feed(self._source))
        try:
            return None if self._readers_gone else next(self._batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # "Caught ... in" is the data set's own
                raise
            self._readers_gone = error
            return None

    def evaluate(self, split: str, stop: Callable[[], bool] = never) -> Evaluation:
        """Score and judge a split; weights, modes and generators are as before.

        Where a batch doesn't fit into memory it is halved, here and from now on.

        Raises:
            TaskError: a case can't be read, holds a NaN, doesn't fit into memory alone, or can't be judged.
            NonFiniteError: a score is NaN.
            Stopped: ``stop`` said so.
        """
        began = time.perf_counter()
        with undisturbed(self.task.model, self.seed), self._explained(f"scoring {split}"):
            while True:
                try:
                    labels, scores = self._score(split, stop)
                    break
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    if self._eval_batch == 1:
                        raise TaskError(
                            f"task {self.task.name!r}: one case of {split} doesn't fit into memory: {error}"
                        ) from error
                self._eval_batch //= 2
            return judge(self.task, split, labels.numpy(), scores.numpy(), time.perf_counter() - began)

    def _score(self, split: str, stop: Callable[[], bool]) -> tuple[torch.Tensor, torch.Tensor]:
        task = self.task
        if split not in self._eval_feeds:
            self._eval_feeds[split] = self._feed_of(split, self.workers)
        labels, scores, done = [], [], 0
        batches = iter(self._eval_feeds[split].ordered(self._eval_batch))
        while (batch := self._next_of(batches, stop)) is not None:
            if stop():
                raise Stopped
            (moved,) = self.session.feed([batch])
            with self.session.autocast():
                scores.append(task.scores_of(moved))
            labels.append(task.labels_of(moved))
            if bool(torch.isnan(scores[-1]).any()) and (row := first_nonfinite(batch)) is not None:
                raise TaskError(nonfinite_message(task, split, done + row))
            done += len(scores[-1])
        return torch.cat(labels), torch.cat(scores)

    def _next_of(self, batches: Iterator[Any], stop: Callable[[], bool]) -> Any:
        """The next batch of an evaluation; None after the last."""
        try:
            return next(batches, None)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # "Caught ... in" is the data set's own
                raise
            if stop():
                raise Stopped from error  # the signal that stops this process has ended them
            raise self._gone(error) from error

    def _gone(self, error: BaseException) -> ReadersGone:
        return ReadersGone(
            f"a process that reads the data of task {self.task.name!r} ended: {error} Use fewer --workers if "
            "memory is short"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that training needs to go on from here but the model's weights."""
        return {
            "step": self.step, "time_s": self.time_s, "samples": self.samples, "eval_batch": self._eval_batch,
            "session": self.session.state_dict(),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; the model has its weights already."""
        self._drop_batches()
        self.step, self.time_s, self.samples = state["step"], state["time_s"], state["samples"]
        self._eval_batch = state["eval_batch"]
        self.session.load_state_dict(state["session"])

    def close(self) -> None:
        """End the processes that read data."""
        self._drop_batches()
        for feed in self._eval_feeds.values():
            feed.close()
        self._eval_feeds.clear()

    def _drop_batches(self) -> None:
        for batches in (self._batches, self._source):
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        self._batches = self._source = None

    def _cases_of(self, step: int) -> tuple[int, int, int]:
        """Epoch, first and last position in it of the batch that makes step number ``step`` (from 1)."""
        epoch, batch = divmod(step - 1, self._feed.steps_per_epoch)
        first = batch * self._feed.batch_size
        return epoch, first, min(first + self._feed.batch_size, self._feed.samples)

    def _size_of(self, step: int) -> int:
        _, first, last = self._cases_of(step)
        return last - first

    def _blame(self, step: int) -> None:
        """A step was skipped or its loss not finite: look whether its data are to blame."""
        self._refuse_nonfinite(next(iter(self._feed_of("train", 0).batches(step - 1))), step)

    def _refuse_nonfinite(self, batch: Any, step: int) -> None:
        row = first_nonfinite(batch)
        if row is not None:
            epoch, first, last = self._cases_of(step)
            order = epoch_order(self._feed.samples, self.seed, epoch)
            case = int(order[first + row]) if first + row < last else None
            raise TaskError(nonfinite_message(self.task, "train", case))

    @contextlib.contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Turn what the task's own code and data are to blame for, and a lack of memory, into a TaskError."""
        try:
            yield
        except SessionError as error:  # a misuse by the task: what it gave as loss, or did to gradients
            raise TaskError(f"task {self.task.name!r}: {doing} failed: {error}") from error
        except (EquipoiseError, Stopped):
            raise
        except (Exception, SystemExit) as error:
            name, size = self.task.name, self.task.batch_size
            if out_of_memory(error):
                raise TaskError(
                    f"task {name!r}: a training step with batch_size {size} doesn't fit into memory: make "
                    f"the task's batch_size smaller ({str(error).splitlines()[0]})"
                ) from error
            if "out of bounds" in str(error):
                raise TaskError(
                    f"task {name!r}: step {self.step + 1} or one soon after it reads out of bounds: "
                    f"{told(error)}. Labels must be from 0 to the number of classes - 1; check the data"
                ) from error
            if str(error).startswith("DataLoader worker"):  # torch tells of it amid whatever runs
                raise self._gone(error) from error
            if is_users(error):
                raise TaskError(f"task {name!r}: {doing} failed: {told(error)}") from error
            raise
