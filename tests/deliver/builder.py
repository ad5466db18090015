"""Directories of comparisons and runs, as ``compare`` and ``train`` leave them, made without training."""

import json
import math
import random
from pathlib import Path
from typing import Any

from equipoise.policy import Plan, Policy
from equipoise.records import Choice, FormatVerdict, Machine

HOSTILE = '<script>alert("x")</script><img src=http://evil.example/x.png onerror=alert(1)>'
SPEED = {"fp32": 1.0, "autocast": 1.41, "plan": 1.93}
PARTS = {
    "fp32": {
        "data_s": 0.004,
        "forward_s": 0.150,
        "backward_s": 0.310,
        "optimizer_s": 0.046,
        "machinery_s": 0.0,
    },
    "autocast": {
        "data_s": 0.004,
        "forward_s": 0.104,
        "backward_s": 0.205,
        "optimizer_s": 0.048,
        "machinery_s": 0.0,
    },
    "plan": {
        "data_s": 0.002,
        "forward_s": 0.084,
        "backward_s": 0.160,
        "optimizer_s": 0.013,
        "machinery_s": 0.003,
    },
}


def machine(**changes: Any) -> Machine:
    """A CPU with bf16 units that emulates FP16."""
    formats = {
        "fp32": FormatVerdict(format="fp32", verdict="use", reason="The reference: 0.37 TF/s.", claimed=True),
        "bf16": FormatVerdict(
            format="bf16",
            verdict="use",
            claimed=True,
            gemm_speedup=6.4,
            conv_speedup=2.3,
            reason="A 2048 product runs at 2.4 TF/s, 6.4 times FP32; convolutions gain 2.3 times.",
        ),
        "fp16": FormatVerdict(
            format="fp16",
            verdict="unusable",
            claimed=True,
            emulated=True,
            gemm_speedup=0.97,
            conv_speedup=0.006,
            reason="A convolution's backward takes 160 times FP32's time.",
        ),
    }
    facts = {
        "cores": 2,
        "threads": 2,
        "memory_total_bytes": 8 * 2**30,
        "memory_free_bytes": 5.2 * 2**30,
        "cpu_features": ["avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"],
        "governor": None,
        "versions": {"torch": "2.13.0", "python": "3.12.4"},
    }
    return Machine(
        **{
            "fingerprint": "5f1c9a0b",
            "device": "cpu",
            "name": "Xeon, 2 cores",
            "formats": formats,
            "facts": facts,
            **changes,
        }
    )


def plan(blocks: int = 6) -> Plan:
    """A GPT's plan: linear layers in bf16, norms and embeddings in FP32, each with its reason."""
    formats = {"embed.tokens": "fp32", "embed.positions": "fp32"}
    choices = [
        Choice(
            what="format",
            where="embed.tokens",
            choice="fp32",
            reason="a look-up moves bytes and gains nothing",
        ),
        Choice(
            what="format",
            where="embed.positions",
            choice="fp32",
            reason="a look-up moves bytes and gains nothing",
        ),
    ]
    for k in range(blocks):
        for part, fmt, reason in (
            ("norm1", "fp32", "statistics of a norm stay in FP32"),
            (
                "attention.qkv",
                "bf16",
                f"{2.1 + k / 50:.2f} ms against {5.6 + k / 50:.2f} in FP32, both directions",
            ),
            (
                "attention.out",
                "bf16",
                f"{0.8 + k / 50:.2f} ms against {1.9 + k / 50:.2f} in FP32, both directions",
            ),
            ("norm2", "fp32", "statistics of a norm stay in FP32"),
            ("mlp.up", "bf16", f"{2.7 + k / 50:.2f} ms against {7.4 + k / 50:.2f} in FP32, both directions"),
            (
                "mlp.down",
                "bf16",
                f"{2.9 + k / 50:.2f} ms against {7.7 + k / 50:.2f} in FP32, both directions",
            ),
        ):
            name = f"blocks.{k}.{part}"
            formats[name] = fmt
            evidence = {"bf16_s": 0.0027, "fp32_s": 0.0074, "gain_ratio": 2.7} if fmt == "bf16" else {}
            choices.append(Choice(what="format", where=name, choice=fmt, reason=reason, evidence=evidence))
    formats |= {"norm": "fp32", "head": "bf16"}
    choices += [
        Choice(what="memory_format", where="*", choice="contiguous", reason="there is no convolution"),
        Choice(
            what="optimizer",
            where="*",
            choice="fused",
            reason="one kernel instead of 98",
            evidence={"before_s": 0.046, "after_s": 0.013},
        ),
        Choice(
            what="race",
            where="*",
            choice="plan",
            reason="the fastest of three on real steps",
            evidence={"fp32_s": 0.51, "autocast_s": 0.361, "plan_s": 0.262},
        ),
    ]
    return Plan(
        policy=Policy.parse("bf16; *norm*=fp32; embed.*=fp32"),
        formats=formats,
        fused_optimizer=True,
        choices=choices,
        source="auto",
        note="Measured in 11 s on the first batch.",
    )


def arm(name: str, seeds: int = 3, steps: int = 400, start: float = 5.6, end: float = 1.6) -> dict[str, Any]:
    """One arm: curves that fall from ``start`` to ``end`` with noise, evaluations, slices."""
    speed, parts = SPEED[name], PARTS[name]
    step_s, batch = sum(parts.values()), 8
    found: dict[str, Any] = {}
    for seed in range(seeds):
        rng = random.Random(f"{seed}")
        own = random.Random(f"{seed} {name}")
        curve, evals = [], []
        for step in range(1, steps + 1):
            level = end + (start - end) * math.exp(-step / (steps / 6))
            curve.append(
                {
                    "step": step,
                    "time_s": step * step_s,
                    "loss": level + rng.gauss(0, 0.09) + own.gauss(0, 0.01),
                }
            )
            if step % (steps // 8) == 0:
                evals.append(
                    {"step": step, "time_s": step * step_s, "metric": level * 1.45 + own.gauss(0, 0.01)}
                )
        slices = [
            {"steps": 25, "samples": 25 * batch, "time_s": 25 * step_s * own.uniform(0.97, 1.05)}
            for _ in range(steps // 25)
        ]
        found[str(seed)] = {
            "curve": curve,
            "evals": evals,
            "test": 2.32 + own.gauss(0, 0.004),
            "slices": slices,
            "extra": {"accuracy of the next byte": 0.612 + own.gauss(0, 0.001)},
            "skipped": 0,
            "scale": 1.0,
        }
    return {
        "setup_s": {"fp32": 1.2, "autocast": 1.2, "plan": 12.4}[name],
        "peak_mem_bytes": int(700e6 / speed**0.5),
        "samples_per_s": {
            "median": batch / step_s,
            "low": batch / step_s * 0.97,
            "high": batch / step_s * 1.02,
        },
        "time_to_metric_s": 0.8 * steps * step_s,
        "metric": {"mean": 2.3172, "low": 2.309, "high": 2.3255},
        "seeds": found,
        "parts": parts,
    }


def comparison(**changes: Any) -> dict[str, Any]:
    """``comparison.json`` of a text task: three arms, three seeds, not worse."""
    chosen = plan()
    return {
        "schema": 1,
        "task": "text",
        "about": "A byte-level GPT on the source of the Python standard library.",
        "metric": {
            "name": "bits per byte",
            "higher_is_better": False,
            "margin": 0.0232,
            "fp32": 2.3191,
            "plan": 2.3172,
            "difference": -0.0019,
            "low": -0.0094,
            "high": 0.0056,
        },
        "verdict": "not-worse",
        "reason": "At worst 0.0033 worse, inside the margin of 0.0232 (one-sided 95 % bound over 3 seeds).",
        "speedup": {"median": 1.93, "low": 1.88, "high": 1.97},
        "autocast_speedup": {"median": 1.41, "low": 1.38, "high": 1.43},
        "arms": {name: arm(name) for name in ("fp32", "autocast", "plan")},
        "step": {"step": 400, "loss": 1.612, "scale": 1.0, "grad_norm": 0.83, "parts": PARTS["plan"]},
        "formats": chosen.counts(),
        "plan_toml": chosen.to_toml(),
        "machine": machine().as_dict(),
        "versions": {"equipoise": "0.1.0", "torch": "2.13.0+cpu", "Python": "3.12.4"},
        "repeat": "equipoise compare text --repeats 3 --with-autocast --max-steps 400",
        "seeds": [0, 1, 2],
        "helped": "",
    } | changes


def one_seed() -> dict[str, Any]:
    """No autocast arm, no interval, not able to tell."""
    made = comparison(
        arms={name: arm(name, seeds=1) for name in ("fp32", "plan")},
        seeds=[0],
        autocast_speedup=None,
        verdict="inconclusive",
        reason="1 seed can't tell a method's quality from chance; it takes at least 3.",
    )
    made["metric"] |= {"low": None, "high": None}
    made["speedup"] = {"median": 1.04, "low": 0.93, "high": 1.12}
    for one in made["arms"].values():
        one["metric"] = {"mean": 2.31, "low": None, "high": None}
    return made


def no_margin() -> dict[str, Any]:
    """An interval and no verdict."""
    made = comparison(
        verdict=None,
        reason="No margin says what still counts as not worse, so there is an interval and no verdict.",
    )
    made["metric"]["margin"] = None
    return made


def diverged() -> dict[str, Any]:
    """The plan's loss turns NaN after a third of the steps of one seed; worse."""
    made = comparison(
        verdict="worse", reason="The plan's metric is not finite for 1 of 3 seeds, FP32's always is."
    )
    seed = made["arms"]["plan"]["seeds"]["1"]
    for row in seed["curve"][130:]:
        row["loss"] = math.nan
    seed["curve"][60]["loss"] = math.inf
    for row in seed["evals"][3:]:
        row["metric"] = math.nan
    seed |= {"test": math.nan, "skipped": 91, "scale": 2.0**-24}
    made["arms"]["plan"]["metric"] = {"mean": math.nan, "low": None, "high": None}
    made["metric"] |= {"plan": math.nan, "difference": math.nan, "low": None, "high": None}
    made["step"] = {"step": 300, "loss": math.nan, "scale": 1024.0}
    return made


def many_layers(count: int = 50) -> dict[str, Any]:
    """A model of ``6 count + 4`` layers."""
    chosen = plan(count)
    return comparison(plan_toml=chosen.to_toml(), formats=chosen.counts())


def hostile() -> dict[str, Any]:
    """Every text that a user or a file can choose is an attack or too long."""
    long = "a_very_long_name_without_any_place_to_break_" * 6
    chosen = Plan(
        policy=Policy.parse("bf16"),
        formats={HOSTILE: "bf16", long: "fp32"},
        choices=[
            Choice(what="format", where=HOSTILE, choice="bf16", reason=HOSTILE),
            Choice(what="race", where="*", choice=HOSTILE, reason=HOSTILE, evidence={HOSTILE: 1.0}),
        ],
        note=HOSTILE,
    )
    made = comparison(
        task=f"{HOSTILE} {long}",
        about=HOSTILE,
        reason=HOSTILE,
        helped=HOSTILE,
        repeat=f"equipoise compare {HOSTILE} {long}",
        versions={HOSTILE: HOSTILE},
        plan_toml=chosen.to_toml(),
        notes=[HOSTILE],
    )
    made["metric"]["name"] = HOSTILE + long
    made["machine"] = machine(name=HOSTILE, note=long, facts={HOSTILE: [HOSTILE, long]}).as_dict()
    return made


def bare() -> dict[str, Any]:
    """Nothing but what must be there."""
    return {"schema": 1, "task": "digits", "arms": {"fp32": {}, "plan": {}}, "metric": {"name": "accuracy"}}


def write_comparison(folder: Path, data: dict[str, Any]) -> Path:
    """A comparison directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(data))
    return folder


def write_run(folder: Path, *, steps: int = 600, finished: bool = True) -> Path:
    """A run directory of ``train``: a row a step, parts on sampled ones, three skips under a scaler."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(7)
    (folder / "run.toml").write_text(
        'schema = 1\ntask = "fashion-mnist"\nseed = 3\nprecision = "auto"\nmax_steps = 600\n'
    )
    (folder / "machine.json").write_text(json.dumps(machine().as_dict()))
    (folder / "plan.toml").write_text(plan(2).to_toml())
    rows = []
    for step in range(1, steps + 1):
        row = {
            "step": step,
            "loss": 0.2 + 2.1 * math.exp(-step / 90) + rng.gauss(0, 0.04),
            "skipped": step in (3, 4, 9),
            "scale": 65536.0 if step > 9 else 131072.0,
            "time_s": step * 0.21,
        }
        if step % 50 == 0:
            row["parts"] = {k: v / 1.3 for k, v in PARTS["plan"].items()}
        rows.append(json.dumps(row))
    (folder / "steps.jsonl").write_text("\n".join(rows) + '\n{"step": 601, "lo')
    evals = [
        {"step": s, "time_s": s * 0.21, "metric": 0.91 - 0.5 * math.exp(-s / 120)}
        for s in range(100, steps + 1, 100)
    ]
    metrics = {
        "metric": {"name": "accuracy", "higher_is_better": True},
        "evals": evals,
        "test": 0.9127 if finished else None,
        "finished": finished,
        "time_s": steps * 0.21,
        "setup_s": 9.1,
        "peak_mem_bytes": 412_000_000,
        "samples_per_s": {"median": 610.0, "low": 590.0, "high": 622.0},
        "batch_size": 128,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


COMPARISONS = {
    "full": comparison,
    "one_seed": one_seed,
    "no_margin": no_margin,
    "diverged": diverged,
    "many_layers": many_layers,
    "hostile": hostile,
    "bare": bare,
}
"""Name -> builder of every kind of comparison that the tests render."""
