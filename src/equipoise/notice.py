"""What a planning session shows: a bar on a terminal while it measures, one line when it is done.

Enters: how far planning is. Leaves: text on stderr, from rank 0 only. Where: around planning. The bar is
drawn between measurements, never beside one: a thread that refreshes it would take time from what is
measured.
"""

import sys
from typing import Any

from . import ranks


class PlanNotice:
    """A context that shows progress and then one line."""

    def __init__(self) -> None:
        self._shown = ranks.rank() == 0 and sys.stderr is not None
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> "PlanNotice":
        if self._shown and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            columns = (TextColumn("equipoise: planning"), BarColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=1.0)
        return self

    def update(self, share: float, what: str) -> None:
        """Show that ``share`` (0 to 1) of the time is spent, and on what."""
        if self._bar is not None:
            self._bar.update(self._task, completed=min(share, 1.0), description=what, refresh=True)

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        """One line for people."""
        if self._shown:
            print(f"equipoise: {line}", file=sys.stderr)
