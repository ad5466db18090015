"""How a run goes, on stderr: a bar on a terminal, a line now and then elsewhere.

Enters: the events of ``run.train``. Leaves: text for people. Where: beside a run; rich is imported where
there is a terminal to draw on.
"""

import sys
import time
from collections.abc import Mapping
from typing import Any

import typer

from ..deliver.words import duration, layer_counts, number

_LINE_EVERY_S = 5.0
"""Without a terminal: seconds between two lines, beside those of evaluations."""


class Progress:
    """Shows the events of one run."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._metric = "metric"
        self._formats = ""
        self._line_at = time.monotonic()
        self._last: Mapping[str, Any] = {}

    def on_event(self, kind: str, facts: Mapping[str, Any]) -> None:
        """Show one event."""
        getattr(self, f"_on_{kind}", self._on_other)(facts)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=True)

    def _on_other(self, facts: Mapping[str, Any]) -> None:
        """Nothing to show."""

    def _on_start(self, facts: Mapping[str, Any]) -> None:
        self._metric = facts["metric"]
        about = f": {facts['about']}" if facts["about"] else ""
        self.say(f"{facts['task']}{about}")
        length = f"from step {facts['step']} to step" if facts["step"] else "steps:"
        self.say(f"{length} {facts['steps']}, kept in {facts['run']}")

    def _on_planned(self, facts: Mapping[str, Any]) -> None:
        plan = facts["plan"]
        self._formats = layer_counts(plan.counts())
        # A session that plans says by itself what it found and how long that took.
        why = f"; {plan.note}" if plan.note and not facts["setup_s"] else ""
        self.say(f"{self._formats or 'no layers'}{why}")
        if sys.stderr.isatty():
            self._bar = _bar()
            self._task = self._bar.add_task("", total=None, facts="")

    def _on_progress(self, facts: Mapping[str, Any]) -> None:
        self._last = facts
        if self._bar is not None:
            self._bar.update(
                self._task, completed=facts["step"], total=facts["steps"], facts=self._line_text(facts)
            )
        elif time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line(facts)

    def _on_evaluated(self, facts: Mapping[str, Any]) -> None:
        if self._bar is None:
            best = " (best so far)" if facts["best"] else ""
            self._line({**self._last, "metric": facts["metric"]}, best)

    def _on_notice(self, facts: Mapping[str, Any]) -> None:
        self.say(f"note: {facts['text']}")

    def _line(self, facts: Mapping[str, Any], more: str = "") -> None:
        self._line_at = time.monotonic()
        self.say(f"{self._line_text(facts)}{more}")

    def _line_text(self, facts: Mapping[str, Any]) -> str:
        parts = [f"step {facts['step']}/{facts['steps']}"] if "step" in facts else []
        if facts.get("loss") is not None:
            parts.append(f"loss {facts['loss']:.4g}")
        if facts.get("metric") is not None:
            parts.append(f"{self._metric} {facts['metric']:.4g}")
        if facts.get("samples_per_s"):
            parts.append(f"{number(facts['samples_per_s'])} samples/s")
        if self._formats:
            parts.append(self._formats)
        if facts.get("left_s"):
            parts.append(f"{duration(facts['left_s'])} left")
        return " · ".join(parts)


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    bar = Bar(
        BarColumn(bar_width=16),
        TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True)),
        console=Console(stderr=True),
        transient=True,
    )
    bar.start()
    return bar
