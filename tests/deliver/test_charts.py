"""Charts: what they draw, and what they leave out."""

import json
import math
import re
import xml.etree.ElementTree as ET
from html import unescape

import pytest

from equipoise.deliver import charts
from equipoise.deliver.charts import Bar, Series, bar_chart, interval_chart, line_chart, tick_text, ticks


def lines_of(points, **more):
    series = [Series(arm="plan", label="Plan", points=points)]
    return line_chart(series, **{"x_label": "step", "y_label": "loss", "title": "t", "about": "a"} | more)


def path_of(svg, css):
    return re.search(rf'class="{css}" d="([^"]*)"', svg)[1]


@pytest.mark.parametrize("low,high", [(0, 1), (-3, 7), (0, 123456), (2.31, 2.33), (1e-9, 3e-9)])
def test_ticks_are_round_inside_and_about_as_many_as_wanted(low, high):
    found = ticks(low, high, 5)
    assert 3 <= len(found) <= 8
    assert all(low - 1e-12 <= t <= high + 1e-12 for t in found)
    texts = [tick_text(t, found) for t in found]
    assert len(set(texts)) == len(texts)


def test_a_value_that_is_not_finite_breaks_the_line():
    svg = lines_of([(0, 1.0), (1, 2.0), (2, None), (3, 2.0), (4, 1.0)])
    path = path_of(svg, "line s-plan")
    assert path.count("M") == 2 and path.count("L") == 2
    assert "nan" not in svg.lower()


def test_without_a_mean_the_seeds_are_drawn_in_full():
    series = [Series(arm="plan", label="Plan", points=[], faint=[[(0, 1.0), (1, 2.0)]])]
    svg = line_chart(series, x_label="x", y_label="y", title="t", about="a")
    assert 'class="line s-plan" d="M' in svg and 'class="m m-plan"' in svg and "faint" not in svg


def test_nothing_to_draw_draws_nothing():
    assert lines_of([]) == "" == lines_of([(1, 2.0)]) == lines_of([(1, None), (2, None)])
    assert bar_chart([], x_label="x", title="t", about="a") == ""
    assert (
        bar_chart([Bar(arm="plan", label="P", value_text="", value=0.0)], x_label="x", title="t", about="a")
        == ""
    )


def test_a_large_range_is_logarithmic_and_says_so():
    assert "(log scale)" in lines_of([(0, 1000.0), (1, 1.0)])
    assert "(log scale)" not in lines_of([(0, 1000.0), (1, -1.0)])


def test_a_constant_curve_is_drawn():
    assert path_of(lines_of([(0, 2.0), (1, 2.0)]), "line s-plan").startswith("M")


def test_hover_shows_the_values_that_are_drawn():
    svg = lines_of([(0, 1.25), (10, None), (20, 0.75)])
    data = json.loads(unescape(re.search(r'data-chart="([^"]*)"', svg)[1]))
    assert data["lines"][0]["points"] == [[0, 1.25], [20, 0.75]]


def test_charts_are_xml_with_a_name_for_screen_readers_and_escaped_texts():
    hostile = '<script>"&'
    svgs = [
        lines_of([(0, 1.0), (1, 2.0)], title=hostile, y_label=hostile, about=hostile),
        bar_chart(
            [Bar(arm="plan", label=hostile, value_text=hostile, value=2.0, low=1.0, high=3.0, dots=(1.5,))],
            x_label=hostile,
            title=hostile,
            about=hostile,
        ),
        interval_chart(
            difference=-0.1,
            low=-0.2,
            high=0.1,
            margin=0.3,
            higher_is_better=True,
            metric=hostile,
            decimals=2,
            tone="good",
        ),
    ]
    ids = []
    for svg in svgs:
        root = ET.fromstring(svg)
        assert root.get("role") == "img"
        named = root.get("aria-labelledby").split()
        here = {e.get("id"): e.text for e in root.iter() if e.get("id")}
        assert all(here[n] for n in named)
        ids += here
        assert "script" not in {e.tag for e in root.iter()}
    assert len(ids) == len(set(ids)), "ids on one page are unique"


@pytest.mark.parametrize("higher", [True, False])
def test_the_worse_side_of_the_interval_is_on_the_left(higher):
    worse = -0.02 if higher else 0.02
    svg = interval_chart(
        difference=worse,
        low=worse - 0.001,
        high=worse + 0.001,
        margin=0.01,
        higher_is_better=higher,
        metric="m",
        decimals=3,
        tone="bad",
    )
    dot = float(re.search(r'class="interval-dot t-bad" cx="([\d.]+)"', svg)[1])
    edge = float(re.search(r'class="edge" d="M([\d.]+)', svg)[1])
    assert dot < edge < charts.WIDTH / 2


def test_without_an_interval_only_the_dot_is_drawn():
    svg = interval_chart(
        difference=0.1,
        low=None,
        high=None,
        margin=None,
        higher_is_better=True,
        metric="m",
        decimals=2,
        tone="none",
    )
    assert (
        "interval-dot" in svg
        and 'class="interval ' not in svg
        and "margin" not in svg.replace("no margin", "")
    )


def test_segments_are_as_long_as_their_share():
    bar = Bar(
        arm="plan",
        label="Plan",
        value_text="",
        value=4.0,
        segments=(("p-data", 1.0, "a"), ("p-forward", 3.0, "b")),
    )
    svg = bar_chart([bar], x_label="ms", title="t", about="a")
    widths = [float(w) for w in re.findall(r'class="seg [^"]*" x="[\d.]+" y="[\d.]+" width="([\d.]+)"', svg)]
    assert math.isclose(widths[1] / widths[0], 3.0, rel_tol=1e-3)
