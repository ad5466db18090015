"""Planning: from what the first step showed to a Plan.

Enters: a workbench with the model and a step that can be repeated, or a policy that the user names. Leaves: a
Plan. Where: once, after the first step or in ``prepare``; rank 0 plans and every rank gets its plan.

The way: quick probe (cached) -> costs of the model's own layers -> arms -> race on real steps -> decision.
Source: the rules are in ``plan/choose.py``, the measurements in ``plan/cost.py`` and ``trials.py``.
"""

import time
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import asdict, replace

import torch
from torch import nn

from . import ranks
from .errors import FormatError
from .plan import choose
from .plan.cost import gemm_volume, measure_layers
from .plan.machine import probe
from .policy import Plan, Policy
from .records import Choice, LayerCost, Machine
from .step.cast import (
    NARROWABLE,
    castable,
    dtype_of,
    is_quantised,
    layer_formats,
    layers,
    module_formats,
)
from .step.layout import has_conv_weights
from .step.optim import can_fuse
from .trials import Workbench, race, restored
from .watch.rng import rng_state, set_rng_state

MAX_PLAN_S = 30.0
"""Planning takes at most this long unless the user gives another limit."""
COST_SHARE = 0.3
"""Share of the planning time that layers' costs may take; the race has the rest."""


def named_plan(root: nn.Module, policy: Policy) -> Plan:
    """The plan of a policy that the user names: its formats and nothing else.

    Raises:
        PolicyError: a pattern matches nothing.
    """
    return Plan(policy=policy, formats=layer_formats(root, module_formats(root, policy)), source="named")


def refuse_unavailable(formats: Iterable[str], device: torch.device) -> None:
    """Ask the probe whether this device has the formats.

    Raises:
        FormatError: the probe found one unusable or emulated.
    """
    used = set(formats) - {"fp32"}
    if not used:
        return
    machine = ranks.from_first(lambda: probe(quick=True, device=device.type))
    for fmt in sorted(used):
        verdict = machine.formats.get(fmt)
        if verdict is not None and (verdict.verdict == "unusable" or verdict.emulated):
            raise FormatError(
                f"format {fmt!r} can't be used on this {device.type}: {verdict.reason}. "
                "Ask for 'fp32', or for 'auto' to let the measurement choose"
            )


def plan_session(bench: Workbench, limit_s: float | None) -> Plan:
    """Plan within ``limit_s`` seconds (None: at most 30); rank 0 plans and every rank gets its plan."""

    def plan() -> Plan:
        # Whatever context the user calls from: an arm's format is its own, and a replay has a backward.
        with torch.enable_grad(), torch.autocast(bench.device.type, enabled=False):
            plan = _plan(bench, MAX_PLAN_S if limit_s is None else limit_s)
        return replace(plan, sensitive=bench.sensitive)

    return ranks.from_first(plan)


def _plan(bench: Workbench, limit_s: float) -> Plan:
    began = time.perf_counter()
    machine = probe(quick=True, device=bench.device.type)
    half, reason = _half_to_try(bench.root, machine)
    notes = [] if half else [Choice(what="format", where="*", choice="fp32", reason=reason)]
    if bench.before_first_step and bench.run_step is not None:
        with restored(bench.root, bench.optimizers):
            bench.run_step(nullcontext)
    bench.recorder.stop()
    formats_of = {
        f: layer_formats(bench.root, module_formats(bench.root, Policy(f))) for f in {"fp32", half or "fp32"}
    }
    share = _share_that_gains(bench, machine, half)
    ratio: float | None = None
    raw_ratio: float | None = None

    def static(why: str) -> Plan:
        note = f"can't tell: static default ({why})"
        return choose.static_plan(half, share, ratio, formats_of, note, notes)

    if limit_s <= 0:
        return static("no time was given to plan")
    if bench.sharded:
        return static("the weights are sharded: neither a layer nor a step runs on one rank alone")
    kept: list[Choice] = []
    if half is not None:
        bench.progress(0.0, "timing layers")
        costs = _layer_costs(bench, half, COST_SHARE * limit_s)
        bench.timings["layers"] = [asdict(cost) for cost in costs]
        kept = choose.slow_layers(costs, half)
        raw_ratio = choose.cost_ratio(costs, half, [])
        ratio = choose.cost_ratio(costs, half, kept)
        if ratio is not None and ratio > choose.HOPELESS:
            notes.append(
                Choice(
                    what="format",
                    where="*",
                    choice="fp32",
                    evidence={"cost_ratio": ratio},
                    reason=f"the layers take {ratio:.2f} times as long in {half}",
                )
            )
            half = None
    if bench.why_not_raced:
        return static(bench.why_not_raced)
    arms = choose.arms_to_race(
        half,
        kept,
        plain_half=raw_ratio is None or raw_ratio <= choose.HOPELESS,
        can_fuse=all(can_fuse(o) for o in bench.optimizers),
        has_convs=has_conv_weights(bench.root),
    )
    with restored(bench.root, bench.optimizers) as start:
        raced = race(bench, arms, start, began, limit_s)
    bench.timings["race"] = {
        "s_per_step": raced.times_s,
        "dropped": raced.dropped,
        "voided_rounds": raced.voided,
    }
    formats_of |= {a.name: layer_formats(bench.root, module_formats(bench.root, a.policy)) for a in arms}
    plan = choose.decide(raced, half, kept, formats_of, notes)
    if plan is None and len(raced.dropped) == len(arms):
        return static(f"a step of this model can't be repeated: {raced.dropped[arms[0].name]}")
    if plan is None:
        return static(f"{raced.rounds} undisturbed rounds, {raced.voided} disturbed by foreign load")
    return plan


def _half_to_try(root: nn.Module, machine: Machine) -> tuple[str | None, str]:
    """The half format worth trying, and why; none where autocast would leave a layer's weights alone."""
    for name, module in layers(root):
        for p in module._parameters.values():
            if isinstance(module, NARROWABLE) and p is not None and not castable(p):
                return None, f"the weights of {name or 'the model'} are {p.dtype}; only FP32 ones are cast"
    for name, module in root.named_modules():
        if is_quantised(module):
            return None, f"{name or 'the model'} is quantised ({type(module).__name__}) and takes FP32"
    return choose.half_to_try(machine)


def _share_that_gains(bench: Workbench, machine: Machine, half: str | None) -> float:
    if half is None:
        return 0.0
    least = choose.smallest_gaining_volume(machine, half)
    modules = dict(bench.root.named_modules())
    volumes = [gemm_volume(modules[name], call) for name, call in bench.recorder.calls.items()]
    return sum(v for v in volumes if v >= least) / sum(volumes) if sum(volumes) else 0.0


def _layer_costs(bench: Workbench, half: str, budget_s: float) -> list[LayerCost]:
    modules = dict(bench.root.named_modules())
    # A layer inside another (an attention's projection) is part of the outer one's time.
    calls = {
        name: call
        for name, call in bench.recorder.calls.items()
        if not any(name.startswith(f"{outer}.") for outer in bench.recorder.calls)
    }
    dtypes = {"fp32": torch.float32, half: dtype_of(half)}
    rng = rng_state()
    try:
        return measure_layers(modules, calls, dtypes, bench.device, budget_s)
    finally:
        set_rng_state(rng)
