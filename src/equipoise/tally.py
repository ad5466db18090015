"""What the arms of a comparison did, summed up and kept.

Enters: the tracks of a race (or whole loops' times and metrics), a plan, a machine. Leaves: the plain data of
``comparison.json``, which the report reads, and the directory it lies in. Where: at the end of a comparison;
no torch. Source: the schema is written down in ``deliver.report``.
"""

import contextlib
import json
import math
import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from . import __version__
from .arms import Track, disturbed, settled
from .errors import RunError
from .evidence import Judgement, Ratio, bootstrap_median, mean_interval, median_of, paired_ratio
from .policy import Plan
from .records import PARTS, finite_only
from .watch.files import Disk, explained, make_directories, put

SCHEMA = 1
"""Version of ``comparison.json``."""
WORTH_SAYING = 1.01
"""A gain below 1 % is within what a race can tell."""


def ratio_of(base: Mapping[int, Track], other: Mapping[int, Track]) -> Ratio:
    """How many times faster the other arm is, by the slices that count."""
    base_s, other_s, void = [], [], []
    for seed, track in other.items():
        count = min(len(track.slices), len(base[seed].slices))
        for a, b in zip(settled(base[seed].slices[:count]), settled(track.slices[:count]), strict=True):
            base_s.append(a["time_s"])
            other_s.append(b["time_s"])
            void.append(disturbed(a) or disturbed(b))
    return paired_ratio(base_s, other_s, void)


def arm_of(tracks: dict[int, Track], *, peak_mem_bytes: int | None, targets: Mapping[int, float | None],
           higher_is_better: bool, metrics: Sequence[float]) -> dict[str, Any]:  # fmt: skip
    """One arm's part of ``comparison.json``."""
    rows = [row for track in tracks.values() for row in settled(track.slices)]
    rates = [row["samples"] / row["time_s"] for row in rows if not disturbed(row)]
    rates = rates or [row["samples"] / row["time_s"] for row in rows]
    low, high = bootstrap_median(rates)
    first = next(iter(tracks.values()))
    reached = [time_to(track, targets.get(seed), higher_is_better) for seed, track in tracks.items()]
    return {
        "setup_s": first.setup.get("setup_s"),
        "peak_mem_bytes": peak_mem_bytes,
        "samples_per_s": {"median": statistics.median(rates), "low": low, "high": high},
        "time_to_metric_s": median_of(reached),
        "metric": _spread(metrics),
        "parts": _parts(tracks),
        "step": next((t.step for t in reversed(tracks.values()) if t.step), None),
        "seeds": {str(seed): {"curve": t.curve, "evals": t.evals, "test": t.test, "extra": t.extra,
                              "slices": t.slices, **_last(t)} for seed, t in tracks.items()},
    }  # fmt: skip


def _last(track: Track) -> dict[str, Any]:
    kept = {key: track.setup[key] for key in ("threads",) if key in track.setup}
    return kept if track.skipped is None else kept | {"skipped": track.skipped, "scale": track.scale}


def loop_of(seeds: Sequence[int], times_s: Sequence[float], metrics: Sequence[float]) -> dict[str, Any]:
    """The part of ``comparison.json`` of an arm that is a whole loop: a time and a metric a seed."""
    return {
        "setup_s": None, "peak_mem_bytes": None, "samples_per_s": None, "time_to_metric_s": None,
        "metric": _spread([m for m in metrics if math.isfinite(m)]), "parts": None,
        "seeds": {str(seed): {"curve": [], "evals": [], "test": metric, "slices": [], "loop_s": time_s}
                  for seed, metric, time_s in zip(seeds, metrics, times_s, strict=True)},
    }  # fmt: skip


def _parts(tracks: Mapping[int, Track]) -> dict[str, float] | None:
    """Seconds of a mean step by part; None when no step was looked into."""
    steps = sum(track.parts_steps for track in tracks.values())
    if not steps:
        return None
    return {
        part: math.fsum(track.parts_s.get(part, 0.0) for track in tracks.values()) / steps for part in PARTS
    }


def _spread(metrics: Sequence[float]) -> dict[str, float | None]:
    low, high = mean_interval(metrics)
    return {"mean": statistics.fmean(metrics) if metrics else None, "low": low, "high": high}


def target_of(track: Track, margin: float, higher_is_better: bool) -> float | None:
    """The validation metric that counts as reached: FP32's last one, less the margin."""
    last = track.evals[-1]["metric"] if track.evals else None
    return None if last is None else last - margin if higher_is_better else last + margin


def time_to(track: Track, target: float | None, higher_is_better: bool) -> float | None:
    """Training seconds, without set-up and evaluation, until the validation metric is first reached."""
    for row in track.evals:
        if target is None or row["metric"] is None:
            continue
        if row["metric"] >= target if higher_is_better else row["metric"] <= target:
            return float(row["time_s"])
    return None


def helped(plan: Plan | None, arms: Mapping[str, Any], speeds: Mapping[str, Ratio]) -> str:
    """What made the plan faster where no narrow format pays; empty where one does, or nothing was planned."""
    if plan is None or plan.source != "auto" or set(plan.formats.values()) != {"fp32"}:
        return ""
    speed = speeds["plan"]
    if "autocast" in speeds and speeds["autocast"].median > speed.median:
        return ""  # the plan says that no format pays, and this comparison has just found one that does
    gains = []
    for choice in plan.choices:
        share = choice.evidence.get("time_ratio", 1.0)
        if choice.what in ("memory_format", "optimizer") and share < 1 / WORTH_SAYING:
            name = f"{choice.choice} {choice.what.replace('memory_format', 'layout')}"
            gains.append(f"{name} ({1 / share:.2f}x)")
    if (feed := _feed_gain(arms)) > WORTH_SAYING:
        gains.append(f"feed ({feed:.2f}x)")
    begin = "No narrow format pays on this machine for this model."
    if not gains:
        return (
            f"{begin} Nothing else helped either: the plan trains as plain FP32 does ({speed.median:.2f}x)."
        )
    return f"{begin} What did help: {', '.join(gains)}; {speed.median:.2f}x in all."


def _feed_gain(arms: Mapping[str, Any]) -> float:
    """How much faster a step is for its data alone; 1 where that is unknown."""
    base, plan = (arms[name].get("parts") for name in ("fp32", "plan"))
    if not base or not plan:
        return 1.0
    whole_s = math.fsum(base.values())
    return float(whole_s / (whole_s - base["data_s"] + plan["data_s"]))


def result_of(*, task: str, about: str, metric: Mapping[str, Any], judgement: Judgement,
              speeds: Mapping[str, Ratio], arms: Mapping[str, Any], seeds: Sequence[int],
              plan: Plan | None, machine: Mapping[str, Any] | None, notes: Sequence[str],
              repeat: str) -> dict[str, Any]:  # fmt: skip
    """The content of ``comparison.json``."""
    autocast = speeds.get("autocast")
    names = {"plan": "the plan", "autocast": "plain autocast"}
    trust = [f"Speed of {names[arm]}: {ratio.note}." for arm, ratio in speeds.items() if ratio.note]
    return {
        "schema": SCHEMA,
        "task": task,
        "about": about,
        "seeds": list(seeds),
        "verdict": judgement.verdict,
        "reason": judgement.reason,
        "alpha": judgement.alpha,
        "power": judgement.power,
        "bound": judgement.bound,
        "metric": {
            **metric, "margin": judgement.margin, "fp32": judgement.fp32, "plan": judgement.plan,
            "difference": judgement.difference, "low": judgement.low, "high": judgement.high,
        },
        "speedup": speeds["plan"].as_dict(),
        "autocast_speedup": None if autocast is None else autocast.as_dict(),
        "arms": dict(arms),
        "step": arms["plan"].get("step"),
        "formats": {} if plan is None else plan.counts(),
        "plan_toml": "" if plan is None else plan.to_toml(),
        "machine": machine,
        "versions": versions(),
        "repeat": repeat,
        "helped": helped(plan, arms, speeds),
        "notes": [*notes, *trust, *_beaten(speeds)],
    }  # fmt: skip


def _beaten(speeds: Mapping[str, Ratio]) -> list[str]:
    """Says so when the plan lost to plain autocast by more than the noise of both."""
    autocast, plan = speeds.get("autocast"), speeds["plan"]
    if autocast is None or not (autocast.trusted and plan.trusted) or autocast.low <= plan.high:
        return []
    return [f"Plain autocast was faster than the plan: {autocast.median:.2f}x FP32's speed, the plan "
            f"{plan.median:.2f}x."]  # fmt: skip


def versions() -> dict[str, str]:
    """What took part, without importing it."""
    found = {"equipoise": __version__, "python": sys.version.split()[0]}
    for name in ("torch", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def new_directory(path: str | Path) -> Path:
    """Make the comparison's directory, or take an empty one.

    Raises:
        RunError: something is there already, or it can't be made.
    """
    folder = Path(path)
    with explained(f"look into {str(folder)!r}"):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RunError(f"{str(folder)!r} is already there and not empty; choose another place with --out")
    make_directories(Disk(), folder / "predictions")
    return folder


def discard(folder: Path) -> None:
    """Remove what a comparison that failed has left in the directory that it made."""
    shutil.rmtree(folder / "predictions", ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.rmdir()


def save(folder: Path, result: Mapping[str, Any]) -> None:
    """Write the comparison; ``comparison.json`` last, so that a directory with it is complete."""
    disk = Disk()
    if result["plan_toml"]:
        put(disk, folder / "plan.toml", result["plan_toml"].encode())
    if result["machine"] is not None:
        put(disk, folder / "machine.json", _json(result["machine"]))
    put(disk, folder / "comparison.json", _json(result))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(finite_only(value), ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode()
