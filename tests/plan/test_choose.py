"""Deciding, on recorded times: pure, so the same records give the same plan on every machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equipoise.plan import choose
from equipoise.policy import Policy
from equipoise.records import LayerCost, Timing
from recorded import machine


def timing(seconds: float, spread: float = 0.02) -> Timing:
    return Timing(median_s=seconds, low_s=seconds * (1 - spread), high_s=seconds * (1 + spread), rounds=7)


def cost(layer: str, fmt: str, seconds: float | None, key: str | None = None, note: str = "") -> LayerCost:
    time = None if seconds is None else timing(seconds)
    return LayerCost(layer=layer, key=key or layer, format=fmt, time=time, note=note)


def race(
    half: str | None, times: dict[str, list[float | None]], *, convs: bool = False, kept=(), **more
) -> choose.Race:
    arms = choose.arms_to_race(half, list(kept), can_fuse=True, has_convs=convs)
    return choose.Race(arms=arms, times_s={a.name: times[a.name] for a in arms}, **more)


FORMATS = {
    name: {"a": "x"}
    for name in (
        "fp32",
        "bf16",
        "fp32 + fused",
        "bf16 + fused",
        "fp32 + fused + channels_last",
        "bf16 + fused + channels_last",
    )
}


def decide(r: choose.Race, half: str | None = "bf16"):
    return choose.decide(r, half, [], FORMATS, [])


def test_half_that_wins_is_taken_with_its_levers() -> None:
    plan = decide(
        race(
            "bf16",
            {"fp32": [1.0] * 7, "bf16": [0.5] * 7, "fp32 + fused": [0.95] * 7, "bf16 + fused": [0.45] * 7},
        )
    )
    assert plan is not None
    assert (str(plan.policy), plan.fused_optimizer, plan.source) == ("bf16", True, "auto")
    evidence = next(c for c in plan.choices if c.what == "race").evidence
    assert evidence["time_fp32_ratio"] == pytest.approx(0.45)
    assert evidence["time_bf16_ratio"] == pytest.approx(0.9)
    lever = next(c for c in plan.choices if c.what == "optimizer")
    assert lever.evidence["time_ratio"] == pytest.approx(0.9)


def test_a_gain_within_the_spread_stays_fp32() -> None:
    noisy = [0.97, 1.03, 0.99, 1.02, 0.98, 1.01, 1.0]
    plan = decide(
        race("bf16", {"fp32": [1.0] * 7, "bf16": noisy, "fp32 + fused": [1.0] * 7, "bf16 + fused": noisy})
    )
    assert plan is not None and str(plan.policy) == "fp32"


def test_a_lever_shown_slower_is_left_off_and_an_undecided_one_stays_on() -> None:
    times = {
        "fp32": [1.0] * 7,
        "fp32 + fused": [1.0, 1.01, 0.99] * 2 + [1.0],
        "fp32 + fused + channels_last": [1.4] * 7,
    }
    plan = decide(race(None, times, convs=True), None)
    assert plan is not None
    assert plan.fused_optimizer and plan.memory_format == "contiguous"


def test_a_noisy_lever_does_not_hide_the_gain_of_half_without_it() -> None:
    noisy = [0.75, 0.95, 1.0, 0.8, 1.0, 0.75, 1.0, 0.9, 1.0]
    times = {"fp32": [1.0] * 9, "bf16": [0.875] * 9, "fp32 + fused": [1.0] * 9, "bf16 + fused": noisy}
    plan = decide(race("bf16", times))
    assert plan is not None and (str(plan.policy), plan.fused_optimizer) == ("bf16", False)


def test_never_the_arm_that_failed_and_the_reason_is_kept() -> None:
    times = {"fp32": [1.0] * 7, "bf16": [], "fp32 + fused": [0.9] * 7, "bf16 + fused": []}
    plan = decide(race("bf16", times, dropped={"bf16": "no kernel", "bf16 + fused": "no kernel"}))
    assert plan is not None and str(plan.policy) == "fp32"
    assert "no kernel" in next(c for c in plan.choices if c.what == "race").reason


def test_too_few_undisturbed_rounds_prove_nothing() -> None:
    times = {"fp32": [1.0] * 2, "bf16": [0.5] * 2, "fp32 + fused": [0.9] * 2, "bf16 + fused": [0.4] * 2}
    assert decide(race("bf16", times, voided=20)) is None


@given(st.floats(0.2, 5.0), st.floats(0.0, 0.3), st.randoms(use_true_random=False))
def test_the_plan_is_never_an_arm_shown_slower_than_a_static_one(ratio: float, noise: float, random) -> None:
    def column(center: float) -> list[float | None]:
        return [center * (1 + noise * (random.random() - 0.5)) for _ in range(9)]

    r = race(
        "bf16",
        {
            "fp32": column(1.0),
            "bf16": column(ratio),
            "fp32 + fused": column(1.0),
            "bf16 + fused": column(ratio),
        },
    )
    plan = decide(r)
    assert plan is not None
    name = plan.policy.default + (" + fused" if plan.fused_optimizer else "")
    for static in ("fp32", "bf16"):
        shown = choose.paired_ratio(r.times_s[name], r.times_s[static])
        assert shown is None or shown.low <= 1 + choose.TIE


def test_slow_half_kernels_stay_fp32_by_kind_and_small_ones_follow() -> None:
    costs = [cost("big", "fp32", 10.0), cost("big", "bf16", 4.0)]
    for i in range(5):  # five alike depthwise layers
        costs += [cost(f"dw{i}", "fp32", 0.1, "dw"), cost(f"dw{i}", "bf16", 2.0, "dw")]
    costs += [cost("tiny", "fp32", 1e-4), cost("tiny", "bf16", 3e-4)]  # 3x slower, worth nothing
    costs += [
        cost("rnn", "fp32", 1.0),
        cost("rnn", "bf16", None, note="bf16 can't run this layer: no kernel"),
    ]
    kept = choose.slow_layers(costs, "bf16")
    assert [c.where for c in kept] == ["dw0", "dw1", "dw2", "dw3", "dw4", "rnn"]
    assert kept[0].evidence["slower_ratio"] == pytest.approx(20.0)
    assert "no kernel" in kept[-1].reason
    arms = choose.arms_to_race("bf16", kept, can_fuse=False, has_convs=False)
    assert [a.name for a in arms] == ["fp32", "bf16", "bf16 with exceptions"]
    assert str(arms[-1].policy).startswith("bf16; dw0=fp32; dw1=fp32")
    assert choose.cost_ratio(costs, "bf16", kept) == pytest.approx(
        (4.0 + 5 * 0.1 + 3e-4 + 1.0) / (10.0 + 0.5 + 1e-4 + 1.0)
    )


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        ({"bf16": "use"}, "bf16"),
        ({"bf16": "not-worth-it"}, None),
        ({"fp16": "use"}, None),
        ({"bf16": "use", "fp16": "use"}, "bf16"),
    ],
)
def test_half_to_try_follows_the_probe(verdicts: dict[str, str], expected: str | None) -> None:
    assert choose.half_to_try(machine(**verdicts))[0] == expected


def test_the_static_default_follows_measured_sizes() -> None:
    assert choose.smallest_gaining_volume(machine(bf16="use"), "bf16") == 256.0**3
    for share, ratio, expected in (
        (1.0, None, "bf16"),
        (0.5, None, "fp32"),
        (1.0, 0.5, "bf16"),
        (1.0, 0.9, "fp32"),
    ):
        plan = choose.static_plan("bf16", share, ratio, FORMATS, "can't tell")
        assert (str(plan.policy), plan.source, plan.note) == (expected, "static", "can't tell")
    assert str(choose.static_plan(None, 1.0, None, FORMATS, "x").policy) == "fp32"


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20))
def test_ratio_of_an_arm_with_itself_is_one(times: list[float]) -> None:
    ratio = choose.paired_ratio(times, times)
    assert ratio == choose.TimeRatio(1.0, 1.0, 1.0, len(times))


def test_policies_of_arms_are_what_they_say() -> None:
    arms = choose.arms_to_race("bf16", [], can_fuse=True, has_convs=True)
    assert [(a.name, a.policy, a.fused_optimizer, a.memory_format) for a in arms][:2] == [
        ("fp32", Policy("fp32"), False, "contiguous"),
        ("bf16", Policy("bf16"), False, "contiguous"),
    ]
    assert sorted(a.name for a in arms) == sorted(FORMATS)


def test_only_an_arm_that_is_clearly_slower_leaves_the_race() -> None:
    times = {"a": [1.0] * 5, "b": [1.2] * 5, "c": [1.3] * 5, "d": [1.0, 2.0, 1.0, 2.0, 1.5], "e": [None] * 5}
    assert choose.still_in(list(times), times) == ["a", "b", "d", "e"]
    assert choose.still_in(["c"], times) == ["c"]


def test_a_race_is_settled_when_no_pair_may_be_either() -> None:
    times = {"a": [1.0] * 5, "alike": [1.01] * 5, "slower": [1.2] * 5, "noisy": [0.9, 1.1, 0.95, 1.05, 1.0]}
    assert choose.settled(["a"], times)
    assert choose.settled(["a", "alike", "slower"], times)
    assert not choose.settled(["a", "alike", "noisy"], times)
    assert not choose.settled(["a", "unrun"], times | {"unrun": []})
