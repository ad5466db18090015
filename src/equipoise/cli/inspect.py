"""``equipoise inspect TASK``: what each layer would lose in each format; ``--bisect`` finds what breaks.

Enters: the words of the command line. Leaves: an HTML page with heat maps; on stdout a table, or one JSON
object and nothing else; progress on stderr. Where: before a format is chosen; torch is imported when training
begins.
"""

import json as json_module
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import FormatError, TaskError


def inspect(
    task: Annotated[
        str,
        typer.Argument(help="A shipped name (train --list), package.module:function or file.py:function."),
    ],
    steps: Annotated[
        int | None,
        typer.Option("--steps", "--max-steps", help="Steps to train; default 50, or the task's if fewer."),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="fp16, bf16, fp8-e4m3, fp8-e5m2; again for more. Default: all."),
    ] = None,
    bisect: Annotated[
        bool,
        typer.Option(
            "--bisect", help="Find, by running, the modules that must stay FP32 in the half format."
        ),
    ] = False,
    margin: Annotated[
        str, typer.Option(help="With --bisect: loss above FP32's that still holds: 0.01, or 2% of it.")
    ] = "2%",
    seed: Annotated[int, typer.Option(help="Of the model, the order of the data and all that is drawn.")] = 0,
    data: Annotated[str | None, typer.Option(help="Where the task's data lie.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, xpu or mps.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="The page; default runs/inspect-TASK-DATE.html.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    """Train some steps in FP32 and show what each layer would lose in each format."""
    from ..deliver.inspected import refuse_place, render
    from ..tasks import resolve

    if steps is not None and steps < 1:
        raise TaskError(f"--steps is {steps}; at least 1 step must be trained to see gradients and updates")
    if out is not None:
        refuse_place(out)
    make = resolve(task)

    from .. import bisection, inspection  # torch is loaded here

    names = inspection.lossy_formats(formats or ())
    half = _half_of(names, bisection.HALVES) if bisect else None
    bisection.margin_of(margin, 1.0)
    show = _Lines()
    figures = inspection.inspect(
        make, steps=steps, formats=names, seed=seed, data=data, device=device, on_step=show.on_step
    )
    if half is not None:
        found = bisection.bisect(
            make, format_name=half, steps=steps, margin=margin, seed=seed, data=data, device=device,
            on_run=show.on_run,
        )  # fmt: skip
        figures["bisect"] = found.as_dict()
    page = render(figures, out or _new_name(task), command=_command(task, figures, margin))
    if json:
        typer.echo(json_module.dumps({**figures, "html": str(page)}, allow_nan=False))
    else:
        print_result(figures)
        typer.echo(f"page: {page}")


def _half_of(names: tuple[str, ...], halves: tuple[str, ...]) -> str:
    for name in names:
        if name in halves:
            return name
    raise FormatError(
        f"--bisect with --format {', '.join(names)}: it runs a half format; add --format fp16 or bf16"
    )


def _new_name(task: str) -> Path:
    folder = Path("runs")
    folder.mkdir(exist_ok=True)
    short = task.removesuffix(":task").removesuffix(".py")
    name = re.sub(r"[^A-Za-z0-9_]+", "-", short).strip("-")[-40:].strip("-")
    return folder / f"inspect-{name or 'task'}-{time.strftime('%Y%m%d-%H%M%S')}.html"


def _command(task: str, figures: Mapping[str, Any], margin: str) -> str:
    words = ["equipoise", "inspect", task, "--steps", str(figures["steps"]), "--seed", str(figures["seed"])]
    for name in figures["formats"]:
        words += ["--format", name]
    if figures["bisect"] is not None:
        words += ["--bisect", "--margin", margin]
    return shlex.join(words)


def print_result(figures: Mapping[str, Any]) -> None:
    """The table of layers and formats, and what follows, for people."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ..deliver import inspected
    from ..deliver.words import FORMAT_LABELS

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width, and rich would take 80 for one
    table = Table(
        title=Text(f"{figures['task']}: lost of what a step casts; noise of weights and activations")
    )
    table.add_column("layer", overflow="fold")
    for name in figures["formats"]:
        table.add_column(Text(FORMAT_LABELS[name]))
    for layer in figures["layers"]:
        cells = []
        for name in figures["formats"]:
            worst = inspected.worst_of(layer, name)
            lost = inspected.lost_text(worst, short=True)
            cells.append(Text(lost if worst is None else f"{lost}, {inspected.db_text(worst.sqnr_db)}"))
        table.add_row(Text(inspected.layer_name(layer["layer"])), *cells)
    console.print(table, soft_wrap=False)
    for line in inspected.sentences(figures):
        console.print(Text(line))
    if (found := figures["bisect"]) is not None:
        console.print(Text(inspected.headline(figures)))
        for line in inspected.bisect_sentences(found):
            console.print(Text(line))
        console.print(Text(f'precision="{found["policy"]}"'))


class _Lines:
    """Progress as lines on stderr: now and then a step, and every run of a bisection."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self._said_at = time.monotonic()

    def on_step(self, done: int, of: int) -> None:
        """Say how far the training is, every few seconds and at its end."""
        if done == of or time.monotonic() - self._said_at >= self.EVERY_S:
            self._said_at = time.monotonic()
            print(f"step {done}/{of}", file=sys.stderr, flush=True)

    def on_run(self, number: int, wide: int, loss: float | None) -> None:
        """Say how one short training went."""
        ended = "not finite" if loss is None else f"{loss:.4g}"
        modules = "1 module" if wide == 1 else f"{wide} modules"
        print(f"run {number}: {modules} in FP32, loss {ended}", file=sys.stderr, flush=True)
