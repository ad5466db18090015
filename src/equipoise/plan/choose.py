"""From measurements to a Plan. Pure: records in, Plan out; nothing is measured or changed here.

Enters: the probe's verdicts, the layers' costs, then the times of a race. Leaves: the arms to race, then the
plan. Where: before the first planned step. The rules, in order:

1. A half format is tried only where the probe says ``use``, and raced only where the layers' own costs don't
   rule it out.
2. Inside half, a layer whose half kernel is clearly slower than its FP32 one stays FP32 (``SLOW_RATIO``, and
   only when that is worth ``WORTH_SHARE`` of all layers' time: two casts at its borders cost too).
3. The race decides, on whole steps: half must beat FP32 by more than ``TIE`` with its interval, else FP32.
4. Levers that keep the arithmetic (fused update, weight layout) stay on unless the race shows them slower.
5. What can't be told apart is decided alike each time: FP32 before half, levers on before off.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..policy import Plan, Policy
from ..records import Choice, LayerCost, Machine

SLOW_RATIO = 1.5
"""A layer stays FP32 when half takes at least this many times its FP32 time: smaller gains are eaten by
casts."""
WORTH_SHARE = 0.02
"""... and when the difference is at least this share of all layers' time in half."""
HOPELESS = 1.3
"""Half isn't raced when the layers' costs say that it takes this many times FP32's time."""
TIE = 0.02
"""Whole-step times closer than this are alike."""
STATIC_SHARE = 0.8
"""Without a race, half is the default only where this share of the work is of sizes that gain ..."""
STATIC_COST = 0.8
"""... and where the layers, if they were timed, take at most this share of FP32's time."""
MIN_ROUNDS = 3
"""A race with fewer undisturbed rounds proves nothing."""
STOP_RATIO = 1.25
"""An arm this much slower than another after the first rounds isn't run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way to run a step, to be raced."""

    name: str
    policy: Policy
    memory_format: str = "contiguous"
    fused_optimizer: bool = False
    level: int = 0
    """How many levers are on: 0 is what a user writes by hand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Seconds a step of each arm, by round; None where an arm had been taken out."""

    arms: Sequence[Arm]
    times_s: Mapping[str, Sequence[float | None]]
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Arms that failed, with the sentence why."""
    voided: int = 0
    """Rounds that foreign load disturbed; they aren't in ``times_s``."""

    @property
    def rounds(self) -> int:
        """Undisturbed rounds."""
        return max((len(t) for t in self.times_s.values()), default=0)


@dataclass(frozen=True, slots=True)
class TimeRatio:
    """Median of paired ratios of times (below 1: faster), with a 95 % interval of the median.

    The interval is that of order statistics: a race has 3 to 15 rounds, too few to draw from them again.
    """

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f}, {self.pairs} rounds)"


def paired_ratio(above: Sequence[float | None], below: Sequence[float | None]) -> TimeRatio | None:
    """TimeRatio of two arms over the rounds that both ran; None without a common round."""
    ratios = sorted(a / b for a, b in zip(above, below, strict=False) if a is not None and b is not None)
    n = len(ratios)
    if not n:
        return None
    outer = max(0, math.floor((n - 1.96 * math.sqrt(n)) / 2))
    middle = (ratios[(n - 1) // 2] + ratios[n // 2]) / 2
    return TimeRatio(middle, ratios[outer], ratios[n - 1 - outer], n)


def half_to_try(machine: Machine) -> tuple[str | None, str]:
    """The half format worth trying on this machine, and the probe's reason."""
    for name in ("bf16", "fp16"):
        verdict = machine.formats.get(name)
        if (
            verdict is not None
            and verdict.verdict == "use"
            and not (name == "fp16" and machine.device == "cpu")
        ):
            return name, verdict.reason
    verdict = machine.formats.get("bf16")
    return None, verdict.reason if verdict is not None else "the probe has no reading of bf16"


def slow_layers(costs: Sequence[LayerCost], half: str) -> list[Choice]:
    """Layers that stay FP32 inside ``half``, each with its evidence."""
    by_layer: dict[str, dict[str, LayerCost]] = {}
    for cost in costs:
        by_layer.setdefault(cost.layer, {})[cost.format] = cost
    total = sum(c.time.median_s for c in costs if c.format == half and c.time is not None)
    # Alike layers are judged as one kind: 17 small differences together are worth two casts each.
    kinds: dict[str, list[str]] = {}
    for layer, pair in by_layer.items():
        if half in pair and "fp32" in pair:
            kinds.setdefault(pair[half].key, []).append(layer)
    kept: list[Choice] = []
    for layers in kinds.values():
        wide, narrow = by_layer[layers[0]]["fp32"], by_layer[layers[0]][half]
        if wide.time is None:
            continue
        if narrow.time is None:
            kept += [
                Choice(what="format", where=layer, choice="fp32", reason=narrow.note) for layer in layers
            ]
            continue
        lost_s = (narrow.time.median_s - wide.time.median_s) * len(layers)
        if narrow.time.low_s >= SLOW_RATIO * wide.time.high_s and lost_s >= WORTH_SHARE * total:
            evidence = {
                f"{half}_s": narrow.time.median_s,
                "fp32_s": wide.time.median_s,
                "slower_ratio": narrow.time.median_s / wide.time.median_s,
            }
            reason = (
                f"forward and backward take {narrow.time.median_s * 1e3:.2f} ms in {half}, "
                f"{wide.time.median_s * 1e3:.2f} ms in FP32"
            )
            kept += [
                Choice(what="format", where=layer, choice="fp32", reason=reason, evidence=evidence)
                for layer in layers
            ]
    return kept


def cost_ratio(costs: Sequence[LayerCost], half: str, kept: Sequence[Choice]) -> float | None:
    """Time of all layers in ``half`` (the kept ones in FP32) over their time in FP32; None without costs."""
    wide = {c.layer: c.time.median_s for c in costs if c.format == "fp32" and c.time is not None}
    narrow = {c.layer: c.time.median_s for c in costs if c.format == half and c.time is not None}
    stay = {c.where for c in kept}
    common = [layer for layer in wide if layer in narrow or layer in stay]
    below = sum(wide[layer] for layer in common)
    above = sum(wide[layer] if layer in stay else narrow[layer] for layer in common)
    return above / below if below else None


def arms_to_race(
    half: str | None, kept: Sequence[Choice], *, can_fuse: bool, has_convs: bool, plain_half: bool = True
) -> list[Arm]:
    """FP32 and plain autocast as a user writes them, then each with our levers.

    Without ``plain_half`` the layers' costs have ruled out half everywhere: one such step could take minutes.
    """
    families = [Policy("fp32")]
    arms = [Arm(name="fp32", policy=families[0])]
    if half is not None:
        if plain_half or not kept:
            arms.append(Arm(name=half, policy=Policy(half)))
        families.append(Policy(half, tuple((c.where, "fp32") for c in kept if c.where)))
    for policy in families:
        level = 0
        name = policy.default + (" with exceptions" if policy.entries else "")
        if policy.entries:
            level = 1
            arms.append(Arm(name=name, policy=policy, level=level))
        if can_fuse:
            level += 1
            name += " + fused"
            arms.append(Arm(name=name, policy=policy, fused_optimizer=True, level=level))
        if has_convs:
            level += 1
            name += " + channels_last"
            arms.append(
                Arm(
                    name=name,
                    policy=policy,
                    fused_optimizer=can_fuse,
                    memory_format="channels_last",
                    level=level,
                )
            )
    return arms


def still_in(running: Sequence[str], times_s: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Arms that may still win: clearly slower ones aren't run again."""

    def beaten(arm: str, other: str) -> bool:
        ratio = paired_ratio(times_s[arm], times_s[other])
        return ratio is not None and ratio.low > STOP_RATIO

    return [arm for arm in running if not any(beaten(arm, other) for other in running if other != arm)]


def settled(running: Sequence[str], times_s: Mapping[str, Sequence[float | None]]) -> bool:
    """Whether every pair that is still running is told apart, or known to be alike within the tie."""
    for a, b in itertools.combinations(running, 2):
        ratio = paired_ratio(times_s[a], times_s[b])
        if ratio is None or (ratio.low < 1 - TIE and ratio.high > 1 + TIE):
            return False
    return True


def _standing(race: Race, family: str) -> list[Arm]:
    """Arms of a family, the most levers first, without those that are shown slower than one with fewer."""
    standing = []
    arms = sorted(
        (a for a in race.arms if a.policy.default == family and a.name not in race.dropped),
        key=lambda a: -a.level,
    )
    for i, arm in enumerate(arms):
        ratios = [paired_ratio(race.times_s[arm.name], race.times_s[lesser.name]) for lesser in arms[i + 1 :]]
        if not any(r is not None and r.low > 1 + TIE / 2 and r.median > 1 + TIE for r in ratios):
            standing.append(arm)
    return standing


def _beats(race: Race, arm: Arm, other: Arm) -> bool:
    """Whether the whole interval says that ``arm`` is faster by more than a tie."""
    ratio = paired_ratio(race.times_s[arm.name], race.times_s[other.name])
    return ratio is not None and ratio.high < 1 / (1 + TIE)


def decide(
    race: Race,
    half: str | None,
    kept: Sequence[Choice],
    formats_of: Mapping[str, Mapping[str, str]],
    notes: Sequence[Choice],
) -> Plan | None:
    """The plan that the race shows fastest; None when the race proves nothing.

    Args:
        race: undisturbed rounds.
        half: the half format that was raced, if any.
        kept: layers that stay FP32 inside it.
        formats_of: arm name -> layer -> format, for the plan's table.
        notes: choices made before the race, kept in the plan.
    """
    if race.rounds < MIN_ROUNDS:
        return None
    wide = next(iter(_standing(race, "fp32")), None)
    # A lever that makes half's times noisy may hide its gain: then half without the lever can still show it.
    narrow = [] if half is None else _standing(race, half)
    winner = next((arm for arm in narrow if wide is None or _beats(race, arm, wide)), wide)
    if winner is None:
        return None
    choices = list(notes) + [c for c in kept if winner.policy.entries]
    choices.append(_race_choice(race, winner, half))
    choices += _lever_choices(race, winner)
    return Plan(
        policy=winner.policy,
        formats=formats_of[winner.name],
        memory_format=winner.memory_format,
        fused_optimizer=winner.fused_optimizer,
        choices=tuple(choices),
        source="auto",
        note=_note(race, winner),
    )


def _against(race: Race, winner: Arm, name: str) -> TimeRatio | None:
    if name == winner.name or name not in race.times_s:
        return None
    return paired_ratio(race.times_s[winner.name], race.times_s[name])


def _race_choice(race: Race, winner: Arm, half: str | None) -> Choice:
    evidence: dict[str, float] = {"rounds": race.rounds, "voided_rounds": race.voided}
    parts = []
    for name in ("fp32", half or ""):
        ratio = _against(race, winner, name)
        if ratio is not None:
            evidence[f"time_{name}_ratio"] = ratio.median
            label = "plain FP32" if name == "fp32" else f"plain {name} autocast"
            parts.append(f"a step takes {ratio} of {label}'s time")
    for name, why in race.dropped.items():
        parts.append(f"{name} was taken out: {why}")
    reason = "; ".join(parts) or f"nothing else could be raced ({race.rounds} rounds)"
    return Choice(what="race", where="*", choice=winner.name, reason=reason, evidence=evidence)


def _lever_choices(race: Race, winner: Arm) -> list[Choice]:
    """What each lever that is on brought over the arm without it."""
    found = []
    family = sorted(
        (a for a in race.arms if a.policy == winner.policy and a.level <= winner.level), key=lambda a: a.level
    )
    for lesser, arm in itertools.pairwise(family):
        ratio = paired_ratio(race.times_s[arm.name], race.times_s[lesser.name])
        if ratio is None:
            continue
        layout = arm.memory_format != lesser.memory_format
        found.append(
            Choice(
                what="memory_format" if layout else "optimizer",
                where="*",
                choice="channels_last" if layout else "fused",
                reason=f"a step takes {ratio} of the time without",
                evidence={"time_ratio": ratio.median, "low_ratio": ratio.low, "high_ratio": ratio.high},
            )
        )
    return found


def _note(race: Race, winner: Arm) -> str:
    ratio = _against(race, winner, "fp32")
    if ratio is None:
        return f"{winner.name}: no other way was faster over {race.rounds} rounds"
    return f"{winner.name}: a step takes {ratio} of plain FP32's time"


def static_plan(
    half: str | None,
    share_that_gains: float,
    cost_ratio: float | None,
    formats_of: Mapping[str, Mapping[str, str]],
    why: str,
    notes: Sequence[Choice] = (),
) -> Plan:
    """The default where whole steps couldn't be told apart: half where all that is known speaks for it.

    Args:
        half: the half format that the probe says to use, if any.
        share_that_gains: share of the layers' multiplications in products of a size that the probe measured
            faster in half.
        cost_ratio: the layers' time in half over their time in FP32; None where they weren't timed.
        formats_of: ``"fp32"`` and the half format -> layer -> format.
        why: sentence for people.
        notes: choices made before, kept in the plan.
    """
    gains = share_that_gains >= STATIC_SHARE and (cost_ratio is None or cost_ratio <= STATIC_COST)
    chosen = half if half is not None and gains else "fp32"
    evidence = {"share_ratio": share_that_gains}
    reason = (
        f"{share_that_gains:.0%} of the multiplications are of sizes that the probe measured faster in half"
    )
    if cost_ratio is not None:
        reason += f", and the layers take {cost_ratio:.2f} of FP32's time in it"
        evidence["cost_ratio"] = cost_ratio
    choice = Choice(what="format", where="*", choice=chosen, reason=reason, evidence=evidence)
    return Plan(
        policy=Policy(chosen), formats=formats_of[chosen], choices=(*notes, choice), source="static", note=why
    )


def smallest_gaining_volume(machine: Machine, half: str) -> float:
    """Multiplications of the smallest square product that the probe found faster in ``half``; else inf."""
    times: dict[int, dict[str, float]] = {}
    for reading in machine.readings:
        if reading["op"] != "gemm" or reading["direction"] != "forward":
            continue
        sides = {int(side) for side in str(reading["shape"]).split("x")}
        if len(sides) == 1:
            by_format = times.setdefault(sides.pop(), {})
            seconds = float(reading["median_s"])
            by_format[reading["format"]] = min(seconds, by_format.get(reading["format"], math.inf))
    gaining = [n for n, t in times.items() if half in t and "fp32" in t and t["fp32"] > 1.2 * t[half]]
    return float(min(gaining)) ** 3 if gaining else math.inf
