"""FP32 against a plan, in pairs: how much faster, and is it still as good?

Enters: a task's name, or the user's own whole loop. Leaves: a `Verdict`, and a directory that holds
everything it rests on. Where: before a plan is trusted; no torch in this process for a task (each arm is a
child). Source: `evidence` for the statistics, `arms` for how the arms run, `tally` for what is kept.

The unit of evidence is a seed: both arms start from the same weights and see the same batches in the same
order, so that the difference of their test metrics is due to the plan and to chance alone.
"""

import math
import shlex
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from . import tally
from .arms import Child, Race, Sink, Track
from .errors import RunError, TaskError
from .evidence import FOREIGN_LIMIT, Judgement, Ratio, Verdict, judge, paired_ratio
from .foreign_load import ForeignLoad
from .formats import FORMATS
from .policy import Plan, Policy

TrainFunction = Callable[[int, str], Any]
"""``train_fn(seed, precision)``: a whole loop; gives a number, a dict of numbers, or (labels, scores)."""

_EMULATED = (
    "half formats were emulated by casts there and back: the metrics are theirs, speed and memory are not"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked; the fields are `compare`'s arguments."""

    seeds: Sequence[int]
    margin: float | str | None
    metric: Any
    higher_is_better: bool | None
    alpha: float
    with_autocast: bool
    steps: int | None
    max_time: float | None
    data: str | None
    precision: str
    emulate: bool
    plan: str | None
    workers: int
    device: str
    sink: Sink


def compare(task: str | TrainFunction, *, repeats: int = 3, margin: float | str | None = None,
            metric: Any = None, higher_is_better: bool | None = None, alpha: float = 0.05,
            with_autocast: bool = False,
            steps: int | None = None, max_time: float | None = None, data: str | None = None,
            out: str | Path | None = None, seed: int = 0, precision: str = "auto", emulate: bool = False,
            plan: str | None = None, workers: int = 0, device: str = "auto",
            on_event: Sink | None = None) -> Verdict:  # fmt: skip
    """Train with FP32 and with a plan on the same seeds and batches, and judge.

    Args:
        task: the name of a task (shipped, ``module:function`` or ``file.py:function``), or a function
            ``train_fn(seed, precision) -> number | dict | (labels, scores)`` that is called with ``"fp32"``
            and with ``precision`` in turns and must not use what an earlier call left behind.
        repeats: number of seeds; fewer than 3 are always inconclusive.
        margin: the largest loss of the metric that counts as not worse, in its units, or a share of FP32's
            value as text (``"1%"``); None: the task's own. Without any there is an interval and no verdict.
        metric: None for the task's; the name of one of its ``extra_metrics``; for a function the key of its
            dict, ``"auc"``, ``"accuracy"``, or any ``metric(labels, scores)``.
        higher_is_better: the metric's direction; None: as the task says, and yes where nobody says.
        alpha: the accepted risk of calling a worse plan not worse.
        with_autocast: add plain ``torch.autocast`` as a third arm.
        steps: optimizer steps of each run; None: the task's.
        max_time: limit on the training seconds of each arm and seed; it shortens all runs alike.
        data: where the task's data lie.
        out: a directory for the results; None keeps them in the Verdict alone.
        seed: the first seed; the others follow it.
        precision: what the plan's arm uses: ``"auto"``, a format or a policy.
        emulate: the half formats of both arms by casts there and back: their numbers, not their speed.
        plan: a ``plan.toml`` to use instead of planning.
        workers: processes that read data, for each arm.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
        on_event: called with what happens, for progress.

    Raises:
        UserError: an argument, the task or its data can't be used; the message says why.
    """
    if repeats < 1 or (steps is not None and steps < 1) or (max_time is not None and not max_time > 0):
        raise RunError(f"repeats={repeats}, steps={steps}, max_time={max_time}: each must be above 0")
    if not 0 <= seed <= 2**64 - repeats:
        raise RunError(f"seed is {seed}; seeds are from 0 to 2**64 - 1, and each repeat takes the next one")
    # Refuse before hours of training what can't be judged by.
    judge([0.0], [0.0], margin=margin_for(margin, 1.0), alpha=alpha)
    request = _Request(
        seeds=range(seed, seed + repeats), margin=margin, metric=metric, higher_is_better=higher_is_better,
        alpha=alpha, with_autocast=with_autocast, steps=steps, max_time=max_time, data=data,
        precision=precision, emulate=emulate, plan=plan, workers=workers, device=device,
        sink=on_event or (lambda event: None),
    )  # fmt: skip
    if callable(task):
        for what in ("with_autocast", "steps", "max_time", "data", "plan", "workers", "emulate"):
            if getattr(request, what):
                raise RunError(f"{what} can't be given with a function: it runs its own loop; leave it out")
    elif metric is not None and not isinstance(metric, str):
        raise TaskError("a task's own file holds its metrics; metric must be the name of one of them")
    folder = None if out is None else tally.new_directory(out)
    try:
        found = _functions(task, request) if callable(task) else _tasks(task, request, folder)
        judgement, speeds, result = found
        if folder is not None:
            tally.save(folder, result)
    except BaseException:
        if folder is not None:
            tally.discard(folder)
        raise
    return Verdict(judgement=judgement, speed=speeds["plan"], autocast_speed=speeds.get("autocast"),
                   metric_name=result["metric"]["name"], result=result,
                   out=None if folder is None else str(folder))  # fmt: skip


_Found = tuple[Judgement, dict[str, Ratio], dict[str, Any]]


def margin_for(margin: float | str | None, reference: float) -> float | None:
    """A margin in the metric's units; text such as ``"1%"`` is a share of ``reference``.

    Raises:
        TaskError: the text is neither a number nor a percentage.
    """
    if not isinstance(margin, str):
        return margin
    text = margin.strip()
    try:
        value = float(text.rstrip("%"))
    except ValueError:
        raise TaskError(
            f"margin is {margin!r}; write a number in the metric's units, or a share as '1%'"
        ) from None
    return value / 100 * abs(reference) if text.endswith("%") else value


def autocast_format(machine: Mapping[str, Any]) -> str:
    """The half format that a user who pastes ``autocast`` would take here: the better of the usable ones."""
    usable = {name: found["gemm_speedup"] or 0.0 for name, found in machine["formats"].items()
              if name in ("bf16", "fp16") and found["verdict"] == "use"}  # fmt: skip
    # bf16 needs no scaler, so it is what is pasted where nothing speaks for either.
    return max(usable, key=lambda name: (usable[name], name == "bf16")) if usable else "bf16"


# -- a task: children in turns --------------------------------------------------------------------


def _tasks(task: str, request: _Request, folder: Path | None) -> _Found:
    from .plan.machine import probe

    request.sink({"event": "probe"})
    machine = probe(quick=True, device=request.device).as_dict()
    with ExitStack() as stack:
        children = {}
        for name, module, argv in _commands(task, request, machine):
            children[name] = child = Child(name, module, argv)
            stack.callback(child.close)
        race = Race(
            children=children,
            steps=request.steps,
            max_time_s=request.max_time,
            metric=request.metric,
            save=None if folder is None else folder / "predictions",
            on_event=request.sink,
        )
        race.run(request.seeds)
        return _judged(task, request, race, machine)


def _commands(task: str, request: _Request, machine: Mapping[str, Any]) -> list[tuple[str, str, list[str]]]:
    """Each arm's name, module and command line."""
    common = [task, "--device", request.device, "--workers", str(request.workers)]
    if request.data is not None:
        common += ["--data", request.data]
    emulate = ["--emulate"] * request.emulate
    plan = ["--precision", request.precision, *emulate]
    plan += [] if request.plan is None else ["--plan", request.plan]
    arms = [("fp32", "arm_plain", [*common, "--precision", "fp32"]), ("plan", "arm_plan", [*common, *plan])]
    if request.with_autocast:
        half = _emulated_half(request.precision) if request.emulate else autocast_format(machine)
        arms.append(("autocast", "arm_plain", [*common, "--precision", half, *emulate]))
    return arms


def _emulated_half(precision: str) -> str:
    """The format that plain autocast emulates: the policy's default, or FP16 where that is none of half."""
    default = "fp16" if precision == "auto" else Policy.parse(precision).default
    return default if FORMATS[default].is_half else "fp16"


def _judged(task: str, request: _Request, race: Race, machine: Mapping[str, Any]) -> _Found:
    about = race.task
    name = race.metric or about["metric_name"]
    better = about["higher_is_better"] if request.higher_is_better is None else request.higher_is_better
    tests = {
        arm: [math.nan if t.test is None else t.test for t in tracks.values()]
        for arm, tracks in race.tracks.items()
    }
    margin = _task_margin(request, about, name, statistics.fmean(tests["fp32"]))
    judgement = judge(
        tests["fp32"], tests["plan"], margin=margin, higher_is_better=better, alpha=request.alpha
    )
    speeds = {
        arm: tally.ratio_of(race.tracks["fp32"], race.tracks[arm]) for arm in race.tracks if arm != "fp32"
    }
    targets = {seed: tally.target_of(track, _task_margin(request, about, name, _last(track)) or 0.0, better)
               for seed, track in race.tracks["fp32"].items()}  # fmt: skip
    arms = {
        arm: tally.arm_of(
            tracks,
            peak_mem_bytes=race.peaks[arm],
            targets=targets,
            higher_is_better=better,
            metrics=[m for m in tests[arm] if math.isfinite(m)],
        )
        for arm, tracks in race.tracks.items()
    }
    plan = Plan.from_toml(race.tracks["plan"][request.seeds[0]].setup["plan_toml"])
    result = tally.result_of(
        task=about["name"], about=about["about"], metric={"name": name, "higher_is_better": better},
        judgement=judgement, speeds=speeds, arms=arms, seeds=request.seeds, plan=plan, machine=machine,
        notes=[*race.notes, *[_EMULATED] * request.emulate], repeat=_command(task, request),
    )  # fmt: skip
    return judgement, speeds, result


def _last(track: Track) -> float:
    return track.evals[-1]["metric"] or 0.0 if track.evals else 0.0


def _task_margin(request: _Request, about: Mapping[str, Any], name: str, reference: float) -> float | None:
    """The margin that was asked for, or else the task's own, which is about its own metric only."""
    if not math.isfinite(reference):
        reference = 0.0  # such an FP32 can't be judged against, by whatever margin
    if request.margin is not None:
        return margin_for(request.margin, reference)
    own = about["margin"] if name == about["metric_name"] else None
    return own * abs(reference) if own is not None and about["margin_relative"] else own


def _command(task: str, request: _Request) -> str:
    words = [
        "equipoise",
        "compare",
        task,
        "--repeats",
        str(len(request.seeds)),
        "--seed",
        str(request.seeds[0]),
    ]
    options = {
        "--margin": request.margin, "--metric": request.metric, "--max-steps": request.steps,
        "--max-time": request.max_time, "--data": request.data, "--plan": request.plan,
        "--workers": request.workers or None,
    }  # fmt: skip
    for option, value in options.items():
        if value is not None:
            words += [option, str(value)]
    if request.precision != "auto":
        words += ["--precision", request.precision]
    words += ["--emulate"] * request.emulate
    return shlex.join(words + ["--with-autocast"] * request.with_autocast)


# -- a whole loop of the user's: called here ------------------------------------------------------


def _functions(train: TrainFunction, request: _Request) -> _Found:
    arms = {"fp32": "fp32", "plan": request.precision}
    metrics: dict[str, list[float]] = {name: [] for name in arms}
    times: dict[str, list[float]] = {name: [] for name in arms}
    void, load = [], ForeignLoad(1)
    for number, seed in enumerate(request.seeds):
        load.share()
        # Which arm is first changes from seed to seed: what the first call warms up helps both alike.
        for name in list(arms)[:: -1 if number % 2 else 1]:
            request.sink(
                {"event": "setup", "arm": name, "seed": seed, "number": number, "of": len(request.seeds)}
            )
            begin = time.perf_counter()
            found = train(seed, arms[name])
            times[name].append(time.perf_counter() - begin)
            metrics[name].append(metric_from(found, request.metric))
            request.sink({"event": "test", "arm": name, "seed": seed, "metric": metrics[name][-1]})
        share = load.share()
        void.append(share is not None and share > FOREIGN_LIMIT)
    mean = statistics.fmean(metrics["fp32"])
    margin = margin_for(request.margin, mean if math.isfinite(mean) else 0.0)
    better = request.higher_is_better is not False
    judgement = judge(
        metrics["fp32"], metrics["plan"], margin=margin, higher_is_better=better, alpha=request.alpha
    )
    speeds = {"plan": paired_ratio(times["fp32"], times["plan"], void)}
    result = tally.result_of(
        task=getattr(train, "__name__", type(train).__name__),
        about=(train.__doc__ or "").strip().split("\n")[0],
        metric={"name": _name_of(request.metric), "higher_is_better": better},
        judgement=judgement,
        speeds=speeds,
        arms={name: tally.loop_of(request.seeds, times[name], metrics[name]) for name in arms},
        seeds=request.seeds,
        plan=None,
        machine=None,
        repeat="",
        notes=["Whole loops were timed, set-up included; speed is their ratio, one pair a seed."],
    )
    return judgement, speeds, result


def _name_of(metric: Any) -> str:
    return (
        "metric"
        if metric is None
        else metric
        if isinstance(metric, str)
        else getattr(metric, "__name__", "metric")
    )


def metric_from(found: Any, metric: Any) -> float:
    """The number that a training function's return value stands for.

    Raises:
        TaskError: it is none of the allowed kinds, or doesn't hold the metric.
    """
    if isinstance(found, Mapping):
        key = next(iter(found)) if metric is None and len(found) == 1 else metric
        if key not in found:
            raise TaskError(f"train_fn gave the metrics {', '.join(map(str, found)) or 'none'}; "
                            f"metric is {metric!r}: name one of them")  # fmt: skip
        return float(found[key])
    if isinstance(found, tuple) and len(found) == 2:
        labels, scores = (np.asarray(part) for part in found)
        return float(_callable_metric(metric)(labels, scores))
    try:
        return float(found)
    except (TypeError, ValueError):
        raise TaskError(
            f"train_fn gave a {type(found).__name__}; it must give a number, a dict of numbers, or "
            "(labels, scores). A function that makes a Task is compared by its name: 'file.py:function'."
        ) from None


def _callable_metric(metric: Any) -> Callable[[np.ndarray, np.ndarray], float]:
    if callable(metric):
        chosen: Callable[[np.ndarray, np.ndarray], float] = metric
        return chosen
    if metric == "auc":
        from sklearn.metrics import roc_auc_score

        return lambda labels, scores: float(roc_auc_score(labels, scores))
    if metric == "accuracy":
        return lambda labels, scores: float(np.mean(_classes(scores) == labels))
    raise TaskError(
        f"train_fn gave labels and scores; metric is {metric!r}: give 'auc', 'accuracy' or a function "
        "metric(labels, scores)"
    )


def _classes(scores: np.ndarray) -> np.ndarray:
    return scores.argmax(-1) if scores.ndim > 1 else (scores > 0.5).astype(int)
