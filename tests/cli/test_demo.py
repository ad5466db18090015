"""The first line of the demo says what the comparison found, also where it found little."""

from typing import Any

import pytest

from equipoise.cli.demo import headline


def _result(**changes: Any) -> dict[str, Any]:
    base = {
        "task": "text",
        "verdict": "not-worse",
        "speedup": {"median": 1.9, "low": 1.85, "high": 1.95, "trusted": True},
        "formats": {"bf16": 6, "fp32": 2},
        "helped": "",
    }
    return {**base, **changes}


def test_a_gain_is_named_with_the_verdict_and_the_formats() -> None:
    assert headline(_result()) == "text: 1.90× faster, not worse. The plan: 6 layers in bf16 and 2 in FP32."


def test_where_no_format_pays_the_line_says_what_helped() -> None:
    helped = "No narrow format pays on this machine for this model. What did help: fused optimizer (1.20x)."
    assert headline(_result(helped=helped, formats={"fp32": 8})) == f"text: {helped}"


@pytest.mark.parametrize("verdict", ["worse", "inconclusive"])
def test_a_gain_that_costs_accuracy_is_not_sold_as_one(verdict: str) -> None:
    line = headline(_result(verdict=verdict))
    assert "not worse" not in line
    assert "worse" in line or "not yet proven" in line


def test_under_foreign_load_no_speed_is_claimed() -> None:
    line = headline(_result(speedup={"median": 3.0, "low": 0.4, "high": 5.0, "trusted": False}))
    assert "×" not in line
    assert "again" in line
