"""``equipoise demo``: the main job on data that is already here, in minutes.

Enters: nothing but a place for the results. Leaves: on stdout one line that says what helped, the two tables
and where the reports are; progress on stderr. Where: the first thing that a newcomer runs; no torch.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_TASKS = {"text": 18.0, "breast-cancer": 6.0}
"""Task -> the most training seconds of each arm and seed. Evaluation comes on top: with planning, the probe
and three seeds of two arms the whole stays under 4 minutes on 2 cores."""


def demo(
    out: Annotated[Path | None, typer.Option(help="New directory for the results.")] = None,
) -> None:
    """Compare FP32 with the plan on two shipped tasks: how much faster, and is it still as good?"""
    from ..comparison import compare
    from ..deliver.report import render
    from .compare import print_result, progress

    folder = out or Path("runs", f"demo-{time.strftime('%Y%m%d-%H%M%S')}")
    results, pages = [], []
    for name, seconds in _TASKS.items():
        with progress() as show:
            verdict = compare(name, max_time=seconds, out=folder / name, on_event=show)
        results.append(verdict.result)
        pages.append(render(folder / name)[0])
    typer.echo(headline(results[0]))
    for result, page in zip(results, pages, strict=True):
        typer.echo()
        print_result({**result, "helped": result["helped"] if result is not results[0] else ""})
        typer.echo(f"Report: {page}")
    typer.echo("\nYour own model: `equipoise init-task my_task.py`, `equipoise compare my_task.py:task`.")


def headline(result: Mapping[str, Any]) -> str:
    """What helped, and whether it cost accuracy, in one line."""
    from ..deliver import words

    task, speedup = result["task"], result["speedup"]
    if not speedup.get("trusted", True):
        return f"{task}: other work on this machine hid how fast it trains; run the demo again later."
    if result["helped"]:
        return f"{task}: {result['helped']}"
    formats = words.layer_counts(result["formats"])
    return f"{task}: {words.headline(result['verdict'], speedup)} The plan: {formats}."
