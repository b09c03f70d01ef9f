"""The page of `shardmuon plan --html`, as a reader meets it: `make docs DOCS=test`. It is opened as a file, without a
server, so that what it fetched would fail."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: run `make docs DOCS=test`")
if "CHROMIUM" not in os.environ:
    pytest.skip("needs Chromium: run `make docs DOCS=test`", allow_module_level=True)

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "img" / "plan.html"
SCREENSHOTS = ROOT / "build" / "screenshots"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox", "--disable-gpu"]
        )
        yield browser
        browser.close()


def open_page(browser: Browser, scheme: str, width: int = 1280) -> tuple[Page, list[str]]:
    """The page, and every address that it asked for."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(f"error: {error}"))
    page.goto(PAGE.as_uri())
    return page, asked


def test_it_needs_nothing_but_itself(browser: Browser) -> None:
    page, asked = open_page(browser, "light")
    assert [url for url in asked if not url.startswith("data:")] == [PAGE.as_uri()]
    assert page.locator("script, iframe, img, link[rel=stylesheet]").count() == 0
    page.close()


def test_it_says_what_a_step_takes_and_draws_it(browser: Browser) -> None:
    page, _ = open_page(browser, "light")
    assert re.fullmatch(r"[\d.,]+ \.\. [\d.,]+ (s|ms|us)", page.locator("#step").inner_text())
    for title in ("Plan", "Answers", "Ranks", "Assumptions"):
        assert page.get_by_role("heading", name=title, exact=True).count() == 1
    bars = page.locator("#timeline rect")
    phases = set(bars.evaluate_all("bars => bars.map(bar => bar.getAttribute('class'))"))
    assert {"pack", "gather", "orthogonalize", "scatter", "apply", "adamw"} <= phases
    drawn = page.locator("#timeline").bounding_box()
    for box in (bars.first.bounding_box(), bars.last.bounding_box()):
        assert drawn is not None and box is not None
        assert drawn["x"] <= box["x"] and box["x"] + box["width"] <= drawn["x"] + drawn["width"]
        assert box["width"] > 0 and box["height"] > 0
    page.close()


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_it_is_readable_in_either_scheme(browser: Browser, scheme: str) -> None:
    page, _ = open_page(browser, scheme)
    colours = page.evaluate("() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; }")
    text, paper = (_luminance(colour) for colour in colours)
    assert (max(text, paper) + 0.05) / (min(text, paper) + 0.05) >= 7.0  # WCAG's stricter contrast
    assert (paper > text) == (scheme == "light")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"plan_{scheme}.png", full_page=True)
    page.close()


def test_a_phone_scrolls_tables_not_the_page(browser: Browser) -> None:
    page, _ = open_page(browser, "light", width=390)
    assert page.evaluate("() => document.documentElement.scrollWidth <= window.innerWidth")
    page.close()


def _luminance(colour: str) -> float:
    """Luminance of "rgb(r, g, b)", by WCAG."""
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
