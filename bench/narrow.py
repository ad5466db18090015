"""Weights and state in few bits against FP32: the metric of whole trainings, and bytes a parameter.

    python bench/narrow.py --seeds 5                  two tasks, seven ways to keep weights and state
    python bench/narrow.py --only text --seeds 3 --json
    python bench/narrow.py --time                     what a step costs, with nothing else running

Each way trains the same seeds on the same batches; its metric on ``test`` is compared with FP32 training's,
seed by seed: the mean difference over FP32's mean, with a 95 % interval (Student's t). ``bf16 alone`` rounds
each updated weight to the nearest bf16 number: what happens without any of these ways. bf16 is emulated, so
that the figures are those of any machine. ``--time`` takes bf16 as the machine has it: an MLP of 4.2 M
weights, batch 64, fused AdamW, rounds interleaved, each way's step over that with FP32 weights.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn

from equipoise import Session
from equipoise.evidence import paired_ratio
from equipoise.policy import Plan, Policy
from equipoise.step import narrow
from equipoise.tasks import resolve
from equipoise.trainer import Trainer

TASKS = ("text", "digits")
WAYS: dict[str, tuple[str, str, str]] = {
    "fp32": ("fp32", "fp32", "fp32"),
    "bf16, FP32 weights": ("bf16", "fp32", "fp32"),
    "split": ("bf16", "split", "fp32"),
    "kahan": ("bf16", "kahan", "fp32"),
    "stochastic": ("bf16", "stochastic", "fp32"),
    "stochastic, 8-bit state": ("bf16", "stochastic", "8bit"),
    "bf16 alone": ("bf16", "stochastic", "fp32"),
}
"""Way -> format of the policy, weights, state."""


def train(task_name: str, way: str, seed: int) -> tuple[float, dict[str, float]]:
    """The metric on ``test`` after the whole training, and bytes a parameter."""
    fmt, weights, state = WAYS[way]
    kept = narrow.stochastic
    if way == "bf16 alone":
        narrow.stochastic = lambda weight, generator: weight.to(torch.bfloat16)
    try:
        task = resolve(task_name)(seed, None)
        plan = Plan(policy=Policy(fmt), weights=weights, state=state, emulate=fmt == "bf16")
        trainer = Trainer(task, seed=seed, plan=plan)
        trainer.advance(task.steps)
        value = trainer.evaluate("test").metric
        at_work = trainer.session._narrow
        sizes = {} if at_work is None else at_work.bytes_per_parameter()
        trainer.close()
        return value, sizes
    finally:
        narrow.stochastic = kept


def against(values: list[float], reference: list[float]) -> dict[str, float]:
    """Mean paired difference over the reference's mean, with its 95 % interval, in percent."""
    difference = (np.array(values) - np.array(reference)) / np.mean(reference) * 100
    half = (
        float(stats.t.ppf(0.975, len(difference) - 1) * stats.sem(difference)) if len(difference) > 1 else 0.0
    )
    mean = float(difference.mean())
    return {"percent": mean, "low": mean - half, "high": mean + half}


def session_of(way: str) -> Callable[[], None]:
    """A training step of a wide MLP."""
    fmt, weights, state = WAYS[way]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    session = Session(model, optimizer, precision=fmt, weights=weights, state=state)
    x = torch.randn(64, 1024)

    def step() -> None:
        with session.autocast():
            loss = model(x).square().mean()
        session.step(loss)

    return step


def time_steps(rounds: int, steps: int = 5) -> None:
    """Print each way's time of a step over that with FP32 weights."""
    ways = [way for way in WAYS if way not in ("fp32", "bf16 alone")]
    timed = {way: session_of(way) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for n in range(rounds + 1):
        for way in ways if n % 2 else reversed(ways):
            began = time.perf_counter()
            for _ in range(steps):
                timed[way]()
            if n:  # the first round makes the state
                times[way].append((time.perf_counter() - began) / steps)
    base = times[ways[0]]
    for way in ways:
        ratio, ms = paired_ratio(times[way], base), np.median(times[way]) * 1e3
        print(f"{way:24} {ms:7.2f} ms  {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=TASKS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.time:
        return time_steps(options.rounds)
    found: dict[str, Any] = {}
    for name in [options.only] if options.only else TASKS:
        reference: list[float] = []
        for way in WAYS:
            runs = [train(name, way, seed) for seed in range(options.seeds)]
            values = [value for value, _ in runs]
            reference = reference or values
            row = {"metric": float(np.mean(values)), "values": values, **against(values, reference)}
            sizes = runs[0][1]
            row["bytes"] = sum(sizes.values()) if sizes else None
            found.setdefault(name, {})[way] = row
            many = f"{row['percent']:+.3f} % ({row['low']:+.3f} to {row['high']:+.3f})"
            size = f"{row['bytes']:.2f}" if sizes else "-"
            print(
                f"{name:8} {way:24} {row['metric']:.5f}  {many:36} bytes {size}", file=sys.stderr, flush=True
            )
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
