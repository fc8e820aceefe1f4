"""The report of `optimize` in a browser: on a phone and a desk, light, dark and printed. Skips without Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.webdriver import Browser, chromium
from tests.unit.optimize import outcomes
from tokenmill.optimize.report import render_report

_PHONE, _DESK = 360, 1280
_HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.mark.parametrize("make", outcomes.ALL, ids=lambda make: make.__name__)
@pytest.mark.parametrize("width", [_PHONE, _DESK])
def test_it_fits_the_screen(browser: Browser, tmp_path: Path, make: object, width: int) -> None:
    assert callable(make)
    page = tmp_path / "report.html"
    page.write_text(render_report(make()), encoding="utf-8")
    browser.resize(width, 800)
    browser.go(page.as_uri())
    assert browser.run("return window.innerWidth") == width
    assert browser.run("return document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    charts = browser.run(
        "return [...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect()).map(b => [b.left, b.right])"
    )
    assert all(0 <= left < right <= width for left, right in charts)
    assert browser.console() == []
    if saved := os.environ.get("TOKENMILL_SCREENSHOTS"):
        (Path(saved) / f"optimize-{make.__name__}-{width}.png").write_bytes(browser.screenshot())


def test_dark_and_print_have_their_own_colours(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(outcomes.cpu_without_objectives()), encoding="utf-8")
    browser.go(page.as_uri())
    color = "return getComputedStyle(document.body).backgroundColor"
    try:
        browser.prefer("dark")
        dark = browser.run(color)
        browser.prefer("dark", medium="print")
        assert browser.run(color) == "rgb(255, 255, 255)", "paper is white whatever the screen is"
        browser.prefer("light")
        assert browser.run(color) != dark
    finally:
        browser.prefer("light")


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    outcome.model = outcome.source = _HOSTILE
    for each in outcome.candidates:
        each.name = each.reason = _HOSTILE
    page = tmp_path / "report.html"
    page.write_text(render_report(outcome), encoding="utf-8")
    browser.go(page.as_uri())
    assert browser.run("return document.title") != "taken"
    assert browser.run("return document.querySelectorAll('script, img').length") == 0
    assert browser.text("#chosen") == _HOSTILE
