"""The report in a real browser: no message, no overflow, readable in light and dark, search and hover."""

import shutil

import builder
import pytest

from equipoise.deliver.report import render

pytestmark = pytest.mark.browser

CONTRAST = """() => {
  const parse = (text) => {
    const n = text.match(/[\\d.]+/g).map(Number);
    return n.length === 3 ? [...n, 1] : n;
  };
  const linear = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => c.slice(0, 3).map(linear)
    .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c[3] > 0.99) return c;
    }
    return [255, 255, 255, 1];
  };
  const bad = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, style = getComputedStyle(e);
    if (!walk.currentNode.data.trim() || !e.getClientRects().length) continue;
    if (["SCRIPT", "STYLE", "title", "desc"].includes(e.tagName)) continue;
    const svg = e.closest("svg"), ink = parse(svg ? style.fill : style.color);
    const under = e.matches(".on") ? getComputedStyle(e.previousElementSibling).fill : null;
    const on = under ? parse(under) : ground(svg ? svg.parentElement : e);
    const [a, b] = [light(ink), light(on)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    seen += 1;
    if (ratio < 4.5) bad.push([walk.currentNode.data.trim().slice(0, 40), ratio.toFixed(2)]);
  }
  return {seen, bad};
}"""


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    root = tmp_path_factory.mktemp("reports")
    made = {
        k: render(builder.write_comparison(root / k, f()), price_per_hour=0.4)[0]
        for k, f in builder.COMPARISONS.items()
    }
    made["run"] = render(builder.write_run(root / "run"))[0]
    return made


@pytest.fixture
def open_page(browser, reports):
    """Open a report; at the end, no message and no request but for the file itself."""
    contexts, troubles = [], []

    def opened(name, width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append("a dialog"), dialog.dismiss()))
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else troubles.append(r.url))
        page.goto(reports[name].as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert troubles == []


@pytest.mark.parametrize("name", [*builder.COMPARISONS, "run"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_fits_its_width(open_page, name, width):
    page = open_page(name, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("h1").is_visible()


@pytest.mark.parametrize("name", ["full", "diverged", "no_margin", "run"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast(open_page, name, scheme):
    page = open_page(name, scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true; })")
    found = page.evaluate(CONTRAST)
    assert found["seen"] > 80
    assert found["bad"] == []


def test_dark_is_dark(open_page):
    grounds = [
        open_page("full", scheme=s).evaluate("getComputedStyle(document.body).backgroundColor")
        for s in ("light", "dark")
    ]
    light, dark = (sum(map(int, g[4:-1].split(","))) for g in grounds)
    assert light > 700 and dark < 100


def test_letters_on_a_phone_are_not_tiny(open_page):
    page = open_page("full", 390)
    sizes = page.eval_on_selector_all(
        "main svg[role=img] text",
        "all => all.map((e) => parseFloat(getComputedStyle(e).fontSize)"
        " * e.ownerSVGElement.getBoundingClientRect().width / 480)",
    )
    assert min(sizes) >= 8.5


def test_search_finds_a_layer_by_name_and_reason(open_page):
    page = open_page("many_layers")
    page.fill("#q", "blocks.37.mlp.down")
    assert page.locator("#map > tbody > tr:visible").count() == 1
    assert page.inner_text("#hits") == "1 of 9"
    page.fill("#q", "look-up fp32")
    assert page.locator("#map > tbody > tr:visible").count() == 2
    page.fill("#q", "")
    assert page.locator("#map > tbody > tr:visible").count() == 9


def test_hovering_shows_the_values_of_all_arms(open_page):
    page = open_page("full")
    chart = page.locator("svg.lines").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + box["height"] * 0.5)
    lines = page.inner_text(".tip").split("\n")
    assert lines[0].startswith("step: ") and [x.split(":")[0] for x in lines[1:]] == [
        "FP32",
        "Plain autocast",
        "Plan",
    ]
    page.mouse.move(0, 0)
    assert page.locator(".tip").is_hidden()


def test_a_page_prints_with_every_layer(open_page):
    page = open_page("many_layers")
    page.emulate_media(media="print")
    assert len(page.pdf(format="A4")) > 20_000
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() > 0
