"""Policies and plans: the grammar, who wins, and the way to a file and back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from equipoise.errors import FormatError, PolicyError
from equipoise.formats import FORMATS, format_named
from equipoise.policy import Plan, Policy, as_policy
from equipoise.records import Choice

NAMES = [
    "",
    "stem",
    "blocks",
    "blocks.0",
    "blocks.0.attn",
    "blocks.0.attn.q",
    "blocks.1",
    "blocks.1.attn",
    "head",
    "head.0",
    "head.1",
]


def formats(text: str) -> dict[str, str]:
    return {name: match.format for name, match in Policy.parse(text).resolve(NAMES).items()}


def test_the_default_holds_where_nothing_else_does() -> None:
    assert set(formats("bf16").values()) == {"bf16"}


def test_an_entry_holds_for_everything_inside() -> None:
    got = formats("bf16; head=fp32")
    assert (got["head"], got["head.0"], got["head.1"], got["stem"]) == ("fp32", "fp32", "fp32", "bf16")


def test_an_exact_name_beats_a_pattern_whatever_the_order() -> None:
    for text in ("bf16; blocks.0=fp32; blocks.*=fp16", "bf16; blocks.*=fp16; blocks.0=fp32"):
        got = formats(text)
        assert (got["blocks.0"], got["blocks.0.attn.q"], got["blocks.1"]) == ("fp32", "fp32", "fp16")


def test_a_deeper_exact_name_beats_a_shallower_one() -> None:
    got = formats("bf16; blocks.0.attn=fp16; blocks=fp32")
    assert (got["blocks.0.attn.q"], got["blocks.0"], got["blocks.1.attn"]) == ("fp16", "fp32", "fp32")


def test_else_the_later_entry_wins() -> None:
    assert formats("fp32; blocks.0.*=fp32; *.attn=bf16")["blocks.0.attn.q"] == "bf16"
    assert formats("fp32; *.attn=bf16; blocks.0.*=fp32")["blocks.0.attn.q"] == "fp32"


def test_a_regular_expression_matches_the_whole_name() -> None:
    got = formats(r"bf16; re:blocks\.[0-9]+=fp32")
    assert (got["blocks.0"], got["blocks.1.attn"], got["blocks"]) == ("fp32", "fp32", "bf16")


def test_the_winner_is_shown() -> None:
    assert Policy.parse("bf16; head=fp32").resolve(NAMES)["head.1"].pattern == "head"
    text = Plan(policy=Policy.parse("bf16; head=fp32"), formats={"stem": "bf16", "head": "fp32"}).explain()
    assert "head: fp32 (entry: head)" in text and "stem: bf16 (entry: default)" in text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("bf16; nose=fp32", "matches no module"),
        ("bf16; heat=fp32", "head"),
        ("bf16; fp32", "two defaults"),
        ("", "empty"),
        ("bf16; =fp32", "no pattern"),
        ("bf16; re:(=fp32", "not a regular expression"),
    ],
)
def test_bad_policies(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        formats(text)


@pytest.mark.parametrize("text", ["bf16-true", "int8", "bf17", "fp8-e4m3", "bf16; head=int4"])
def test_bad_formats(text: str) -> None:
    with pytest.raises(FormatError):
        as_policy(text)


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("bf16", "bf16"),
        ("bf16-mixed", "bf16"),
        (torch.bfloat16, "bf16"),
        ("16-mixed", "fp16"),
        (torch.float16, "fp16"),
        ("32-true", "fp32"),
        ("no", "fp32"),
        (torch.float32, "fp32"),
        ("BF16", "bf16"),
    ],
)
def test_names_mean_what_they_mean_elsewhere(given: object, means: str) -> None:
    assert str(as_policy(given)) == means


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_torchs(name: str) -> None:
    fmt = FORMATS[name]
    info = torch.finfo(getattr(torch, fmt.torch_name))
    assert (fmt.bits, fmt.largest, fmt.epsilon, fmt.smallest_normal) == (
        info.bits,
        info.max,
        info.eps,
        info.tiny,
    )
    assert fmt.smallest_subnormal == info.smallest_normal * info.eps
    if name in ("fp32", "bf16", "fp16"):
        assert format_named(name) is fmt


words = st.from_regex(r"[a-z][a-z0-9_]{0,5}(\.[a-z0-9*?]{1,4}){0,3}", fullmatch=True)
policies = st.builds(
    Policy,
    st.sampled_from(["fp32", "bf16", "fp16"]),
    st.lists(st.tuples(words, st.sampled_from(["fp32", "bf16", "fp16"])), max_size=5).map(tuple),
)


@given(policies)
def test_text_and_back(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy


text = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
choices = st.builds(
    Choice,
    what=text,
    where=text,
    choice=text,
    reason=text,
    evidence=st.dictionaries(text, st.floats(allow_nan=False), max_size=3),
)
plans = st.builds(
    Plan,
    policy=policies,
    formats=st.dictionaries(text, st.sampled_from(["fp32", "bf16"]), max_size=4),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
    fused_optimizer=st.booleans(),
    choices=st.lists(choices, max_size=3).map(tuple),
    source=st.sampled_from(["named", "static", "auto", "pinned"]),
    note=text,
)


@given(plans)
def test_plan_to_toml_and_back(plan: Plan) -> None:
    again = Plan.from_toml(plan.to_toml())
    assert again == plan
    assert again.same_decisions(plan) and plan.pinned().same_decisions(plan)


def test_a_plan_that_decides_otherwise_is_another_plan() -> None:
    plan = Plan(policy=Policy("bf16"), formats={"a": "bf16"})
    for other in (
        replace(plan, fused_optimizer=True),
        replace(plan, policy=Policy("fp32")),
        replace(plan, memory_format="channels_last"),
        replace(plan, formats={"a": "fp32"}),
    ):
        assert not plan.same_decisions(other)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not toml [", "TOML"),
        ('policy = "bf16"', "schema"),
        ('schema = 1\npolicy = "bf16"\nmemory = "x"', "did you mean 'memory_format'"),
        ('schema = 1\npolicy = "bf16"\nmemory_format = "nhwc"', "allowed: contiguous, channels_last"),
        ('schema = 1\npolicy = "int8"', "unknown format"),
        ("schema = 1\npolicy = 7", "policy"),
        ('schema = 1\npolicy = "bf16"\nchoices = [{what = "x"}]', "can't be read"),
        ('schema = 1\npolicy = "bf16"\nformats = 3', "can't be read"),
        ('schema = 1\npolicy = "bf16"\nfused_optimizer = "yes"', "can't be read"),
    ],
)
def test_bad_plans(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        Plan.from_toml(text)


def test_a_plan_in_html_is_escaped() -> None:
    assert "<script>" not in Plan(policy=Policy("bf16"), note="<script>")._repr_html_()


@pytest.mark.parametrize(
    "text",
    ["fp16", "fp16; blocks.*=bf16", "fp32; blocks=fp16; *.q=bf16", "bf16; re:.*attn=fp16; head.1=fp32"],
)
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_widening_changes_the_one_module_and_no_other(text: str, whole: bool, name: str) -> None:
    before = formats(text)
    policy = Policy.parse(text).widened(name, NAMES, whole=whole)
    after = {n: match.format for n, match in policy.resolve(NAMES).items()}
    inside = f"{name}." if name else ""
    for n in NAMES:
        changed = n == name or (whole and n.startswith(inside))
        assert after[n] == ("fp32" if changed else before[n])
    assert Policy.parse(str(policy)) == policy


def test_widening_a_module_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"'heat'.*did you mean 'head'"):
        Policy.parse("fp16").widened("heat", NAMES)
