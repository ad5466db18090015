"""``equipoise inspect`` from its words to its table, its page, its JSON and its exit code."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from equipoise.cli.main import app
from equipoise.deliver import inspected
from equipoise.step.collect import KINDS

SOURCE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from equipoise.task import Task

class Loud(nn.Linear):
    def forward(self, x):
        return super().forward(x * 2.0**20)

class Quiet(nn.Module):
    def forward(self, x):
        return x * 2.0**-20

def task(seed, data, layers=(Loud, Quiet)):
    torch.manual_seed(seed)
    x = torch.randn(64, 8)
    split = TensorDataset(x, (x[:, 0] > 0).long())
    loud = nn.Sequential(nn.Linear(16, 16), layers[0](16, 16), *[layer() for layer in layers[1:]])
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), loud, nn.Linear(16, 2))
    return Task(
        name="tiny <b>", about="made up", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        train=split, val=split, test=split, metric=lambda y, s: float((s.argmax(1) == y).mean()),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]).float(), batch[1]),
        metric_name="accuracy", batch_size=16, steps=6,
    )

def calm(seed, data):
    return task(seed, data, layers=(nn.Linear, nn.ReLU))

def empty(seed, data):
    made = task(seed, data)
    made.model = nn.ReLU()
    return made
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tiny.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    return "tiny.py:task"


def inspect(*words: Any) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["inspect", *map(str, words)])
    return done.exit_code, done.stdout, done.stderr


class Page(HTMLParser):
    """Tags that are left open, tags seen, and text."""

    VOID = {"meta", "link", "br", "path", "rect", "circle"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


def test_a_table_and_a_page(tiny: str) -> None:
    code, out, err = inspect(tiny, "--steps", 4, "--out", "page.html")
    assert code == 0, err
    row = next(line for line in out.splitlines() if "2.1 " in line)
    assert re.search(r"\d\d\s% activations over, \d\sdB", row), (
        "FP16 can't hold what the loud layer gives out"
    )
    assert "none" in row, "and bf16 can"
    assert re.search("FP16: . of 5 layers lose numbers, 1 by overflow; a scale for each", out)
    assert "bf16: no layer loses numbers." in out
    assert out.splitlines()[-1] == "page: page.html"
    assert "step 4/4" in err
    text = Path("page.html").read_text()
    page = Page(text)
    assert page.open == []
    assert "tiny <b>" in page.text and "<b>tiny <b>" not in text
    assert re.search(r"In FP16, \d\d\s% of activations overflow in 2\.1\.", page.text)
    maps = [attributes for tag, attributes in page.tags if attributes.get("class") == "heat"]
    assert len(maps) == len(KINDS)
    for tag, attributes in page.tags:
        assert tag != "script"
        assert not {"src", "srcset", "onclick"} & set(attributes), "nothing is loaded"
        assert tag != "link" or attributes["href"] == "data:,"
    assert "default-src 'none'" in text


def test_json_is_one_object_with_what_the_page_shows(tiny: str) -> None:
    code, out, err = inspect(tiny, "--max-steps", 3, "--format", "fp16,e4m3", "--json", "--out", "page.html")
    assert code == 0, err
    found = json.loads(out)
    assert set(found) == {
        "schema", "task", "about", "seed", "steps", "watched", "formats", "layers", "cost", "bisect", "html",
    }  # fmt: skip
    assert (found["steps"], found["watched"], found["bisect"]) == (3, 3, None)
    assert found["formats"] == ["fp16", "fp8-e4m3"]
    assert [x["layer"] for x in found["layers"]] == ["0", "2.0", "2.1", "2.2", "3"]
    loud = found["layers"][2]
    assert loud["type"] == "Loud" and set(loud["kinds"]) == set(KINDS)
    assert set(found["layers"][3]["kinds"]) == {"activations", "activation_gradients"}
    losses = loud["kinds"]["activations"]["formats"]["fp16"]
    assert set(losses) == {
        "values", "underflow", "overflow", "subnormal", "sqnr_db", "scale", "scaled_underflow",
        "scaled_sqnr_db",
    }  # fmt: skip
    assert losses["overflow"] > 0.6 and losses["scale"] < 2.0**-4
    assert losses["values"] == 3 * 16 * 16 == sum(loud["kinds"]["activations"]["histogram"].values())
    assert set(loud["swallowed"]) == {"fp16", "fp8-e4m3"}


def test_bisect_names_the_module(tiny: str) -> None:
    code, out, err = inspect(tiny, "--bisect", "--format", "fp16", "--json", "--out", "page.html")
    assert code == 0, err
    found = json.loads(out)["bisect"]
    assert found["wide"] == ["2.1"] and found["policy"] == "fp16; 2.1=fp32"
    assert found["half_loss"] is None and found["without"] == {"2.1": None}
    assert found["loss"] <= found["fp32_loss"] + found["margin"]
    assert "run 2: 0 modules in FP32, loss not finite" in err
    text = Page(Path("page.html").read_text()).text
    assert "FP16 holds if 2.1 stays FP32." in text
    assert 'precision="fp16; 2.1=fp32"' in text
    assert "--bisect --margin 2%" in text


def test_bisect_where_all_holds(tiny: str) -> None:
    code, out, err = inspect("tiny.py:calm", "--bisect", "--format", "bf16", "--out", "page.html")
    assert code == 0, err
    assert "bf16 holds: no module has to stay FP32." in out
    assert 'precision="bf16"' in out


def test_the_default_place(tiny: str) -> None:
    code, out, err = inspect("tiny.py:calm", "--steps", 1)
    assert code == 0, err
    (page,) = Path("runs").glob("inspect-tiny-py-calm-*.html")
    assert f"page: {page}" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no-task"], "no task 'no-task'"),
        (["TINY", "--steps", "0"], "--steps is 0; at least 1 step"),
        (["TINY", "--steps", "-5"], "--steps is -5; at least 1 step"),
        (["TINY", "--format", "fp17"], "unknown format 'fp17'; allowed: fp16, bf16, fp8-e4m3, fp8-e5m2"),
        (["TINY", "--format", "bf61"], "did you mean 'bf16'?"),
        (["TINY", "--format", "fp32"], "'fp32' is what the others are held against; give fp16"),
        (["TINY", "--format", ","], "unknown format ''"),
        (["TINY", "--bisect", "--format", "e4m3"], "it runs a half format; add --format fp16 or bf16"),
        (["TINY", "--margin", "much"], "margin is 'much'; write a number from 0 up in the loss's units"),
        (["tiny.py:empty"], "its model (ReLU) has no parameters; nothing is trained"),
        (["tiny.py:nothing"], "nothing"),
        (["TINY", "--out", "."], "is a folder; give the page a name in it"),
        (["TINY", "--out", "none/page.html"], "there is no folder 'none'; make it first"),
        (["TINY", "--device", "tpu"], "'tpu' isn't there"),
    ],
)
def test_bad_input_is_the_users_mistake(words: list[str], says: str, tiny: str) -> None:
    code, out, err = inspect(*(w.replace("TINY", tiny) for w in words))
    assert (code, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert not Path("runs").exists()


def test_layers_without_numbers_and_a_model_that_loses_nothing() -> None:
    figures = {
        "schema": 1, "task": "t", "about": "", "seed": 0, "steps": 1, "watched": 1, "formats": ["fp16"],
        "cost": {"step_s": None, "watched_step_s": None}, "bisect": None,
        "layers": [
            {"layer": "", "type": "Net", "kinds": {}, "swallowed": {}},
            {"layer": "a" * 99, "type": "Linear", "swallowed": {"fp16": 0.0}, "kinds": {"weights": {
                "histogram": {}, "zeros": 4, "nonfinite": 0, "formats": {"fp16": {
                    "values": 0, "underflow": 0.0, "overflow": 0.0, "subnormal": 0.0, "sqnr_db": None,
                    "scale": 1.0, "scaled_underflow": 0.0, "scaled_sqnr_db": None,
                }},
            }}},
        ],
    }  # fmt: skip
    assert inspected.headline(figures) == "FP16 holds nearly every number of every layer."
    page = Page(inspected.html_of(figures))
    assert "(root)" in page.text and "a" * 99 in page.text and "all zero" in page.text
