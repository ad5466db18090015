"""Pictures of a report, to look at: light, dark, phone.

    python tests/deliver/shoot.py REPORT.html OUT_DIRECTORY

``REPORT.html`` may be ``example``: the page of the tests' three-armed comparison, whose figures are made up.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import builder
from PIL import Image
from playwright.sync_api import sync_playwright

from equipoise.deliver.report import render

SHOTS = {"light": (1280, 1), "dark": (1280, 1), "phone": (390, 2)}
"""Name -> width and pixels a unit; the phone is light."""


def shoot(report: Path, out: Path) -> None:
    """Write ``report-light.png`` and ``-dark`` (whole page), ``-phone`` and ``-top`` (one screen)."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for name, (width, scale) in SHOTS.items():
            page = browser.new_page(
                viewport={"width": width, "height": 840},
                device_scale_factor=scale,
                color_scheme="dark" if name == "dark" else "light",
            )
            page.goto(report.resolve().as_uri())
            page.screenshot(path=out / f"report-{name}.png", full_page=name != "phone")
            _shrink(out / f"report-{name}.png")
            if name == "light":
                page.screenshot(path=out / "report-top.png")
                _shrink(out / "report-top.png")
        browser.close()


def _shrink(picture: Path) -> None:
    with Image.open(picture) as image:
        image.convert("RGB").save(picture, optimize=True)


if __name__ == "__main__":
    source, target = sys.argv[1:]
    if source == "example":
        with tempfile.TemporaryDirectory() as folder:
            shoot(render(builder.write_comparison(Path(folder), builder.comparison()))[0], Path(target))
    else:
        shoot(Path(source), Path(target))
