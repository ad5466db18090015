"""All figures of a report, from what a comparison or a run left on disk.

Enters: the plain data that ``reading.py`` read. Leaves: one dict, which is ``report.json`` and the only
thing that the page shows. Where: after the run; no torch. What was not measured is None or left out, never
filled in.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ..arms import disturbed, settled
from ..records import PARTS
from . import words
from .curves import curve
from .layers import layer_map
from .words import finite

SCHEMA = 1
ARMS = ("fp32", "autocast", "plan")

Figures = dict[str, Any]


def of_comparison(data: Mapping[str, Any], price_per_hour: float | None) -> Figures:
    """Figures of ``comparison.json`` (schema in ``report.py``)."""
    metric = _metric(data.get("metric") or {})
    verdict = data.get("verdict")
    speedup = interval(data.get("speedup"))
    arms = [_arm(name, data["arms"][name]) for name in ARMS if isinstance(data["arms"].get(name), Mapping)]
    baseline = next((a for a in arms if a["arm"] == "fp32"), None)
    for arm in arms:
        arm["speedup"] = _speedup_of(arm, baseline, speedup, interval(data.get("autocast_speedup")))
        arm["cost"] = cost(arm["setup_s"], arm["run_s"], price_per_hour)
    plan = next((a for a in arms if a["arm"] == "plan"), {})
    rows = {
        name: (data["arms"][name].get("seeds") or {})
        for name in ARMS
        if isinstance(data["arms"].get(name), Mapping)
    }
    figures: Figures = {
        "schema": SCHEMA,
        "kind": "comparison",
        "task": str(data.get("task") or "comparison"),
        "about": str(data.get("about") or ""),
        "verdict": verdict,
        "reason": str(data.get("reason") or ""),
        "headline": words.headline(verdict, speedup),
        "sentence": words.metric_sentence(metric),
        "helped": str(data.get("helped") or ""),
        "speedup": speedup,
        "metric": metric,
        "seeds": list(data.get("seeds") or _seeds(rows)),
        "arms": arms,
        "power": finite(data.get("power")),
        "curves": {
            "loss": _curves(rows, "curve", "loss"),
            "metric": _curves(rows, "evals", "metric"),
        },
        "step": _step(plan, data.get("step")),
        "cost": _cost_note(price_per_hour),
        "resume": "",
        "repeat": str(data.get("repeat") or ""),
        "versions": dict(data.get("versions") or {}),
        "machine": _machine(data.get("machine")),
        "notes": list(data.get("notes") or []),
    }
    return figures | layer_map(data.get("plan_toml"), data.get("formats"), figures["notes"])


def of_run(data: Mapping[str, Any], price_per_hour: float | None) -> Figures:
    """Figures of a run directory (schema in ``report.py``)."""
    metrics, rows = data["metrics"], data["steps"]
    asked = data["asked"]
    metric = _metric(metrics.get("metric") or {})
    seed = str(asked.get("seed", 0))
    evals = [e for e in metrics.get("evals") or [] if isinstance(e, Mapping)]
    arm = _run_arm(metrics, rows, evals)
    arm["cost"] = cost(arm["setup_s"], arm["run_s"], price_per_hour)
    best = _best(evals, metric["higher_is_better"])
    sampled = next((r for r in reversed(rows) if isinstance(r.get("parts"), Mapping)), None)
    figures: Figures = {
        "schema": SCHEMA,
        "kind": "run",
        "task": str(asked.get("task") or metrics.get("task") or "run"),
        "about": str(asked.get("about") or metrics.get("about") or ""),
        "verdict": None,
        "reason": "",
        "headline": _run_headline(
            metric, arm, best, bool(metrics.get("finished", arm["metric"]["mean"] is not None))
        ),
        "sentence": _run_sentence(metric, arm, best),
        "helped": "",
        "speedup": None,
        "metric": metric | {"best": best},
        "seeds": [asked["seed"]] if "seed" in asked else [],
        "arms": [arm],
        "power": None,
        "curves": {
            "loss": [c for c in [_named("plan", curve({seed: rows}, "loss"))] if c],
            "metric": [c for c in [_named("plan", curve({seed: evals}, "metric"))] if c],
        },
        "step": _step(arm, sampled),
        "cost": _cost_note(price_per_hour),
        "resume": str(metrics.get("resume") or ""),
        "repeat": data["repeat"],
        "versions": data["versions"],
        "machine": _machine(data["machine"]),
        "notes": list(data["notes"]),
    }
    return figures | layer_map(data["plan_toml"], metrics.get("formats"), figures["notes"])


def _run_arm(
    metrics: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]]
) -> Figures:
    extra = metrics.get("extra")
    batch = finite(metrics.get("batch_size"))
    run_s = finite(metrics.get("time_s")) or _last_time([*rows, *evals])
    steps = _last_step(rows)
    overall = batch * steps / run_s if batch and steps and run_s else None
    return {
        "arm": "plan",
        "label": "This run",
        "setup_s": finite(metrics.get("setup_s")),
        "run_s": run_s,
        "peak_mem_bytes": finite(metrics.get("peak_mem_bytes")),
        "time_to_metric_s": finite(metrics.get("time_to_metric_s")),
        "samples_per_s": interval(metrics.get("samples_per_s")) or interval(overall),
        "readings": _rates(rows, batch),
        "extra": {str(k): finite(v) for k, v in extra.items()} if isinstance(extra, Mapping) else {},
        "speedup": None,
        "metric": {"mean": finite(metrics.get("test")), "low": None, "high": None},
        "parts": _mean_parts([r["parts"] for r in rows if isinstance(r.get("parts"), Mapping)]),
        "skipped": sum(bool(r.get("skipped")) for r in rows) if rows else None,
        "steps": steps,
        "scale": finite(rows[-1].get("scale")) if rows else None,
        "batch": batch,
    }


def _rates(rows: Sequence[Mapping[str, Any]], batch: float | None) -> list[float]:
    """Samples a second of up to 40 stretches of a run, whole batches; empty when rows carry no time."""
    marks = [(finite(r.get("step")), finite(r.get("time_s"))) for r in rows]
    known = [(step, time_s) for step, time_s in marks if step is not None and time_s is not None]
    ends = known[:: max(1, len(known) // 40)]
    pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(ends)]
    return [batch * steps / time_s for steps, time_s in pairs if time_s > 0] if batch else []


def interval(value: Any) -> Figures | None:
    """{median, low, high} of a measured figure; None without a median."""
    given = value if isinstance(value, Mapping) else {"median": value}
    median = finite(given.get("median", given.get("mean")))
    if median is None:
        return None
    trust = {"trusted": bool(given["trusted"])} if "trusted" in given else {}
    return {"median": median, "low": finite(given.get("low")), "high": finite(given.get("high")), **trust}


def cost(setup_s: float | None, run_s: float | None, price_per_hour: float | None) -> float | None:
    """Price of one run: (set-up + training) in hours times an hour's price; None without a time."""
    if price_per_hour is None or run_s is None:
        return None
    return (run_s + (setup_s or 0.0)) / 3600 * price_per_hour


def _cost_note(price_per_hour: float | None) -> Figures | None:
    if price_per_hour is None:
        return None
    return {
        "price_per_hour": price_per_hour,
        "formula": "cost of one run = (set-up time + training time) ÷ 3600 s × price per hour",
    }


def _metric(metric: Mapping[str, Any]) -> Figures:
    numbers = {k: finite(metric.get(k)) for k in ("fp32", "plan", "difference", "low", "high", "margin")}
    return {
        "name": str(metric.get("name") or "metric"),
        "higher_is_better": metric.get("higher_is_better") is not False,
        **numbers,
    }


def _arm(name: str, arm: Mapping[str, Any]) -> Figures:
    seeds = [s for s in (arm.get("seeds") or {}).values() if isinstance(s, Mapping)]
    slices = [s for seed in seeds for s in seed.get("slices") or [] if isinstance(s, Mapping)]
    runs = [t for t in (_run_time(seed) for seed in seeds) if t]
    metric = arm.get("metric") if isinstance(arm.get("metric"), Mapping) else {}
    steps = sum(finite(s.get("steps")) or 0 for s in slices)
    return {
        "arm": name,
        "label": words.ARM_LABELS[name],
        "setup_s": finite(arm.get("setup_s")),
        "run_s": statistics.median(runs) if runs else None,
        "peak_mem_bytes": finite(arm.get("peak_mem_bytes")),
        "extra": _extra(seeds),
        "samples_per_s": interval(arm.get("samples_per_s")),
        "time_to_metric_s": finite(arm.get("time_to_metric_s")),
        "metric": {k: finite((metric or {}).get(k)) for k in ("mean", "low", "high")},
        "parts": _mean_parts([arm["parts"]]) if isinstance(arm.get("parts"), Mapping) else None,
        "readings": [r for r in map(_rate, _counted(seeds)) if r],
        "skipped": _total(seeds, "skipped"),
        "steps": int(steps) or None,
        "scale": next((s for s in (finite(seed.get("scale")) for seed in seeds) if s), None),
        "batch": _batch(slices),
    }


def _batch(slices: Sequence[Mapping[str, Any]]) -> float | None:
    """Samples of a whole batch: slices over an epoch's end hold a short one, so the fullest slice tells."""
    pairs = [(finite(s.get("samples")), finite(s.get("steps"))) for s in slices]
    return max((round(samples / steps) for samples, steps in pairs if samples and steps), default=None)


def _extra(seeds: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over the seeds of the metrics that are shown and never decide."""
    found = [seed["extra"] for seed in seeds if isinstance(seed.get("extra"), Mapping)]
    means = {}
    for name in dict.fromkeys(str(k) for extra in found for k in extra):
        values = [v for v in (finite(extra.get(name)) for extra in found) if v is not None]
        means[name] = statistics.fmean(values) if len(values) == len(found) else None
    return means


def _counted(seeds: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The slices that the throughput rests on: after the warm-up, without foreign load."""
    rows = [
        [{"foreign": None, **s} for s in seed.get("slices") or [] if isinstance(s, Mapping)] for seed in seeds
    ]
    return [row for found in rows for row in settled(found) if not disturbed(row)]


def _total(seeds: Sequence[Mapping[str, Any]], key: str) -> int | None:
    values = [finite(seed.get(key)) for seed in seeds]
    read = [v for v in values if v is not None]
    return int(sum(read)) if read and len(read) == len(values) else None


def _rate(piece: Mapping[str, Any]) -> float | None:
    samples, time_s = finite(piece.get("samples")), finite(piece.get("time_s"))
    return samples / time_s if samples and time_s else None


def _run_time(seed: Mapping[str, Any]) -> float | None:
    slices = [finite(s.get("time_s")) for s in seed.get("slices") or [] if isinstance(s, Mapping)]
    return math.fsum(s for s in slices if s) or _last_time(
        [*(seed.get("curve") or []), *(seed.get("evals") or [])]
    )


def _last_time(rows: Sequence[Mapping[str, Any]]) -> float | None:
    return max((t for t in (finite(row.get("time_s")) for row in rows) if t is not None), default=None)


def _last_step(rows: Sequence[Mapping[str, Any]]) -> int | None:
    return int(max((s for s in (finite(r.get("step")) for r in rows) if s is not None), default=0)) or None


def _mean_parts(samples: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """Median of each part over the sampled steps, seconds; None without a sample."""
    found = {part: [v for v in (finite(s.get(part)) for s in samples) if v is not None] for part in PARTS}
    medians = {part: statistics.median(values) for part, values in found.items() if values}
    return medians if any(medians.values()) else None


def _speedup_of(arm: Figures, baseline: Figures | None, plan: Any, autocast: Any) -> Any:
    """The paired speed-up where the comparison gives one, else the ratio of the medians, no interval."""
    if arm["arm"] == "fp32":
        return None
    given = plan if arm["arm"] == "plan" else autocast
    base = baseline["samples_per_s"] if baseline else None
    if given is None and base and arm["samples_per_s"]:
        return {"median": arm["samples_per_s"]["median"] / base["median"], "low": None, "high": None}
    return given


def _named(arm: str, found: Figures | None) -> Figures | None:
    return None if found is None else {"arm": arm, **found}


def _curves(arms: Mapping[str, Mapping[str, Any]], rows: str, value: str) -> list[Figures]:
    found = []
    for name, seeds in arms.items():
        lines = {
            k: [r for r in s.get(rows) or [] if isinstance(r, Mapping)]
            for k, s in seeds.items()
            if isinstance(s, Mapping)
        }
        found.append(_named(name, curve(lines, value)))
    return [c for c in found if c]


def _seeds(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({seed for seeds in arms.values() for seed in seeds})


def _step(arm: Mapping[str, Any], real: Any) -> Figures:
    """One real step of the plan: its loss, scale and whether it was skipped, as far as recorded."""
    row = real if isinstance(real, Mapping) else {}
    return {
        "step": finite(row.get("step")),
        "loss": finite(row.get("loss")),
        "grad_norm": finite(row.get("grad_norm")),
        "scale": finite(row.get("scale")) or arm.get("scale"),
        "batch": arm.get("batch"),
        "parts": _mean_parts([row["parts"]]) if isinstance(row.get("parts"), Mapping) else arm.get("parts"),
        "skipped": arm.get("skipped"),
        "steps": arm.get("steps"),
    }


def _machine(machine: Any) -> Figures | None:
    if not isinstance(machine, Mapping) or not machine:
        return None
    formats = [
        {
            "format": str(name),
            "verdict": str(v.get("verdict") or "not measured"),
            "reason": str(v.get("reason") or ""),
            "gemm_speedup": finite(v.get("gemm_speedup")),
            "conv_speedup": finite(v.get("conv_speedup")),
            "claimed": v.get("claimed") if isinstance(v.get("claimed"), bool) else None,
            "emulated": v.get("emulated") is True,
        }
        for name, v in (machine.get("formats") or {}).items()
        if isinstance(v, Mapping)
    ]
    facts = machine.get("facts") if isinstance(machine.get("facts"), Mapping) else {}
    return {
        "name": str(machine.get("name") or "unnamed"),
        "device": str(machine.get("device") or ""),
        "formats": formats,
        "facts": dict(facts or {}),
        "trusted": machine.get("trusted", True),
        "note": str(machine.get("note") or ""),
        "fingerprint": str(machine.get("fingerprint") or ""),
    }


def _best(evals: Sequence[Mapping[str, Any]], higher_is_better: bool) -> Figures | None:
    read = [(finite(e.get("metric")), e) for e in evals]
    known = [(v, e) for v, e in read if v is not None]
    if not known:
        return None
    value, row = (max if higher_is_better else min)(known, key=lambda pair: pair[0])
    return {"value": value, "step": finite(row.get("step")), "time_s": finite(row.get("time_s"))}


def _run_headline(metric: Figures, arm: Figures, best: Figures | None, finished: bool) -> str:
    value = arm["metric"]["mean"]
    took = f" in {words.duration(arm['run_s'])}" if arm["run_s"] else ""
    if value is not None:
        return f"{words.capital(metric['name'])} {words.number(value, 4)} on the test data{took}."
    if best is not None:
        state = "" if finished else "Not finished: "
        value_text = f"{words.capital(state + metric['name'])} {words.number(best['value'], 4)}"
        return f"{value_text} on the validation data{took}."
    return "This run has no result yet."


def _run_sentence(metric: Figures, arm: Figures, best: Figures | None) -> str:
    texts = []
    if best is not None:
        at = f" at step {best['step']:,.0f}" if best["step"] is not None else ""
        texts.append(f"Best {metric['name']} on the validation data: {words.number(best['value'], 4)}{at}.")
    if arm["steps"]:
        skips = (
            ""
            if arm["skipped"] is None
            else f", {arm['skipped']:,} of them skipped"
            if arm["skipped"]
            else ", none skipped"
        )
        texts.append(f"{words.plural(arm['steps'], 'step')}{skips}.")
    texts.append("One run can't tell whether a format costs quality; a comparison can.")
    return " ".join(texts)
