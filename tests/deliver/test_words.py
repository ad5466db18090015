"""Numbers and findings in words."""

import math

import pytest

from equipoise.deliver import words
from equipoise.records import PARTS

NBSP = "\N{NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0, "0"),
        (1234567, "1,234,567"),
        (12345.6, "12,346"),
        (1.234, "1.23"),
        (-0.0123, "−0.0123"),
        (9.996, "10.0"),
        (2**-24, "5.96·10⁻⁸"),
        (3.2e12, "3.20·10¹²"),
    ],
)
def test_number(value, text):
    assert words.number(value) == text


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (None, "–"),
        (0, "0 s"),
        (4.2e-6, "4.20 µs"),
        (0.01234, "12.3 ms"),
        (45.23, "45.2 s"),
        (119.96, "2 min"),
        (340, "5 min 40 s"),
        (3 * 3600 + 12 * 60, "3 h 12 min"),
        (90000.0, "25 h"),
    ],
)
def test_duration(value_s, text):
    assert words.duration(value_s).replace(NBSP, " ") == text


def test_a_value_that_is_missing_is_never_zero():
    for text in (words.number, words.duration, words.memory, words.ratio, words.share):
        assert text(None) == "–"
    assert words.finite(math.nan) is None and words.finite(True) is None and words.finite("3") is None


def test_memory_counts_in_powers_of_1024():
    assert words.memory(700e6).replace(NBSP, " ") == "668 MiB"
    assert words.memory(8 * 2**30).replace(NBSP, " ") == "8.00 GiB"


@pytest.mark.parametrize(
    ("verdict", "speed", "text"),
    [
        ("not-worse", {"median": 1.93, "low": 1.88, "high": 1.97}, "1.93× faster, not worse."),
        ("not-worse", {"median": 1.01, "low": 1.005, "high": 1.02}, "As fast as FP32 (1.01×), not worse."),
        ("not-worse", {"median": 0.8, "low": 0.7, "high": 0.9}, "Slower than FP32 (0.80×), not worse."),
        ("worse", {"median": 1.93, "low": 1.88, "high": 1.97}, "1.93× faster, but worse."),
        ("worse", {"median": 0.8, "low": 0.7, "high": 0.9}, "Slower than FP32 (0.80×), and worse."),
        ("inconclusive", {"median": 1.2, "low": 1.1, "high": 1.3}, "1.20× faster; not yet proven as good."),
        (None, {"median": 1.2}, "1.20× faster; no verdict on quality without a margin."),
        ("not-worse", None, "Not worse; speed not measured."),
        (
            "not-worse",
            {"median": 1.5, "low": 1.2, "high": 2.0, "trusted": False},
            "Not worse; speed unproven (1.50×).",
        ),
    ],
)
def test_headline(verdict, speed, text):
    assert words.headline(verdict, speed) == text


def test_a_speed_whose_interval_holds_one_is_not_called_faster():
    assert (
        words.speed_phrase({"median": 1.2, "low": 0.9, "high": 1.5}) == "No clear difference in speed (1.20×)"
    )


def test_the_metric_is_shown_as_finely_as_its_margin_needs():
    metric = {
        "name": "auc",
        "higher_is_better": True,
        "fp32": 0.987654,
        "plan": 0.9871,
        "difference": -0.000554,
        "low": -0.002,
        "high": 0.0009,
        "margin": 0.01,
    }
    sentence = words.metric_sentence(metric).replace(NBSP, " ")
    assert "Auc is 0.9871 with the plan and 0.9877 in FP32" in sentence
    assert "a difference of −0.0006 (95 % interval −0.0020 to +0.0009); higher is better." in sentence


def test_rounding_far_below_the_margin_does_not_add_digits():
    assert words.decimals_for(0.047, 4.6e-8, 1e-7) == 4
    assert words.decimals_for(None, 0.002, 0.03) == 3
    assert words.decimals_for(None, None, 0.0) == 4


def test_equal_metrics_are_called_equal():
    metric = {
        "name": "AUC",
        "fp32": 0.9915,
        "plan": 0.9915,
        "difference": 0.0,
        "low": 0.0,
        "high": 0.0,
        "margin": 0.01,
    }
    assert words.metric_sentence(metric).startswith(
        "AUC is 0.9915 with the plan and in FP32, equal for every seed;"
    )


def test_layer_counts():
    assert words.layer_counts({"fp32": 2, "bf16": 6}) == "6 layers in bf16 and 2 in FP32"
    assert words.layer_counts({"fp32": 1}) == "1 layer in FP32"
    assert words.layer_counts({}) == ""


def test_every_part_of_a_step_has_a_name() -> None:
    assert tuple(words.PART_LABELS) == PARTS
