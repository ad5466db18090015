"""The report: one HTML file that needs nothing else, and its figures as JSON.

Enters: a directory of ``equipoise compare`` or of ``equipoise train``. Leaves: ``report.html`` and
``report.json`` in it, complete or not at all. Where: after the run; no torch, no network: style, script and
charts are in the file, and its content security policy forbids loading anything. The page shows what
``report.json`` holds and nothing else.

What is read; ``?``: may be missing or null; seconds, bytes; NaN and infinity are allowed:

    A comparison directory
      comparison.json
        schema: 1 · task · about? · seeds?: [...] · notes?: [sentences] · helped?: sentence · repeat?: command
        verdict: "not-worse" | "worse" | "inconclusive" | null · reason?: sentence · power?
        metric: {name, higher_is_better, margin?, fp32, plan, difference (plan - fp32), low?, high?}
        speedup?: {median, low?, high?, trusted?}     of the plan over FP32
        autocast_speedup?: the same                   of plain autocast over FP32
        arms: {fp32: ARM, plan: ARM, autocast?: ARM}
          ARM: {setup_s?, peak_mem_bytes?, samples_per_s?: {median, low?, high?}, time_to_metric_s?,
                metric?: {mean, low?, high?},         of the test data
                parts?: {data_s, forward_s, backward_s, optimizer_s, machinery_s},      of one step
                seeds: {"0": SEED, ...}}
          SEED: {curve?: [{step, time_s, loss}], evals?: [{step, time_s, metric}], test?,
                 extra?: {name: value}, slices?: [{steps, samples, time_s, foreign?}],
                 skipped?: steps skipped, scale?: the last one}
        step?: {step, loss, scale, grad_norm?, parts?}     one real step of the plan
        formats?: {format: layers} · plan_toml?: text · machine?: Machine.as_dict() · versions?: {name: text}
      plan.toml?, machine.json?     read where comparison.json has no plan_toml, no machine

    A run directory
      run.toml        schema: 1 · task · seed · versions? · repeat?: command · and what else was asked
      machine.json? · plan.toml?
      steps.jsonl?    rows {step, loss, skipped, scale, grad_norm?, time_s?, parts?}
      metrics.json?   {metric: {name, higher_is_better}, evals: [{step, time_s, metric}], test?, finished?,
                       extra?: {name: value}, about?, time_s?, samples_per_s?, peak_mem_bytes?, setup_s?,
                       time_to_metric_s?, batch_size?, resume?, versions?}
      One of steps.jsonl and metrics.json must be there.
"""

import base64
import functools
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..records import finite_only
from ..watch.files import Disk, put
from . import figures as fig
from . import reading, words
from .view import View


def render(directory: Path, *, price_per_hour: float | None = None) -> tuple[Path, Path]:
    """Write ``report.html`` and ``report.json`` into the directory and give their paths.

    Args:
        directory: what ``equipoise compare`` or ``equipoise train`` wrote.
        price_per_hour: price of this machine for an hour, in any currency; the report then shows costs.

    Raises:
        RunError: not such a directory, a file of it that can't be read, a price that can't be, or a full
        disk.
    """
    directory = Path(directory)
    figures = figures_of(directory, price_per_hour=price_per_hour)
    text = json.dumps(figures, ensure_ascii=False, allow_nan=False, indent=1)
    page = html_of(figures)
    paths = directory / "report.html", directory / "report.json"
    for path, content in zip(paths, (page, text + "\n"), strict=True):
        put(Disk(), path, content.encode("utf-8", errors="replace"))
    return paths


def figures_of(directory: Path, *, price_per_hour: float | None = None) -> dict[str, Any]:
    """All figures of the report, plain and finite: what ``report.json`` holds.

    Raises:
        RunError: not such a directory, a file of it that can't be read, or a price that can't be.
    """
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise RunError(f"the price per hour is {price_per_hour}; it must be a finite number from 0 up")
    kind, data = reading.read(Path(directory))
    try:
        found = (fig.of_comparison if kind == "comparison" else fig.of_run)(data, price_per_hour)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise RunError(
            f"the {kind} in {str(directory)!r} can't be understood ({type(error).__name__}: {error}); it "
            "was changed by hand or written by another version"
        ) from error
    # What TOML brings beside JSON's types, a date for one, becomes text.
    plain: dict[str, Any] = json.loads(json.dumps(finite_only(found), allow_nan=False, default=str))
    return plain


def html_of(figures: dict[str, Any]) -> str:
    """The page of the figures."""
    source = (Path(__file__).parent / "report.html.j2").read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode() if script else ""
    page: str = _template().render(f=figures, v=View(figures), w=words, script_hash=digest)
    return page


@functools.cache
def _template() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("report.html.j2")
