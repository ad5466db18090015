"""The report of comparisons and runs: complete, escaped, loads nothing, and shows what its JSON says."""

import copy
import json
import subprocess
import sys
from html.parser import HTMLParser

import builder
import pytest

from equipoise.deliver import figures as fig
from equipoise.deliver import report
from equipoise.errors import RunError

VOID = {"meta", "link", "input", "img", "br", "hr"}
LOADS = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}


class Page(HTMLParser):
    """The text, tags and attributes of a page; fails where tags don't close in order."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.loads, self.headings, self.text = [], [], [], [], []
        self.feed(html)
        self.close()
        assert self.open == [], f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.loads += [(tag, k, v) for k, v in attrs if k in LOADS]
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(int(tag[1]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.loads += [(tag, k, v) for k, v in attrs if k in LOADS]

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.fixture(scope="session")
def rendered(tmp_path_factory):
    """Name -> (page, figures) of every kind of directory."""
    root = tmp_path_factory.mktemp("reports")
    found = {}
    for name, make in builder.COMPARISONS.items():
        found[name] = report.render(builder.write_comparison(root / name, make()), price_per_hour=0.4)
    found["run"] = report.render(builder.write_run(root / "run"))
    found["unfinished"] = report.render(builder.write_run(root / "unfinished", steps=250, finished=False))
    return {
        k: (Page(page.read_text("utf-8")), json.loads(figures.read_text("utf-8")))
        for k, (page, figures) in found.items()
    }


ALL = [*builder.COMPARISONS, "run", "unfinished"]


@pytest.mark.parametrize("name", ALL)
def test_a_page_is_well_formed_and_loads_nothing(rendered, name):
    page, _ = rendered[name]
    assert [x for x in page.loads if x[2] != "data:,"] == []
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not {"img", "iframe", "object", "embed", "base"} & {tag for tag, _ in page.tags}
    assert all(not key.startswith("on") for _, attrs in page.tags for key in attrs)
    policy = next(a["content"] for t, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "script-src 'sha256-" in policy


@pytest.mark.parametrize("name", ALL)
def test_headings_are_in_order_and_ids_unique(rendered, name):
    page, _ = rendered[name]
    assert page.headings[0] == 1 and page.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(page.headings, page.headings[1:], strict=False))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs in page.tags:
        for reference in (attrs.get("aria-labelledby") or "").split():
            assert reference in ids


@pytest.mark.parametrize("name", ALL)
def test_the_page_says_what_the_json_says(rendered, name):
    page, figures = rendered[name]
    for key in ("headline", "sentence", "reason", "about", "repeat", "helped"):
        assert " ".join(figures[key].replace("\N{NO-BREAK SPACE}", " ").split()) in page.words, key
    for layer in figures["layers"]:
        assert layer["layer"] in page.words
    for note in figures["notes"]:
        assert note in page.words
    for name_, version in figures["versions"].items():
        assert f"{name_} {version}" in page.words
    assert "nan" not in page.words.lower().split()
    assert "None" not in page.words


def test_a_comparison_shows_its_figures(rendered):
    page, figures = rendered["full"]
    assert figures["headline"] == "1.93× faster, not worse."
    assert figures["speedup"] == {"median": 1.93, "low": 1.88, "high": 1.97}
    for text in (
        "Not worse",
        "2.3172",
        "2.3191",
        "1.88× to 1.97×",
        "1.41×",
        "668 MiB",
        "25 layers in bf16 and 15 in FP32",
        "A look-up moves bytes and gains nothing.",
        "Unusable",
        "equipoise compare text --repeats 3",
        "accuracy of the next byte",
        "510 ms a step",
        "No step of the 1,200 steps was skipped",
    ):
        assert text in page.words, text
    plan = next(a for a in figures["arms"] if a["arm"] == "plan")
    assert plan["parts"]["backward_s"] == 0.160 and plan["setup_s"] == 12.4
    assert len(figures["layers"]) == 40


def test_cost_is_hours_times_price_and_absent_without_a_price(rendered, tmp_path):
    _, figures = rendered["full"]
    arm = next(a for a in figures["arms"] if a["arm"] == "fp32")
    assert arm["cost"] == pytest.approx((arm["run_s"] + 1.2) / 3600 * 0.4)
    page, figures = report.render(builder.write_comparison(tmp_path, builder.comparison()))
    assert json.loads(figures.read_text())["cost"] is None
    assert "What a run costs" not in page.read_text("utf-8")


def test_hostile_texts_stay_text(rendered):
    page, _ = rendered["hostile"]
    assert page.words.count('<script>alert("x")</script>') >= 8


def test_one_seed_has_no_interval_and_is_not_called_faster(rendered):
    page, figures = rendered["one_seed"]
    assert figures["headline"] == "No clear difference in speed (1.04×); not yet proven as good."
    assert figures["metric"]["low"] is None
    assert "Plain autocast" not in page.words and "thin: each seed" not in page.words


def test_without_a_margin_there_is_an_interval_and_no_verdict(rendered):
    page, figures = rendered["no_margin"]
    assert figures["verdict"] is None
    assert "No verdict" in page.words and "−0.009 to +0.006" in page.words


def test_a_diverged_arm_leaves_gaps_and_says_so(rendered):
    page, figures = rendered["diverged"]
    assert "Plan: 271" in page.words and "91 of 1,200 steps skipped" in page.words
    loss = next(c for c in figures["curves"]["loss"] if c["arm"] == "plan")
    assert loss["mean"][-1][2] is None and loss["seeds"]["0"][-1][2] is not None
    assert figures["arms"][2]["metric"]["mean"] is None


def test_skips_are_counted_over_all_seeds(rendered):
    _, figures = rendered["diverged"]
    assert figures["step"]["skipped"] == 91


def test_many_layers_are_grouped_and_each_is_still_there(rendered):
    page, figures = rendered["many_layers"]
    assert len(figures["layers"]) == 304 and len(figures["groups"]) == 9
    assert "blocks.*.attention.qkv" in page.words and "blocks.37.attention.qkv" in page.words
    assert sum(len(g["layers"]) for g in figures["groups"]) == 304


def test_what_is_missing_is_left_out(rendered):
    page, _ = rendered["bare"]
    for absent in (
        "How it learns",
        "How fast",
        "Which layer",
        "The machine",
        "Repeat it",
        "way through a step",
    ):
        assert absent not in page.words


def test_a_run_shows_its_result_and_counts_skips(rendered):
    page, figures = rendered["run"]
    assert (
        figures["headline"].replace("\N{NO-BREAK SPACE}", " ")
        == "Accuracy 0.9127 on the test data in 2 min 6 s."
    )
    assert figures["arms"][0]["skipped"] == 3 and "3 of 600 steps skipped" in page.words
    assert figures["step"]["step"] == 600 and "loss × 65,536" in page.words
    assert figures["metric"]["best"]["step"] == 600


def test_an_unfinished_run_says_so(rendered):
    _, figures = rendered["unfinished"]
    assert figures["headline"].startswith("Not finished: accuracy")


def test_throughput_of_a_run_comes_from_its_rows_when_not_given(tmp_path):
    folder = builder.write_run(tmp_path)
    metrics = json.loads((folder / "metrics.json").read_text())
    del metrics["samples_per_s"]
    (folder / "metrics.json").write_text(json.dumps(metrics))
    speed = report.figures_of(folder)["arms"][0]["samples_per_s"]
    assert speed["median"] == pytest.approx(128 / 0.21) and speed["low"] is None


def test_slices_under_foreign_load_are_not_readings():
    made = builder.comparison()
    slices = made["arms"]["plan"]["seeds"]["0"]["slices"]
    before = len(fig.of_comparison(made, None)["arms"][2]["readings"])
    slices[5]["foreign"] = 0.9
    assert len(fig.of_comparison(made, None)["arms"][2]["readings"]) == before - 1


def test_a_torn_last_row_is_passed_over_and_another_bad_one_is_said(tmp_path):
    folder = builder.write_run(tmp_path)
    assert report.figures_of(folder)["notes"] == []
    rows = (folder / "steps.jsonl").read_text().split("\n")
    rows[100] = '{"step": 101, "lo'
    (folder / "steps.jsonl").write_text("\n".join(rows))
    assert report.figures_of(folder)["notes"] == [
        "1 of 601 rows of steps.jsonl can't be read and are left out."
    ]


def test_a_plan_that_cannot_be_read_is_said_and_the_rest_is_shown(tmp_path):
    made = builder.comparison(plan_toml="schema = 99")
    page, figures = report.render(builder.write_comparison(tmp_path, made))
    read = json.loads(figures.read_text())
    assert "plan.toml can't be read" in read["notes"][0]
    assert read["formats"] == {"fp32": 15, "bf16": 25}
    assert "25 layers in bf16" in page.read_text("utf-8")


def test_untrusted_speed_is_called_so():
    made = builder.comparison(speedup={"median": 1.9, "low": 1.2, "high": 2.4, "trusted": False})
    assert fig.of_comparison(made, None)["headline"] == "Not worse; speed unproven (1.90×)."


def test_what_is_not_finite_is_null_in_the_json(tmp_path):
    made = builder.diverged()
    _, figures = report.render(builder.write_comparison(tmp_path, made))

    def refuse(text):
        raise AssertionError(f"{text} in report.json")

    json.loads(figures.read_text(), parse_constant=refuse)


def test_the_same_data_give_the_same_bytes(tmp_path):
    pages = [report.render(builder.write_comparison(tmp_path / x, builder.comparison()))[0] for x in "ab"]
    assert pages[0].read_bytes() == pages[1].read_bytes()


def test_rendering_again_replaces_both_files_and_leaves_nothing_else(tmp_path):
    folder = builder.write_comparison(tmp_path, builder.comparison())
    report.render(folder)
    builder.write_comparison(folder, builder.comparison(task="another"))
    report.render(folder)
    assert json.loads((folder / "report.json").read_text())["task"] == "another"
    assert sorted(p.name for p in folder.iterdir()) == ["comparison.json", "report.html", "report.json"]


def broken():
    """Comparisons with one value replaced by what must not be there, two levels deep and in each arm."""
    whole = builder.comparison(arms={name: builder.arm(name, seeds=1, steps=16) for name in ("fp32", "plan")})
    places = [(k,) for k in whole] + [(k, x) for k, v in whole.items() if isinstance(v, dict) for x in v]
    places += [("arms", "plan", k) for k in whole["arms"]["plan"]]
    places += [("arms", "plan", "seeds", "0", k) for k in whole["arms"]["plan"]["seeds"]["0"]]
    places += [("machine", "formats", "bf16", k) for k in whole["machine"]["formats"]["bf16"]]
    for place in places:
        for value in (None, "x", [], {}, -3, [None]):
            yield place, value, whole


def test_a_value_that_must_not_be_there_is_refused_or_left_out(tmp_path):
    for place, value, whole in broken():
        made = copy.deepcopy(whole)
        inner = made
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
        (tmp_path / "comparison.json").write_text(json.dumps(made))
        try:
            report.html_of(report.figures_of(tmp_path))
        except RunError:
            continue
        except Exception as error:
            raise AssertionError(f"{place} = {value!r}") from error


def bad(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("comparison.json", "{", "can't be read"),
        ("comparison.json", "[1]", "holds a list"),
        ("comparison.json", '{"schema": 7, "arms": {}}', "schema 7"),
        ("comparison.json", '{"schema": 1}', "lacks the arm fp32 and plan"),
        (
            "comparison.json",
            '{"schema": 1, "arms": {"fp32": {}, "plan": {"seeds": 3}}}',
            "can't be understood",
        ),
        ("run.toml", "schema = 1", "nothing was trained"),
        ("run.toml", "schema = ", "can't be read"),
        ("run.toml", "schema = 2", "schema 2"),
        ("other.txt", "", "neither comparison.json nor run.toml"),
    ],
)
def test_a_directory_that_cannot_be_used_says_what_is_missing(tmp_path, name, text, says):
    with pytest.raises(RunError, match=says):
        report.render(bad(tmp_path / "x", name, text))
    assert not (tmp_path / "x" / "report.html").exists()


def test_no_directory_and_a_price_that_cannot_be(tmp_path):
    with pytest.raises(RunError, match="not there"):
        report.render(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        report.render(tmp_path / "file")
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RunError, match="price"):
            report.render(builder.write_comparison(tmp_path / "c", builder.bare()), price_per_hour=price)


def test_the_verb_names_the_files_it_wrote(tmp_path):
    folder = builder.write_comparison(tmp_path / "run", builder.bare())
    command = [
        sys.executable,
        "-c",
        "import typer; from equipoise.cli.report import report; typer.run(report)",
    ]
    found = subprocess.run([*command, str(folder), "--json"], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == {
        "reports": [
            {"run": str(folder), "html": str(folder / "report.html"), "json": str(folder / "report.json")}
        ]
    }


def test_a_report_needs_neither_torch_nor_matplotlib(tmp_path):
    folder = builder.write_comparison(tmp_path, builder.comparison())
    code = (
        "import sys; from pathlib import Path; from equipoise.deliver.report import render; "
        f"render(Path({str(folder)!r})); print({{'torch', 'matplotlib'}} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
