"""``equipoise compare TASK``: FP32 against the plan, in pairs; verdict, table and report.

Enters: a task and how it is to be judged. Leaves: a comparison directory with its report; on stdout the table
and the verdict, or one JSON object; progress on stderr. Where: before a plan is trusted; no torch.
"""

import json as json_module
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from .times import seconds

EXIT_OF = {"not-worse": 0, "worse": 3}
"""What ``--check`` exits with; 4 for inconclusive and for no verdict."""
INCONCLUSIVE = 4


def compare(
    task: Annotated[
        str,
        typer.Argument(help="A shipped name (train --list), package.module:function or file.py:function."),
    ],
    repeats: Annotated[int, typer.Option(min=1, help="Seeds; fewer than 3 can't give a verdict.")] = 3,
    margin: Annotated[
        str | None,
        typer.Option(help="Loss of the metric that still counts as not worse: 0.01, or 1% of FP32's value."),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="Judge by this one of the task's metrics.")] = None,
    alpha: Annotated[float, typer.Option(help="Accepted risk of calling a worse plan not worse.")] = 0.05,
    with_autocast: Annotated[
        bool, typer.Option("--with-autocast", help="Add plain autocast as a third arm.")
    ] = False,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Steps of each run.")] = None,
    max_time: Annotated[
        str | None, typer.Option(help="Most training time of each arm and seed: 90, 90s, 10m, 1.5h.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Where the task's data lie.")] = None,
    out: Annotated[Path | None, typer.Option(help="New directory for the results.")] = None,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu or mps.")] = "auto",
    precision: Annotated[
        str, typer.Option(help="auto, a format, or a policy such as 'bf16; head=fp32'.")
    ] = "auto",
    emulate: Annotated[
        bool,
        typer.Option("--emulate", help="Half formats by casts there and back: their numbers, not speed."),
    ] = False,
    plan: Annotated[Path | None, typer.Option(help="A plan.toml to use instead of planning.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read data, for each arm.")] = 0,
    check: Annotated[
        bool, typer.Option("--check", help="Exit 0 for not-worse, 3 for worse, 4 for inconclusive.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train with FP32 and with the plan on the same seeds and batches, and judge."""
    from ..comparison import compare as run
    from ..deliver.report import render

    limit_s = seconds("--max-time", max_time)
    with progress() as show:
        verdict = run(
            task, repeats=repeats, margin=margin, metric=metric, alpha=alpha, with_autocast=with_autocast,
            steps=max_steps, max_time=limit_s, data=data, out=out or _new_name(task), seed=seed,
            device=device, precision=precision, emulate=emulate,
            plan=None if plan is None else str(plan), workers=workers, on_event=show,
        )  # fmt: skip
    if not json:
        print_result(verdict.result)
    page, _ = render(Path(verdict.out or "."))
    if json:
        typer.echo(json_module.dumps(verdict.as_json(report=str(page)), allow_nan=False))
    else:
        typer.echo(f"Report: {page}")
    if check:
        raise typer.Exit(EXIT_OF.get(verdict.verdict or "", INCONCLUSIVE))


def _new_name(task: str) -> Path:
    """A directory that isn't there yet, named after the task and the time."""
    stem = "".join(c if c.isalnum() or c in "-_" else "-" for c in Path(task.partition(":")[0]).stem)
    path = Path("runs", f"compare-{stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    number = 1
    while path.exists():
        number += 1
        path = path.with_name(f"{path.name.split('.')[0]}.{number}")
    return path


def print_result(result: Mapping[str, Any]) -> None:
    """The table of the arms and the verdict, for people; what helped where no format pays comes first."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..deliver import words

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 100  # a pipe has no width, and rich would take 80 for one
    if result["helped"]:
        console.print(Text(result["helped"]))
    arms = [name for name in ("fp32", "autocast", "plan") if name in result["arms"]]
    table = Table(
        title=Text(f"{result['task']}: {words.plural(len(result['seeds']), 'seed')}, median of the slices")
    )
    table.add_column("")
    for name in arms:
        table.add_column(Text(words.ARM_LABELS[name]), justify="right")
    for label, cells in _rows(result, arms):
        table.add_row(Text(label), *map(Text, cells))
    # The table keeps its shape in a pipe; sentences are not broken there.
    console.print(table, soft_wrap=False)
    for line in _sentences(result):
        console.print(Text(line))


def _rows(result: Mapping[str, Any], arms: list[str]) -> list[tuple[str, list[str]]]:
    from ..deliver import words

    metric, found = result["metric"], [result["arms"][name] for name in arms]
    means = [arm["metric"] for arm in found]
    sizes = [m["high"] - m["low"] for m in means if m["low"] is not None]
    digits = words.decimals_for(metric["margin"], *sizes)
    speeds = {"autocast": result["autocast_speedup"], "plan": result["speedup"]}
    rows = [(metric["name"], [words.fixed(m["mean"], digits) for m in means])]
    if sizes:
        rows.append(("  95 % interval", [_interval(m["low"], m["high"], digits) for m in means]))
    rates = [arm["samples_per_s"] or {} for arm in found]
    against = [speeds.get(name) or {"median": 1.0} for name in arms]
    rows += [
        ("samples/s", [words.number(rate.get("median")) for rate in rates]),
        ("speed against FP32", [_speed(ratio) for ratio in against]),
        ("time to FP32's metric", [words.duration(arm["time_to_metric_s"]) for arm in found]),
        ("peak memory", [words.memory(arm["peak_mem_bytes"]) for arm in found]),
        ("set-up time", [words.duration(arm["setup_s"]) for arm in found]),
    ]  # fmt: skip
    return rows


def _interval(low: float | None, high: float | None, digits: int) -> str:
    from ..deliver import words

    return words.NOTHING if low is None else f"{words.fixed(low, digits)} to {words.fixed(high, digits)}"


def _speed(ratio: Mapping[str, Any]) -> str:
    """A speed-up; none where other work on the machine leaves none to be believed."""
    from ..deliver import words

    return words.ratio(ratio["median"]) if ratio.get("trusted", True) else "can't tell"


def _sentences(result: Mapping[str, Any]) -> list[str]:
    from ..deliver import words

    speed = result["speedup"]
    formats = words.layer_counts(result["formats"])
    between = f"(95 % interval {words.ratio(speed['low'])} to {words.ratio(speed['high'])})"
    fast = (
        f"{words.ratio(speed['median'])} FP32's speed {between}"
        if speed.get("trusted", True)
        else f"{_speed(speed)} its speed {between}"
    )
    return [
        *result["notes"],
        words.metric_sentence(dict(result["metric"])),
        f"Plan: {formats}; {fast}.",
        f"Verdict: {result['verdict'] or 'none'}. {result['reason']}",
    ]


class _Lines:
    """Progress as plain lines on stderr: set-up, evaluations, each seed's end."""

    def __enter__(self) -> "_Lines":
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def __call__(self, event: Mapping[str, Any]) -> None:
        line = _line_of(event)
        if line and event["event"] != "round":
            print(line, file=sys.stderr, flush=True)


class _Bar:
    """Progress as one bar on a terminal, with the speeds of the arms."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[rest]}", markup=False),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("measuring this machine", total=None, rest="")

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def __call__(self, event: Mapping[str, Any]) -> None:
        if event["event"] == "round":
            done, total = event["number"] * event["steps"] + event["step"], event["of"] * event["steps"]
            where = f"seed {event['seed']}, step {event['step']}/{event['steps']}"
            self._bar.update(self._task, completed=done, total=total, rest=_speeds(event), description=where)
        elif event["event"] in ("setup", "probe"):
            self._bar.update(self._task, description=_line_of(event))
        elif line := _line_of(event):
            self._bar.console.print(line, markup=False, highlight=False)


def progress() -> "_Bar | _Lines":
    """What shows the events of a comparison on stderr: a bar on a terminal, plain lines elsewhere."""
    return _Bar() if sys.stderr.isatty() else _Lines()


def _speeds(event: Mapping[str, Any]) -> str:
    from ..deliver import words

    return ", ".join(f"{name} {words.number(rate)}/s" for name, rate in event["samples_per_s"].items())


def _line_of(event: Mapping[str, Any]) -> str:
    """What is said of an event; nothing for most."""
    from ..deliver import words

    kind = event["event"]
    if kind == "probe":
        return "measuring this machine"
    if kind == "setup":
        work = "planning" if event["arm"] == "plan" and event["number"] == 0 else "setting up"
        return f"seed {event['seed']} ({event['number'] + 1} of {event['of']}): {work} {event['arm']}"
    if kind == "ready" and event["plan"] and event["number"] == 0:
        return f"plan: {event['plan']} ({words.duration(event['setup_s'])})"
    if kind in ("eval", "test"):
        where = f"step {event['step']}" if kind == "eval" else "test"
        return (
            f"seed {event['seed']}, {where}: {event['arm']} {words.number(words.finite(event['metric']), 4)}"
        )
    return ""
