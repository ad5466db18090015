"""When steps are watched, what makes a stall, and what is said of it."""

import math
import re

import pytest

from equipoise.records import Origin
from equipoise.watch.stall import STALL_AFTER, StallWatch, layer_of, likely_cause


def origin(**changes: object) -> Origin:
    values: dict[str, object] = {
        "module": "blocks.3", "operator": "addmm", "backward": False, "half": True, "largest": 512.0,
        "format": "fp16",
    }  # fmt: skip
    return Origin(**{**values, **changes})  # type: ignore[arg-type]


def test_the_twentieth_skip_in_a_row_is_the_stall_and_says_so_once() -> None:
    watch = StallWatch()
    assert [watch.after(True) for _ in range(25)] == [n == STALL_AFTER for n in range(1, 26)]
    assert not watch.after(False) and watch.skips == 0
    assert not any(watch.after(True) for _ in range(STALL_AFTER - 1))


def test_a_step_is_watched_only_while_a_stall_threatens() -> None:
    watch = StallWatch()
    wanted = []
    for _ in range(25):
        watch.after(True)
        wanted.append(watch.wants_to_see)
    assert wanted == [1 < n < STALL_AFTER for n in range(1, 26)]


def test_what_was_seen_is_forgotten_with_a_step_that_was_taken() -> None:
    watch = StallWatch()
    watch.after(True)
    watch.origin = origin()
    watch.after(False)
    assert watch.origin is None


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        (None, "cause wasn't seen.*blocks.1=fp32"),
        (origin(), "addmm in layer 'blocks.3'.*forward.*512.*give 'blocks.3' fp32"),
        (origin(backward=True), r"backward.*loss scale is 0.25 already: give 'blocks.3' fp32"),
        (origin(half=False, operator="log"), "log in layer.*no format would help"),
        (origin(module="", given="input", largest=math.inf), "input of layer.*look at the data"),
        (origin(module="", given="weight blocks.2.bias"), "weight blocks.2.bias holds.*has diverged"),
        (origin(module=None), "the loss.*widen its inputs"),
    ],
)
def test_each_cause_has_its_advice(seen: Origin | None, words: str) -> None:
    text = likely_cause(seen, "blocks.1.weight", 0.25)
    assert re.search(words, text), text
    assert "blocks.1.weight" in text


def test_the_layer_is_the_origins_or_the_parameters() -> None:
    assert layer_of(origin(), "head.weight") == "blocks.3"
    assert layer_of(origin(module=""), "head.weight") == "head"
    assert layer_of(None, None) == ""
