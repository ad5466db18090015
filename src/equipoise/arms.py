"""The arms of a comparison: resident child processes that train in turns.

Enters: a task's name and the arms to run. Leaves: for each arm and seed a `Track`: losses, evaluations, the
times of interleaved slices. Where: under `comparison`, in the parent; no torch here. Source: paired,
interleaved benchmarks as in "Rigorous Benchmarking in Reasonable Time" (Kalibera and Jones, ISMM 2013).

All arms take the same steps on the same batches, a slice of about `SLICE_S` at a time, in an order that
rotates from round to round: what disturbs the machine for longer than a round hits all of them alike. Only
one works at a time; the others wait for a request and take no CPU.
"""

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import errors
from .blame import sentence
from .errors import RunError, TaskError
from .evidence import FOREIGN_LIMIT
from .foreign_load import ForeignLoad

SLICE_S = 1.5
"""Long against a switch of processes (milliseconds), short against drifts of clock and temperature."""
ROUNDS = 12
"""Slices that a short run is cut into all the same: a median needs some."""
WARM_ROUNDS = 2
"""Rounds at the start of each seed that don't count: kernels are chosen and caches filled in them."""
HOPELESS = 4.0
"""Plain autocast this many times slower than FP32 is stopped: without half kernels it may never end."""
HOPELESS_S = 20.0
"""But not before it has trained for this long."""

Sink = Callable[[Mapping[str, Any]], None]
"""Gets an event a slice, for progress."""


class Child:
    """One arm: a process that answers requests."""

    def __init__(self, name: str, module: str, argv: Sequence[str]) -> None:
        self.name = name
        self._words = tempfile.TemporaryFile()
        command = [sys.executable, "-m", f"equipoise.{module}", *argv]
        # A session of its own: Ctrl-C reaches the parent alone, and the workers can be ended with the child.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True,
            encoding="utf-8", start_new_session=True,
        )  # fmt: skip
        self.peak_mem_bytes: int | None = None

    @property
    def pid(self) -> int:
        """The process, which is also its session."""
        return self._process.pid

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            UserError: the child raised it.
            RunError: the child raised anything else, or died.
        """
        try:
            if self._process.stdin is not None:
                self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
                self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it is dead: reading says so and why
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Wait for an answer (the first one comes unasked: the task was found)."""
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RunError(f"{self._title()} {self._ending()}{self._tail()}")
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            kind = getattr(errors, found["kind"], None)
            if isinstance(kind, type) and issubclass(kind, errors.EquipoiseError):
                raise kind(found["error"])
            said, users = sentence(found["kind"], found["error"], found.get("frames", ()))
            if users:
                raise TaskError(f"{self._title()} failed: {said}")
            raise RunError(f"{self._title()} failed: {said}{self._tail()}")
        self.peak_mem_bytes = found.pop("peak_mem_bytes", None)
        return found

    def _title(self) -> str:
        return f"the comparison's {self.name} arm"

    def _ending(self) -> str:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "was killed (signal 9), most often because memory ran out; use a smaller batch or model"
        return f"was ended by signal {-code}" if code < 0 else f"ended by itself with exit code {code}"

    def _tail(self) -> str:
        self._words.seek(0)
        lines = self._words.read().decode("utf-8", "replace").strip().splitlines()[-15:]
        return "".join(f"\n  | {line}" for line in lines)

    def close(self) -> None:
        """End the process and whatever it started."""
        if self._words.closed:
            return
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass
        try:
            self._process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if hasattr(os, "killpg"):
            try:
                os.killpg(self.pid, signal.SIGKILL)  # workers that outlived it
            except (ProcessLookupError, PermissionError):
                pass
        self._words.close()


@dataclass
class Track:
    """What one arm did with one seed."""

    curve: list[dict[str, Any]] = field(default_factory=list)
    """{step, time_s, loss}; time is training time, without set-up and evaluation."""
    evals: list[dict[str, Any]] = field(default_factory=list)
    """{step, time_s, metric} on the validation data."""
    slices: list[dict[str, Any]] = field(default_factory=list)
    """{steps, samples, time_s, foreign}; foreign: share of the cores taken by others, None: unknown."""
    test: float | None = None
    extra: dict[str, float | None] = field(default_factory=dict)
    setup: dict[str, Any] = field(default_factory=dict)
    parts_s: dict[str, float] = field(default_factory=dict)
    """Where the time of all steps went."""
    parts_steps: int = 0
    skipped: int | None = None
    """Steps skipped; None where the arm doesn't say."""
    scale: float | None = None
    """The last loss scale; None where the arm doesn't say."""
    step: dict[str, Any] | None = None
    """The last step that was looked into."""

    @property
    def time_s(self) -> float:
        """Training time so far."""
        return math.fsum(s["time_s"] for s in self.slices)


@dataclass(kw_only=True)
class Race:
    """Trains all arms in turns, seed by seed."""

    children: dict[str, Child]
    """``fp32``, ``plan`` and perhaps ``autocast``, in this order."""
    steps: int | None = None
    """Of each seed; None: the task's."""
    max_time_s: float | None = None
    """Limit on the training time of each arm and seed; shortens all arms alike."""
    metric: str | None = None
    """One of the task's extra metrics to judge by; None: the task's own."""
    save: Path | None = None
    """Where predictions go."""
    on_event: Sink = lambda event: None
    tracks: dict[str, dict[int, Track]] = field(default_factory=dict)
    """Arm -> seed -> what it did."""
    notes: list[str] = field(default_factory=list)
    task: dict[str, Any] = field(default_factory=dict)
    """What the first arm said of the task."""
    _asked: int | None = None
    """``steps`` before a time limit shortened them."""

    peaks: dict[str, int | None] = field(default_factory=dict)
    """Arm -> the most memory it held, bytes."""

    def run(self, seeds: Sequence[int]) -> None:
        """Train every seed."""
        for child in self.children.values():
            child.answer()
        self.tracks = {name: {} for name in self.children}
        for number, seed in enumerate(seeds):
            self._set_up(seed, number, len(seeds))
            self._train(seed, number, len(seeds))
            if number == 0:
                self._note_limit()
            for name, child in self.children.items():
                path = None if self.save is None else str(self.save / f"{seed}-{name}.csv")
                found = child.ask("evaluate", split="test", save=path)
                track = self.tracks[name][seed]
                track.test, track.extra = self._chosen(found), found["extra"]
                self.peaks[name] = child.peak_mem_bytes
                self.on_event({"event": "test", "arm": name, "seed": seed, "metric": track.test})

    def _set_up(self, seed: int, number: int, of: int) -> None:
        for name, child in self.children.items():
            self.on_event({"event": "setup", "arm": name, "seed": seed, "number": number, "of": of})
            answer = child.ask("setup", seed=seed)
            self.tracks[name][seed] = Track(setup=answer)
            if not self.task:
                self._describe(answer)
            self.on_event({"event": "ready", "arm": name, "seed": seed, "number": number,
                           "setup_s": answer["setup_s"], "plan": answer.get("plan_note", "")})  # fmt: skip

    def _describe(self, task: dict[str, Any]) -> None:
        own = task["metric_name"]
        if self.metric not in (None, own, *task["extra_metrics"]):
            raise TaskError(
                f"task {task['name']!r} has no metric {self.metric!r}; it has "
                f"{', '.join([own, *task['extra_metrics']])}"
            )
        self.task = task
        self.metric = self.metric or own
        self._asked = self.steps = self.steps or int(task["steps"])

    def _chosen(self, found: Mapping[str, Any]) -> float | None:
        value = found["metric"] if self.metric == self.task["metric_name"] else found["extra"][self.metric]
        return None if value is None else float(value)

    def _train(self, seed: int, number: int, of: int) -> None:
        load = ForeignLoad(int(self.task["threads"]), [child.pid for child in self.children.values()])
        step = rounds = waiting = 0
        while step < self._length(seed, number):
            count = self._slice(seed, step)
            names = list(self.children)
            for name in names[rounds % len(names) :] + names[: rounds % len(names)]:
                self._advance(name, seed, step, count)
            step, rounds, waiting = step + count, rounds + 1, waiting + 1
            if (share := load.share()) is not None:
                for track in (self.tracks[name][seed] for name in self.children):
                    for row in track.slices[len(track.slices) - waiting :]:
                        row["foreign"] = share
                waiting = 0
            self._stop_hopeless(seed, number, step)
            length = self._length(seed, number)
            speeds = {name: self._speed(name, seed) for name in self.children}
            self.on_event({"event": "round", "seed": seed, "number": number, "of": of, "step": step,
                           "steps": length, "samples_per_s": speeds})  # fmt: skip
            if step >= length or step % self._eval_every() == 0:
                self._evaluate(seed, step)

    def _advance(self, name: str, seed: int, step: int, count: int) -> None:
        track, every = self.tracks[name][seed], max(1, (self.steps or 1) // 200)
        answer, before_s = self.children[name].ask("advance", steps=count, curve_every=every), track.time_s
        for at, time_s, loss in answer["losses"]:
            track.curve.append({"step": at, "time_s": before_s + time_s, "loss": loss})
        samples = self._samples(step + count) - self._samples(step)
        track.slices.append({"steps": count, "samples": samples, "time_s": answer["time_s"], "foreign": None})
        if "skipped" in answer:
            track.skipped = (track.skipped or 0) + answer["skipped"]
            track.scale, track.step = answer["scale"], answer["step"] or track.step
        if answer.get("parts") and len(track.slices) > WARM_ROUNDS:
            track.parts_steps += answer.get("parts_steps", count)
            for part, seconds in answer["parts"].items():
                track.parts_s[part] = track.parts_s.get(part, 0.0) + seconds

    def _evaluate(self, seed: int, step: int) -> None:
        for name, child in self.children.items():
            track = self.tracks[name][seed]
            metric = self._chosen(child.ask("evaluate", split="val"))
            track.evals.append({"step": step, "time_s": track.time_s, "metric": metric})
            self.on_event({"event": "eval", "arm": name, "seed": seed, "step": step, "metric": metric})

    def _samples(self, step: int) -> int:
        """Samples seen after that many steps, the short last batch of each epoch counted as it is."""
        n, batch = int(self.task["train_size"]), int(self.task["batch_size"])
        epochs, rest = divmod(step, -(-n // batch))
        return epochs * n + min(rest * batch, n)

    def _speed(self, name: str, seed: int) -> float:
        last = self.tracks[name][seed].slices[-1]
        return float(last["samples"] / last["time_s"])

    def _step_s(self, name: str, seed: int) -> float:
        """Seconds of a step, by the last slices."""
        rows = self.tracks[name][seed].slices
        return float(statistics.median(row["time_s"] / row["steps"] for row in rows[1:][-5:] or rows))

    def _eval_every(self) -> int:
        # A shortened run still shows a curve.
        return min(int(self.task["eval_every"]), -(-(self.steps or 1) // 4))

    def _slice(self, seed: int, step: int) -> int:
        """The number of steps of the next slice; slices between two evaluations are alike."""
        steps, every = self.steps or 1, self._eval_every()
        left = min(steps, (step // every + 1) * every) - step
        if len(self.tracks["fp32"][seed].slices) < WARM_ROUNDS:
            return min(left, 1)
        slowest_s = max(self._step_s(name, seed) for name in self.children)
        wanted = max(1, min(int(SLICE_S / slowest_s), steps // ROUNDS))
        return -(-left // max(1, round(left / wanted)))

    def _length(self, seed: int, number: int) -> int:
        """Steps of a seed. A time limit becomes steps while the first seed runs; the others follow it."""
        steps = self.steps or 1
        rounds = self.tracks["fp32"][seed].slices
        # The first slices are short: too few steps to go by.
        if self.max_time_s is None or number > 0 or len(rounds) < 5:
            return steps
        judged = [name for name in self.children if name != "autocast"]
        left_s = self.max_time_s - max(self.tracks[name][seed].time_s for name in judged)
        more = round(left_s / max(self._step_s(name, seed) for name in judged))
        self.steps = min(int(self._asked or steps), sum(row["steps"] for row in rounds) + max(0, more))
        return self.steps

    def _note_limit(self) -> None:
        if self.steps != self._asked:
            self.notes.append(
                f"The time limit of {self.max_time_s:g} s an arm shortened each run from {self._asked} to "
                f"{self.steps} steps; a learning-rate schedule made for {self._asked} stops early."
            )

    def _stop_hopeless(self, seed: int, number: int, step: int) -> None:
        if "autocast" not in self.children or number > 0:
            return
        # Sums and not a step's time: under foreign load a single step may take any time.
        slow_s, base_s = self.tracks["autocast"][seed].time_s, self.tracks["fp32"][seed].time_s
        if slow_s > HOPELESS_S and slow_s > HOPELESS * base_s:
            child = self.children.pop("autocast")
            self.peaks["autocast"] = child.peak_mem_bytes
            child.close()
            self.notes.append(
                f"Plain autocast took {slow_s / base_s:.0f} times FP32's time for {step} steps and was "
                "stopped: this machine has no fast units for its format."
            )


def disturbed(row: Mapping[str, Any]) -> bool:
    """Whether other processes held so much of the cores during a slice that its time proves nothing."""
    return row["foreign"] is not None and row["foreign"] > FOREIGN_LIMIT


def settled(rows: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The slices after the warm-up; the last one where too few are left."""
    return rows[WARM_ROUNDS:] if len(rows) >= WARM_ROUNDS + 3 else rows[-1:]
