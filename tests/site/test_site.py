"""Tests of the built documentation site in a browser, run by `make docs DOCS=test`.

`make test` collects and skips these tests, because the browser's driver is in a separate environment without torch.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

pytest.importorskip("playwright.sync_api", reason="needs playwright: run `make docs DOCS=test`")
if "CHROMIUM" not in os.environ:
    pytest.skip("needs Chromium and the built site: run `make docs DOCS=test`", allow_module_level=True)

from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "build" / "site"
# The test opens the page plan.html as a local file, so any resource that the page fetched would fail to load.
PLAN = ROOT / "docs" / "img" / "plan.html"
PAGES = sorted(str(path.parent.relative_to(SITE)) for path in SITE.glob("**/index.html") if "adr" not in path.parts)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=quiet)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    yield page
    page.close()


def listen(page: Page) -> list[str]:
    """Return a list that collects the addresses that a page requests and the errors of its scripts."""
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: asked.append(f"error: {error}"))
    return asked


@pytest.mark.parametrize("where", PAGES)
def test_a_page_loads_all_that_it_names_and_nothing_from_elsewhere(page: Page, address: str, where: str) -> None:
    asked = listen(page)
    failed: list[str] = []
    page.on("requestfailed", lambda request: failed.append(request.url))
    page.on("response", lambda response: failed.append(response.url) if response.status >= 400 else None)
    page.goto(f"{address}/{where}/", wait_until="networkidle")
    assert page.locator("article h1").count() == 1
    assert failed + [each for each in asked if not each.startswith((address, "data:"))] == []
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")
    text = page.evaluate(
        "() => { const a = document.querySelector('article').cloneNode(true);"
        " a.querySelectorAll('pre, code').forEach(code => code.remove()); return a.textContent; }"
    )
    assert not re.search(r"--8<--|^:::|\.\. math::|\*\*[A-Za-z][^*\n]*\*\*", text, re.MULTILINE), (
        "markup that was not rendered"
    )


@pytest.mark.parametrize(
    ("words", "title"),
    [("round robin gradients", "DeepSpeed"), ("stochastic rounding", "Memory"), ("clip_grad_norm_", "Clipping")],
)
def test_search_finds_the_page(page: Page, address: str, words: str, title: str) -> None:
    page.goto(address)
    page.locator(".md-search__input").press_sequentially(words)
    results = page.locator(".md-search-result__item")
    # Search results appear one by one, so wait until the expected page is in the list.
    page_of_it = results.filter(has=page.locator("h1", has_text=title))
    expect(page_of_it.first).to_be_visible(timeout=15_000)


def test_navigation_leads_to_every_page(page: Page, address: str) -> None:
    page.goto(address)
    links = page.locator(".md-nav--primary a.md-nav__link[href]")
    targets = {links.nth(i).evaluate("link => link.pathname").strip("/") or "." for i in range(links.count())}
    assert set(PAGES) <= targets
    page.locator(".md-nav--primary a.md-nav__link", has_text="Which parameters").first.click()
    expect(page.locator("article h1")).to_contain_text("Which parameters")
    page.locator(".md-footer__link--next").click()
    expect(page.locator("article h1")).to_contain_text("Options")


@pytest.mark.parametrize("where", [*PAGES, PLAN.as_uri()])
def test_on_a_phone_no_page_is_wider_than_the_screen(page: Page, address: str, where: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(where if where == PLAN.as_uri() else f"{address}/{where}/")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_api_page_documents_every_public_name(page: Page, address: str) -> None:
    page.goto(f"{address}/api/")
    text = page.locator("article").inner_text()
    exported = re.findall(r"import \w+ as ([A-Za-z]\w*)", (ROOT / "src/shardmuon/__init__.py").read_text())
    assert not [name for name in exported if name != "frameworks" and name not in text]
    for part in ("Parameters", "Raises", "Returns"):
        assert part in text


# ------------------------------------------------------------------- the page of `shardmuon plan --html`, a file


def test_the_page_of_a_plan_needs_nothing_but_itself_says_what_a_step_takes_and_draws_it(page: Page) -> None:
    asked = listen(page)
    page.goto(PLAN.as_uri())
    assert [url for url in asked if not url.startswith("data:")] == [PLAN.as_uri()]
    assert page.locator("script, iframe, img, link[rel=stylesheet]").count() == 0
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


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_page_of_a_plan_is_readable_in_either_scheme(page: Page, scheme: Literal["light", "dark"]) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto(PLAN.as_uri())
    colours = page.evaluate("() => { const s = getComputedStyle(document.body); return [s.color, s.backgroundColor]; }")
    text, paper = (_luminance(colour) for colour in colours)
    # WCAG level AAA requires a contrast ratio of at least 7:1.
    assert (max(text, paper) + 0.05) / (min(text, paper) + 0.05) >= 7.0
    assert (paper > text) == (scheme == "light")


def _luminance(colour: str) -> float:
    """Return the luminance of a color "rgb(r, g, b)", as WCAG defines it."""
    parts = [int(value) / 255 for value in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
