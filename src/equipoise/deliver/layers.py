"""The map of layers: which computes in which format, and why.

Enters: the text of ``plan.toml``. Leaves: layers with their reasons, the same in groups, and the plan's
other choices. Where: after the run, called by ``figures.py``; no torch.
"""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import PolicyError
from ..policy import Plan

MANY = 40
"""From this many layers on, layers alike are shown as one row."""


def layer_map(plan_toml: Any, counts: Any, notes: list[str]) -> dict[str, Any]:
    """{formats, layers, groups, choices, plan}; without a readable plan the counts alone."""
    counted = {str(k): int(v) for k, v in counts.items()} if isinstance(counts, Mapping) else {}
    empty: dict[str, Any] = {"formats": counted, "layers": [], "groups": [], "choices": [], "plan": None}
    if not isinstance(plan_toml, str) or not plan_toml.strip():
        return empty
    try:
        plan = Plan.from_toml(plan_toml)
        layers = _layers(plan)
    except PolicyError as error:
        notes.append(f"plan.toml can't be read: {error}")
        return empty
    return {
        "formats": plan.counts() or counted,
        "layers": layers,
        "groups": _groups(layers),
        "choices": [
            {
                "what": c.what,
                "where": c.where,
                "choice": c.choice,
                "reason": c.reason,
                "evidence": dict(c.evidence),
            }
            for c in plan.choices
            if c.what != "format" or c.where not in plan.formats
        ],
        "plan": {
            "policy": str(plan.policy),
            "source": plan.source,
            "note": plan.note,
            "memory_format": plan.memory_format,
            "fused_optimizer": plan.fused_optimizer,
        },
    }


def _layers(plan: Plan) -> list[dict[str, Any]]:
    reasons = {c.where: c for c in plan.choices if c.what == "format"}
    matches = plan.policy.resolve(["", *plan.formats]) if plan.formats else {}
    found = []
    for name, fmt in plan.formats.items():
        choice = reasons.get(name)
        if choice is None and "*" in reasons and reasons["*"].choice == fmt:
            choice = reasons["*"]
        pattern = matches[name].pattern
        fallback = f"policy entry {pattern!r}" if pattern else "the policy's default"
        found.append(
            {
                "layer": name or "(root)",
                "format": fmt,
                "reason": choice.reason if choice else fallback,
                "evidence": dict(choice.evidence) if choice and choice.where == name else {},
            }
        )
    return found


def _groups(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the table: one a layer, or, of many, one for all that differ in numbers only."""
    if len(layers) <= MANY:
        return [
            {"name": x["layer"], "format": x["format"], "reason": x["reason"], "layers": [x]} for x in layers
        ]
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for layer in layers:
        name = re.sub(r"\d+", "*", layer["layer"])
        key = (name, layer["format"], re.sub(r"\d+(\.\d+)?", "#", layer["reason"]))
        group = groups.setdefault(
            key, {"name": name, "format": layer["format"], "reason": layer["reason"], "layers": []}
        )
        group["layers"].append(layer)
    for group in groups.values():
        if len(group["layers"]) == 1:
            group["name"] = group["layers"][0]["layer"]
    return list(groups.values())
