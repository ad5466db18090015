"""What each layer of a task would lose in each format: FP32 training, watched.

Enters: a task's function. Leaves: plain figures, which ``equipoise inspect`` prints, draws and gives as JSON.
Where: before a format is chosen. Nothing is kept of the training.

The figures; histograms are sparse, and their numbers are estimates from samples:

    schema: 1 · task · about · seed · steps · watched: steps that were looked at · formats: [names]
    layers: [{layer: dotted name, type, kinds: {KIND: {histogram: {exponent: numbers}, zeros, nonfinite,
              formats: {name: {values, underflow, overflow, subnormal, sqnr_db, scale, scaled_underflow,
              scaled_sqnr_db}}}}, swallowed: {name: share of the updates that weights in it don't feel}}]
    cost: {step_s, watched_step_s}     medians; what watching costs is their difference
    bisect: what ``bisection.py`` found, or null
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from .errors import FormatError, TaskError, did_you_mean
from .records import finite_only
from .step.collect import Collector, watched_layers
from .step.ranges import LOSSY, LOWEST, ranges_of
from .task import Task, TaskFunction
from .trainer import Trainer

SCHEMA = 1
STEPS = 50
"""Steps of the training unless the user says otherwise, or the task is shorter."""
WATCHED = 16
"""Most steps that are looked at: spread evenly, the first and the last among them."""

_ALIASES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "e4m3": "fp8-e4m3", "e5m2": "fp8-e5m2"}


def lossy_formats(words: Iterable[str]) -> tuple[str, ...]:
    """The formats that ``words`` name, each once; commas part several in a word. No words: all of them.

    Raises:
        FormatError: one is unknown, or is FP32, which loses nothing.
    """
    found = []
    for word in (part.strip() for text in words for part in text.split(",")):
        key = word.lower().replace("_", "-")
        name = _ALIASES.get(key, key)
        if name == "fp32":
            raise FormatError(f"format {word!r} is what the others are held against; give {', '.join(LOSSY)}")
        if name not in LOSSY:
            hint = did_you_mean(key, [*LOSSY, *_ALIASES])
            raise FormatError(f"unknown format {word!r}; allowed: {', '.join(LOSSY)}{hint}")
        found.append(name)
    return tuple(dict.fromkeys(found)) or LOSSY


def refuse_steps(steps: int | None) -> None:
    """Refuse a training without a step.

    Raises:
        TaskError: fewer than one was asked for.
    """
    if steps is not None and steps < 1:
        raise TaskError(f"steps is {steps}; at least 1 step must be trained to see gradients and updates")


def inspect(
    make: TaskFunction,
    *,
    steps: int | None = None,
    formats: Sequence[str] = LOSSY,
    seed: int = 0,
    data: str | None = None,
    device: str = "auto",
    on_step: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Train in FP32 and say what each layer would lose in each format.

    Args:
        make: the task's function.
        steps: optimizer steps; None: 50, or the task's own if that is less.
        formats: names of formats to say it for.
        seed: of the task and its training.
        data: as for the task's function.
        device: ``auto`` or torch's name of one.
        on_step: called with the number of steps done and of all.

    Returns:
        the figures, plain and finite: see the top of this file.

    Raises:
        FormatError: a format that has no ranges.
        TaskError: fewer than one step, a model without parameters, or whatever is wrong with the task.
    """
    names = lossy_formats(formats)
    refuse_steps(steps)
    task = make(seed, data)
    length = steps or min(STEPS, task.steps)
    refuse_empty(task)
    trainer = Trainer(task, seed=seed, precision="fp32", device=device)
    collector = Collector(task.model, [task.optimizer])
    chosen = _spread(length, WATCHED)
    times_s: dict[bool, list[float]] = {True: [], False: []}
    try:
        before_s = 0.0
        for step in range(length):
            watched = step in chosen
            if watched:
                with collector.watching():
                    trainer.advance(1)
            else:
                trainer.advance(1)
            if step:  # the first one warms up
                times_s[watched].append(trainer.time_s - before_s)
            before_s = trainer.time_s
            if on_step is not None:
                on_step(step + 1, length)
    finally:
        collector.remove()
        trainer.close()
        trainer.session.restore()
    return {
        "schema": SCHEMA, "task": task.name, "about": task.about, "seed": seed, "steps": length,
        "watched": collector.steps, "formats": list(names), "layers": _layers(task, collector, names),
        "cost": {
            "step_s": statistics.median(times_s[False]) if times_s[False] else None,
            "watched_step_s": statistics.median(times_s[True]) if times_s[True] else None,
        },
        "bisect": None,
    }  # fmt: skip


def refuse_empty(task: Task) -> None:
    """Refuse a model without parameters.

    Raises:
        TaskError: says which.
    """
    if next(task.model.parameters(), None) is None:
        raise TaskError(
            f"task {task.name!r}: its model ({type(task.model).__name__}) has no parameters; nothing is "
            "trained and nothing can be looked at. Give the module that the optimizer updates"
        )


def _spread(steps: int, most: int) -> set[int]:
    if steps <= most:
        return set(range(steps))
    return {round(i * (steps - 1) / (most - 1)) for i in range(most)}


def _layers(task: Task, collector: Collector, formats: Sequence[str]) -> list[dict[str, Any]]:
    types = {name: type(module).__name__ for name, module in watched_layers(task.model)}
    swallowed = collector.swallowed()
    return [
        {
            "layer": name,
            "type": types[name],
            "kinds": {kind: _kind(counts, formats) for kind, counts in kinds.items()},
            "swallowed": {f: share for f, share in swallowed.get(name, {}).items() if f in formats},
        }
        for name, kinds in collector.histograms().items()
    ]


def _kind(counts: torch.Tensor, formats: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in formats:
        losses = asdict(ranges_of(counts, name))
        del losses["format"]
        found[name] = finite_only(losses)
    numbers = counts.tolist()
    histogram: Mapping[str, int] = {str(i + LOWEST): n for i, n in enumerate(numbers[1:-1]) if n}
    return {"histogram": histogram, "zeros": numbers[0], "nonfinite": numbers[-1], "formats": found}
