"""``equipoise report RUN...``: the report of runs and comparisons, written into each one's directory.

Enters: directories of ``train`` and ``compare``. Leaves: ``report.html`` and ``report.json`` in each, their
names on stdout. Where: after the run; no torch.
"""

import json as json_module
from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Directories that `equipoise train` or `compare` wrote.")
    ],
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="Price of this machine for an hour, in any currency: the report then shows costs."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: the files that were written.")
    ] = False,
) -> None:
    """Write the HTML report of a run or a comparison, and its figures as JSON."""
    from ..deliver.report import render

    written = []
    for run in runs:
        page, figures = render(run, price_per_hour=price_per_hour)
        written.append({"run": str(run), "html": str(page), "json": str(figures)})
        if not json:
            typer.echo(page)
    if json:
        typer.echo(json_module.dumps({"reports": written}))
