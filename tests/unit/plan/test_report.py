"""The reports: self-contained, every plot there and drawn within its frame, texts escaped; also in a real browser."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.webdriver import chromium
from tests.unit.plan.questions import question
from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.search.answer import answer
from tokenmill.plan.search.html import write_plan_report
from tokenmill.plan.simulate.html import write_simulation_report

PLAN_CHARTS = {"memory", "step", "pareto", "cost", "ttft", "itl"}
SIMULATION_CHARTS = {"kv", "queue", "replicas", "ttft"}


@pytest.fixture(scope="module")
def plan_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    asked = question("llama-3.1-70b", "h100x8", load={"concurrency": 8})
    path = tmp_path_factory.mktemp("report") / "plan.html"
    write_plan_report(path, asked, answer(asked, load_catalog()))
    return path


@pytest.fixture(scope="module")
def simulation_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "simulation.html"
    write_simulation_report(path, "a <model> & its load", *simulated())
    return path


def simulated() -> tuple[dict[str, Any], dict[str, list[float]]]:
    percentiles = {"mean": 120.0, "p50": 100.0, "p90": 200.0, "p99": 400.0}
    seconds = [float(n) for n in range(1500)]
    replica = {"replica": 0, "pool": "", "requests": 9, "busy": 0.5, "preemptions": 1, "cache_hit_rate": 0.25}
    result = {
        "ttft_ms": percentiles, "itl_ms": percentiles, "tpot_ms": percentiles, "e2e_ms": percentiles,
        "throughput_tok_s": 512.0, "cache_hit_rate": 0.25, "requests": 300, "refused": 2, "duration_s": 1500.0,
        "preemptions": 7, "kv_use": {"mean": 0.4, "peak": 0.97}, "queue": {"mean": 1.2, "peak": 31},
        "goodput": {"share": 0.75}, "replicas": [replica],
    }  # fmt: skip
    series = {
        "seconds": seconds,
        "kv_use": [0.97 if n == 777 else (n % 500) / 1000 for n in range(1500)],
        "running": [n % 40 for n in seconds],
        "waiting": [31 if n == 900 else n % 3 for n in seconds],
        "replicas": [1.0 + n // 1000 for n in seconds],
        "arrival_seconds": seconds,
        "ttft_ms": [50.0 + n % 400 for n in seconds],
    }
    return result, series


def drawn(path: Path) -> set[str]:
    return set(re.findall(r'data-chart="([^"]+)"', path.read_text(encoding="utf-8")))


def test_the_plan_has_all_its_parts(plan_page: Path) -> None:
    text = plan_page.read_text(encoding="utf-8")
    assert drawn(plan_page) == PLAN_CHARTS
    for title in ("Why this plan", "Rejected plans", "Where the figures come from", "Decision guide", "promise 500 ms"):
        assert title in text
    assert "table scaled: ops measured on h200-sxm" in text
    assert "open-model host llama-3.1-70b $0.9" in text


@pytest.mark.parametrize("page", ["plan_page", "simulation_page"])
def test_nothing_comes_from_elsewhere(page: str, request: pytest.FixtureRequest) -> None:
    text = request.getfixturevalue(page).read_text(encoding="utf-8")
    assert not re.search(r"https?://|<script|<link|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


def test_the_simulation_keeps_its_peaks_and_escapes_its_title(simulation_page: Path) -> None:
    text = simulation_page.read_text(encoding="utf-8")
    assert drawn(simulation_page) == SIMULATION_CHARTS
    assert "a &lt;model&gt; &amp; its load" in text
    assert "75.0% of requests keep the promises" in text
    kv = re.search(r'data-chart="kv".*?<polyline class="curve"[^>]*points="([^"]+)"', text)
    assert kv is not None
    heights = [float(place.split(",")[1]) for place in kv[1].split()]
    assert len(heights) <= 500
    assert min(heights) < 40  # the one sample at 97 % is still there, near the top


def test_the_browser_shows_every_plot(plan_page: Path, simulation_page: Path) -> None:
    with chromium() as browser:
        for page, names in ((plan_page, PLAN_CHARTS), (simulation_page, SIMULATION_CHARTS)):
            browser.go(page.as_uri())
            for name in names:
                assert browser.shown(f'svg[data-chart="{name}"]')
                box = browser.run(
                    "const b = document.querySelector(arguments[0]).getBoundingClientRect();"
                    "return [b.width, b.height]", f'svg[data-chart="{name}"]')  # fmt: skip
                assert box[0] > 300
                assert box[1] > 40
            inside = "return [...document.querySelectorAll('polyline.curve')].every(l => l.getTotalLength() > 50)"
            assert browser.run(inside)
            wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert browser.run(wide)
            colors = set()
            for scheme in ("light", "dark"):
                browser.prefer(scheme)
                colors.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
                _save(browser.screenshot(), f"{page.stem}-{scheme}")
            assert len(colors) == 2
            assert browser.console() == []


def _save(picture: bytes, name: str) -> None:
    """For a person to look at, where one asked for it."""
    folder = os.environ.get("TOKENMILL_SCREENSHOTS")
    if folder:
        (Path(folder) / f"{name}.png").write_bytes(picture)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write"):
        write_simulation_report(tmp_path / "no" / "x.html", "t", *simulated())
