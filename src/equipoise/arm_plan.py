"""The plan's arm of a comparison: a `Trainer` in a process of its own.

Enters: requests, as in `arm_plain`. Leaves: answers of the same form. Where: a child of `comparison`.

The plan is made for the first seed and pinned for the later ones: what is judged is one plan, and the cost of
making it is counted once, apart from the time of training.

    python -m equipoise.arm_plan TASK --precision auto [--plan plan.toml] [--data D] [--workers N]
"""

import argparse
import time
from pathlib import Path
from typing import Any

from .arm_plain import describe, finite, options, seed_everything, serve, write_predictions
from .errors import NonFiniteError
from .policy import Plan
from .tasks import resolve
from .trainer import Trainer


class PlanArm:
    """Equipoise's own training, in slices."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._options = given
        self._make = resolve(given.task)
        self._plan = None if given.plan is None else Plan.load(given.plan)

    def setup(self, seed: int) -> dict[str, Any]:
        """Build the task for a seed; plan, if it is the first."""
        begin = time.perf_counter()
        seed_everything(seed)
        task = self._make(seed, self._options.data)
        built = time.perf_counter()
        self._trainer = Trainer(task, seed=seed, precision=self._options.precision,
                                emulate=self._options.emulate, plan=self._plan, workers=self._options.workers,
                                device=self._options.device)  # fmt: skip
        plan = self._trainer.prepare()
        done = time.perf_counter()
        self._plan = self._plan or plan.pinned()
        return {
            "build_s": built - begin, "setup_s": done - built, "plan_toml": plan.to_toml(),
            "plan_note": plan.note, **describe(task),
        }  # fmt: skip

    def advance(self, steps: int, curve_every: int) -> dict[str, Any]:
        """Train that many steps."""
        before_s = self._trainer.time_s
        rows = self._trainer.advance(steps)
        # To the session the wait for the token looks like waiting for data: leave a slice's first step out.
        looked = [row for row in rows[1:] if row.get("parts")]
        sampled = [row["parts"] for row in looked]
        return {
            "time_s": self._trainer.time_s - before_s,
            "losses": [(row["step"], row["time_s"] - before_s, finite(row["loss"])) for row in rows
                       if row["step"] % curve_every == 0 and row["loss"] is not None],
            "parts": {key: sum(part[key] for part in sampled) for key in sampled[0]} if sampled else None,
            "parts_steps": len(sampled),
            "skipped": sum(bool(row["skipped"]) for row in rows),
            "scale": rows[-1]["scale"],
            "step": _shown(looked[-1]) if looked else None,
        }  # fmt: skip

    def evaluate(self, split: str, save: str | None = None) -> dict[str, Any]:
        """The metric on a split; ``save``: where the predictions go."""
        task, begin = self._trainer.task, time.perf_counter()
        try:
            found = self._trainer.evaluate(split)
        except NonFiniteError:
            # A diverged plan is a finding of the comparison, not its end.
            none = dict.fromkeys(task.extra_metrics or {})
            return {"metric": None, "extra": none, "time_s": time.perf_counter() - begin}
        if save is not None:
            write_predictions(Path(save), found.labels, found.scores, (task.subgroup or {}).get(split))
        extra = {name: finite(value) for name, value in found.extra.items()}
        return {"metric": finite(found.metric), "extra": extra, "time_s": found.time_s}


def _shown(row: dict[str, Any]) -> dict[str, float | None]:
    """A step's numbers for the report; its times are no better than the mean of all looked into."""
    return {key: finite(row[key]) for key in ("step", "loss", "scale", "grad_norm") if key in row}


if __name__ == "__main__":
    serve(lambda: PlanArm(options()))
