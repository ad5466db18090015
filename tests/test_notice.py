"""What a planning session shows: lines in a pipe, a bar on a terminal, nothing from other ranks."""

import io
import sys

import pytest

from equipoise import ranks
from equipoise.notice import PlanNotice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with PlanNotice() as notice:
        notice.update(0.5, "timing layers")
        notice.update(7.0, "racing")
        notice.say("planned in 1.0 s")
    return "" if stream is None else stream.getvalue()


def test_in_a_pipe_one_line_and_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == "equipoise: planned in 1.0 s\n"


def test_on_a_terminal_a_bar_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert "equipoise: planning" in text and "timing layers" in text and "racing" in text
    assert text.count("planned in 1.0 s") == 1


def test_no_stderr_and_other_ranks_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, None) == ""
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert shown(monkeypatch, io.StringIO()) == ""
