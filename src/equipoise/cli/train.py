"""``equipoise train TASK``: plan, train, evaluate, save a run; ``--resume DIR`` goes on after any stop.

Enters: the words of the command line. Leaves: a run directory with its report, the result on stdout (one JSON
object with ``--json``), progress on stderr; exit code 130 after Ctrl-C, 143 after SIGTERM, both with the run
saved. Where: the outermost layer; torch is imported when training begins.
"""

import contextlib
import json as json_module
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..config import RunConfig
from ..errors import EquipoiseError, RunError
from ..rundir import RUN, refuse_used
from .times import seconds

if TYPE_CHECKING:
    from ..run import RunResult


def train(
    task: Annotated[
        str | None,
        typer.Argument(help="A shipped name (see --list), package.module:function or file.py:function."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the model, the order of the data and all that is drawn.")] = 0,
    data: Annotated[str | None, typer.Option(help="Where the task finds its data.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run directory, new or empty; default runs/TASK-DATE.")
    ] = None,
    precision: Annotated[
        str, typer.Option(help="auto, a format such as bf16, or a policy such as 'bf16; head=fp32'.")
    ] = "auto",
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Half formats by casts there and back: their numbers, not speed."),
    ] = False,
    plan: Annotated[Path | None, typer.Option(help="A plan.toml that pins everything.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu or mps.")] = "auto",
    workers: Annotated[int, typer.Option(help="Processes that read the data; 0 reads it in this one.")] = 0,
    max_steps: Annotated[
        int | None, typer.Option(help="Length of the run in steps; default the task's.")
    ] = None,
    max_time: Annotated[
        str | None, typer.Option(help="End after this long: 90, 90s, 10m, 1.5h. A resume isn't exact then.")
    ] = None,
    checkpoint_every: Annotated[
        str | None, typer.Option(help="Time between checkpoints; default 30s, or 1 % of a long run.")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with the run in this directory; give no TASK, it knows.")
    ] = None,
    list_tasks: Annotated[bool, typer.Option("--list", help="Show the shipped tasks and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object: metric and run.")] = False,
) -> None:
    """Plan, train, evaluate and save a run; Ctrl-C saves it and says how to go on."""
    from ..tasks import names

    if list_tasks:
        for name, about in names():
            typer.echo(f"{name:16} {about}")
        return
    if resume is not None:
        _refuse_more_than_resume({
            "task": task, "seed": seed, "data": data, "out": out, "precision": precision, "emulate": emulate,
            "plan": plan,
            "device": device, "workers": workers, "max_steps": max_steps, "max_time": max_time,
            "checkpoint_every": checkpoint_every,
        })  # fmt: skip
        _finish(_resumed(resume), json)
        return
    if task is None:
        raise RunError(
            "no TASK; give a name from `equipoise train --list`, or --resume DIR to go on with a run"
        )
    if max_steps is not None and max_steps < 1:
        raise RunError(f"--max-steps is {max_steps}; it must be at least 1")
    config = RunConfig(
        task=_absolute(task, {name.partition(":")[0] for name, _ in names()}),
        seed=seed,
        data=str(Path(data).absolute()) if data and Path(data).exists() else data,
        precision=precision,
        emulate=emulate,
        plan=None if plan is None else str(plan.absolute()),
        device=device,
        workers=workers,
        steps=max_steps or 0,
        max_time=seconds("--max-time", max_time),
        checkpoint_every=seconds("--checkpoint-every", checkpoint_every),
    )
    _finish(_trained(config, out or _default_place(task)), json)


def _refuse_more_than_resume(given: dict[str, Any]) -> None:
    also = [name for name, value in given.items() if value not in (None, 0, "auto")]
    if also:
        words = ", ".join("TASK" if name == "task" else f"--{name.replace('_', '-')}" for name in also)
        raise RunError(
            f"--resume with {words}: a resumed run keeps what it was started with (it stands in {RUN}). "
            f"Leave {words} out, or start a new run"
        )


def _trained(config: RunConfig, out: Path) -> "RunResult":
    refuse_used(out)  # before torch is loaded, so that the answer comes at once
    from .. import run
    from ..tasks import resolve

    with _watched(out) as watch:
        return run.train(resolve(config.task), config, out, on_event=watch.on_event, stop=watch.asked)


def _resumed(path: Path) -> "RunResult":
    from .. import run
    from ..tasks import resolve

    with _watched(path) as watch:
        return run.resume(path, resolve, on_event=watch.on_event, stop=watch.asked)


def _finish(result: "RunResult", json: bool) -> None:
    """Report, print the result, and give the exit code."""
    metric = result.metrics["metric"]
    if json:
        typer.echo(json_module.dumps({"metric": {"value": None, **metric}, "run": str(result.directory)}))
    if not result.finished:
        _say(f"stopped at step {result.step} and saved. Go on with: {_resume_command(result.directory)}")
        raise typer.Exit(_stop_code.get("code", 130))
    if result.was_finished:
        _say(f"the run {str(result.directory)!r} is finished; start a new one with another --out")
    page = _report(result.directory)
    if json:
        return
    best = result.metrics.get("best")
    chosen = (
        f" (weights of step {best['step']}, the best on validation: {best['metric']:.4g})" if best else ""
    )
    typer.echo(f"{metric['name']} on test: {metric['value']:.4g}{chosen}")
    if result.metrics.get("resumes"):
        typer.echo(f"resumed {result.metrics['resumes']} times: {result.metrics['resume']}")
    typer.echo(f"run: {result.directory}")
    if page is not None:
        typer.echo(f"report: {page}")


def _report(directory: Path) -> Path | None:
    from ..deliver.report import render

    try:
        return render(directory)[0]
    except EquipoiseError as error:
        _say(f"no report: {error}")
        return None


def _resume_command(path: Path) -> str:
    import shlex

    return shlex.join(["equipoise", "train", "--resume", str(path)])


def _absolute(task: str, shipped: set[str]) -> str:
    """The task's text with a path that holds from any directory."""
    name, colon, path = task.partition(":")
    if name in shipped:
        return f"{name}:{Path(path).absolute()}" if path else task
    file, colon, function = task.rpartition(":")
    if file.endswith(".py") or task.endswith(".py"):
        return f"{Path(file or task).absolute()}{colon}{function if colon else ''}"
    return task


def _default_place(task: str) -> Path:
    short = task.removesuffix(":task").removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9_]+", "-", short).strip("-")[-40:].strip("-")
    return Path("runs") / f"{name or 'run'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _say(text: str) -> None:
    typer.echo(text, err=True)


_stop_code: dict[str, int] = {}
"""What the last signal asks for as exit code."""


class _Watch:
    """Signals and progress of one run."""

    def __init__(self) -> None:
        from .progress import Progress

        self._progress = Progress()
        self._asked = False
        self._trains = False
        self._process = os.getpid()

    def on_event(self, kind: str, facts: Any) -> None:
        """Show what the run tells."""
        self._trains |= kind == "planned"
        self._progress.on_event(kind, facts)

    def asked(self) -> bool:
        """Whether someone asked to stop."""
        return self._asked

    def on_signal(self, number: int, frame: Any) -> None:
        """Ask the run to stop after this step; before the first step, or asked twice, stop at once."""
        if os.getpid() != self._process:
            return  # a data worker that was forked with this handler: the run itself stops
        _stop_code["code"] = 128 + number
        if self._asked or not self._trains:
            self.close()
            raise KeyboardInterrupt  # for SIGTERM too: SystemExit is what a task's own code may raise
        self._asked = True
        if hasattr(signal, "SIGCHLD"):
            # torch's handler raises amid a step when the same signal ends a data worker. SIG_DFL in its place
            # makes Python print "ignored due to race condition" when that has happened already.
            signal.signal(signal.SIGCHLD, _let_be)
        self._progress.say("stopping after this step, then saving; once more stops at once")

    def close(self) -> None:
        """End the progress bar."""
        self._progress.close()


def _let_be(number: int, frame: Any) -> None:
    """A handler that does nothing."""


@contextlib.contextmanager
def _watched(path: Path) -> Iterator[_Watch]:
    """Progress and signals around a run; whatever ends it, what to do next is said."""
    watch = _Watch()
    before = {number: signal.signal(number, watch.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # What the task prints is not the result. The bar, too, takes stdout: it must give it back first.
        with contextlib.redirect_stdout(sys.stderr), contextlib.closing(watch):
            yield watch
    except (Exception, KeyboardInterrupt) as error:
        watch.close()
        if (path / "checkpoints").is_dir() and any((path / "checkpoints").glob("step-*.pt")):
            _say(f"what was trained is kept; go on with: {_resume_command(path)}")
        if isinstance(error, KeyboardInterrupt) and "code" in _stop_code:
            raise SystemExit(_stop_code["code"]) from None
        raise
    finally:
        watch.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.stderr.flush()
