"""The statistics: what they must say of data whose answer is known."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import TaskError
from equipoise.evidence import Verdict, judge, mean_interval, median_of, paired_ratio

ORDER = {"worse": 0, "inconclusive": 1, "not-worse": 2}
VALUE = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
PAIRS = st.lists(st.tuples(VALUE, VALUE), min_size=3, max_size=8)
MARGIN = st.floats(0, 5).map(lambda x: round(x, 3))


def test_the_bound_is_the_textbook_one() -> None:
    # Differences -0.01, 0, 0.01: mean 0, sd 0.01, error 0.01 / sqrt(3); t(0.95, 2) = 2.919986.
    found = judge([0.9, 0.9, 0.9], [0.89, 0.9, 0.91], margin=0.02)
    error = 0.01 / math.sqrt(3)
    assert found.bound == pytest.approx(-2.919986 * error, rel=1e-5)
    assert found.low == pytest.approx(-4.302653 * error, rel=1e-5)
    assert found.high == pytest.approx(4.302653 * error, rel=1e-5)
    assert found.verdict == "not-worse"
    assert judge([0.9, 0.9, 0.9], [0.89, 0.9, 0.91], margin=0.016).verdict == "inconclusive"


def test_identical_runs_are_not_worse_even_at_margin_zero() -> None:
    found = judge([0.9, 0.91, 0.92], [0.9, 0.91, 0.92], margin=0)
    assert (found.verdict, found.difference, found.low, found.high, found.power) == ("not-worse", 0, 0, 0, 1)


def test_a_shift_of_two_margins_is_worse_and_of_half_a_margin_is_not() -> None:
    fp32 = [0.91, 0.93, 0.92]
    for margin in (0.01, 0.1):
        assert judge(fp32, [m - 2 * margin for m in fp32], margin=margin).verdict == "worse"
        assert judge(fp32, [m - margin / 2 for m in fp32], margin=margin).verdict == "not-worse"


def test_lower_is_better_turns_the_direction() -> None:
    loss = [2.0, 2.1, 2.05]
    worse = judge(loss, [x + 0.2 for x in loss], margin=0.1, higher_is_better=False)
    assert worse.verdict == "worse"
    assert worse.difference == pytest.approx(0.2)
    assert judge(loss, [x - 0.2 for x in loss], margin=0.1, higher_is_better=False).verdict == "not-worse"


@pytest.mark.parametrize("seeds", [1, 2])
@pytest.mark.parametrize("shift", [0.0, -0.5, math.nan])
def test_fewer_than_three_seeds_never_decide(seeds: int, shift: float) -> None:
    found = judge([0.9] * seeds, [0.9 + shift] * seeds, margin=0.01)
    assert found.verdict == "inconclusive"
    assert str(seeds) in found.reason


def test_without_a_margin_there_is_an_interval_and_no_verdict() -> None:
    found = judge([0.9, 0.91, 0.92], [0.9, 0.9, 0.93], margin=None)
    assert found.verdict is None
    assert found.low is not None and found.high is not None and found.low < found.difference < found.high


def test_a_plan_that_diverges_is_worse_and_an_fp32_that_does_proves_nothing() -> None:
    good, bad = [0.9, 0.91, 0.92], [0.9, math.nan, 0.92]
    assert judge(good, bad, margin=0.5).verdict == "worse"
    assert judge(bad, good, margin=0.5).verdict == "inconclusive"
    assert judge(bad, bad, margin=0.5).verdict == "inconclusive"
    assert judge(good, [0.9, -math.inf, 0.92], margin=0.5).verdict == "worse"
    assert judge(good, bad, margin=0.5).low is None


@pytest.mark.parametrize(
    ("fp32", "plan", "margin", "alpha", "says"),
    [
        ([0.9], [0.9, 0.8], 0.1, 0.05, "1 FP32 and 2 plan metrics"),
        ([], [], 0.1, 0.05, "0 FP32"),
        ([0.9], [0.9], -0.1, 0.05, "margin is -0.1"),
        ([0.9], [0.9], math.nan, 0.05, "margin is nan"),
        ([0.9], [0.9], 0.1, 0.7, "alpha is 0.7"),
    ],
)
def test_what_cannot_be_judged_is_refused(
    fp32: list[float], plan: list[float], margin: float, alpha: float, says: str
) -> None:
    with pytest.raises(TaskError, match=says):
        judge(fp32, plan, margin=margin, alpha=alpha)


@given(PAIRS, MARGIN, MARGIN)
def test_a_wider_margin_is_never_judged_more_harshly(
    pairs: list[tuple[float, float]], a: float, b: float
) -> None:
    fp32, plan = zip(*pairs, strict=True)
    verdicts = [judge(fp32, plan, margin=m).verdict for m in sorted((a, b))]
    assert ORDER[str(verdicts[0])] <= ORDER[str(verdicts[1])]


@given(PAIRS, MARGIN)
def test_the_sign_of_the_metric_changes_nothing_but_signs(
    pairs: list[tuple[float, float]], margin: float
) -> None:
    fp32, plan = zip(*pairs, strict=True)
    high = judge(fp32, plan, margin=margin, higher_is_better=True)
    low = judge([-x for x in fp32], [-x for x in plan], margin=margin, higher_is_better=False)
    assert (high.verdict, high.bound, high.power) == (low.verdict, low.bound, low.power)
    assert high.low is not None and high.high is not None
    assert (low.difference, low.low, low.high) == pytest.approx((-high.difference, -high.high, -high.low))


@given(PAIRS, MARGIN)
def test_the_order_of_the_seeds_does_not_matter(pairs: list[tuple[float, float]], margin: float) -> None:
    fp32, plan = zip(*pairs, strict=True)
    there = judge(fp32, plan, margin=margin)
    back = judge(fp32[::-1], plan[::-1], margin=margin)
    assert there.bound == pytest.approx(back.bound, abs=1e-9)


def test_the_accepted_risk_is_kept() -> None:
    """A plan that is worse by exactly the margin is called not worse in at most alpha of the comparisons."""
    rng = np.random.RandomState(0)
    fp32 = rng.normal(0.9, 0.01, size=(2000, 4))
    plan = fp32 - 0.02 + rng.normal(0, 0.01, size=(2000, 4))
    wrong = sum(judge(a, b, margin=0.02).verdict == "not-worse" for a, b in zip(fp32, plan, strict=True))
    # 5 % of 2000 is 100, standard deviation 9.7.
    assert 70 < wrong < 130


def test_power_is_the_share_of_equal_plans_that_are_found_not_worse() -> None:
    rng = np.random.RandomState(1)
    noise = rng.normal(0, 0.01, size=(2000, 5))
    noise = (noise - noise.mean(axis=1, keepdims=True)) / noise.std(axis=1, ddof=1, keepdims=True) * 0.01
    stated = judge(np.zeros(5), noise[0], margin=0.01).power
    draws = rng.normal(0, 0.01, size=(2000, 5))
    found = np.mean([judge(np.zeros(5), d, margin=0.01).verdict == "not-worse" for d in draws])
    assert stated == pytest.approx(found, abs=0.04)


def test_the_ratio_is_the_median_of_pairs() -> None:
    base, other = [1.0, 1.2, 3.0], [0.5, 0.6, 1.0]
    found = paired_ratio(base, other)
    assert (found.median, found.rounds, found.trusted) == (2.0, 3, True)
    assert found.low <= found.median <= found.high
    assert paired_ratio(base, other) == found


def test_disturbed_rounds_do_not_count_unless_too_few_are_left() -> None:
    base, other = [1.0, 1.0, 1.0, 9.0], [0.5, 0.5, 0.5, 1.0]
    calm = paired_ratio(base, other, [False, False, False, True])
    assert (calm.median, calm.rounds, calm.voided, calm.trusted) == (2.0, 3, 1, True)
    assert "1 of 4" in calm.note
    storm = paired_ratio(base, other, [True, True, True, False])
    assert (storm.rounds, storm.voided, storm.trusted) == (4, 3, False)
    assert "proves nothing" in storm.note


def test_a_ratio_needs_pairs() -> None:
    for base, other in (([], []), ([1.0], [1.0, 2.0])):
        with pytest.raises(TaskError, match="slices"):
            paired_ratio(base, other)


def test_a_figure_is_known_when_most_seeds_have_it() -> None:
    assert median_of([1.0, None, 3.0]) == 2.0
    assert median_of([1.0, None, None]) is None
    assert median_of([]) is None
    assert mean_interval([1.0]) == (None, None)
    assert mean_interval([1.0, math.nan]) == (None, None)


def test_a_verdict_shows_itself_as_text_json_and_html() -> None:
    judgement = judge([0.9, 0.91, 0.92], [0.9, 0.91, 0.92], margin=0.01)
    verdict = Verdict(judgement=judgement, speed=paired_ratio([2.0], [1.0]), metric_name="<b>auc")
    assert str(verdict).startswith("not worse, 2.00x FP32's speed")
    assert "&lt;b&gt;auc" in verdict._repr_html_()
    shown = verdict.as_json(report="report.html")
    assert shown["metric"] == {
        "name": "<b>auc", "fp32": pytest.approx(0.91), "plan": pytest.approx(0.91), "difference": 0, "low": 0,
        "high": 0, "margin": 0.01,
    }  # fmt: skip
    assert (verdict.verdict, verdict.difference, verdict.speedup) == ("not-worse", 0, 2)
    assert (verdict.low, verdict.high) == (0, 0)


def test_a_metric_that_is_not_finite_is_null_in_json() -> None:
    judgement = judge([0.9, 0.91, 0.92], [0.9, math.nan, 0.92], margin=0.01)
    shown = Verdict(judgement=judgement, speed=paired_ratio([2.0], [1.0])).as_json()
    assert (shown["metric"]["plan"], shown["metric"]["difference"]) == (None, None)


def test_a_session_that_needs_the_foreign_load_only_does_not_pay_for_scipy() -> None:
    script = "import sys, equipoise.evidence; sys.exit('scipy' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
