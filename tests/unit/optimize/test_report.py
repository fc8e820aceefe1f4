"""The report of every kind of outcome: well-formed HTML, every figure, nothing from the net, hostile names inert."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.unit.optimize import outcomes
from tokenmill.optimize.report import render_report
from tokenmill.optimize.report.candidates import prediction_error
from tokenmill.optimize.report.latency import objective_limits
from tokenmill.optimize.results import Outcome
from tokenmill.optimize.wording import not_shown

_VOID = {"meta", "br", "hr", "img", "input", "link"}
_HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class _Page(HTMLParser):
    """Checks that elements nest, and keeps the text, the tags and the charts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.charts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.charts += [value or "" for name, value in attrs if name == "data-chart"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.mark.parametrize("make", outcomes.ALL)
def test_it_is_one_well_formed_page_without_anything_from_the_net(make: Callable[[], Outcome]) -> None:
    text = render_report(make())
    page = _Page(text)
    assert text.startswith("<!doctype html>")
    assert page.tags.count("h1") == 1
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\(", text)
    assert ("name", "viewport") in page.attributes
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert "nan" not in page.text.lower().split()


def test_both_savings_with_intervals_come_first() -> None:
    text = _Page(render_report(outcomes.cpu_without_objectives())).text
    title = (
        "smollm2: 17% cheaper than today (12% to 22%), 60% cheaper than unquantized (58% to 62%); "
        "the source is already quantized"
    )
    assert text.startswith(title)
    table = text[text.index("Against what is saved") :]
    assert table.index("stored on tokenmill, already quantized") < table.index("F16, expanded")


def test_every_figure_of_a_run_with_objectives_is_there() -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    page = _Page(render_report(outcome))
    expected = [
        "32%", "36%", "ttft p95=500ms, itl p95=40ms", "+0.30% (+0.10% to +0.50%)", "0.0120", "96.4%", "14,000.0",
        "98.0%", "61.2%", "61.8%", "-0.6 (-2.1 to +0.8)", "0.43", "repetition", "0.021", "valid JSON",
        "mean divergence at most 0.05", "Cheapest on this machine: vllm 0.32 fp8, not tokenmill",
        "task humaneval loses 4.1 points, more than 2.0",
        "killed after 120 s: it hung", "not installed", "tokenmill serve cheaper/model --config cheaper/serve.yaml",
        "vllm serve cheaper/model", "kv-cache-dtype: fp8", "kind: Deployment", "NVIDIA H200", "torch 2.11.0",
        "2026-11-16", "240 requests at 12 a second", "p95 limit 500 ms", "tokenmill optimize smollm2 --out cheaper",
    ]  # fmt: skip
    assert [each for each in expected if each not in page.text] == []
    assert {"ttft", "itl", "pareto", "predicted", "layers"} <= set(page.charts)
    for each in outcome.candidates:
        assert each.name in page.text
        error = prediction_error(each)
        assert error is None or f"{error:+.0%}" in page.text


def test_curves_show_today_the_baseline_the_chosen_and_a_better_rival() -> None:
    text = render_report(outcomes.gpu_with_a_rival_that_wins())
    chart = text[text.index('data-chart="ttft"') :].split("</svg>")[0]
    assert chart.count('class="curve"') == 4
    points = re.findall(r'class="curve"[^>]*points="([^"]+)"', chart)
    assert {len(each.split()) for each in points} == {21}


def test_latencies_at_different_rates_are_said_to_be_that() -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    assert outcome.chosen is not None
    assert outcome.chosen.latency is not None
    outcome.chosen.latency = replace(outcome.chosen.latency, offered_requests_s=31.0)
    text = _Page(render_report(outcome)).text
    assert "no rate was given: each at the highest that it sustains" in text
    assert f"chosen: {outcome.chosen.name} 31" in text
    assert "under the same arrivals" not in text


def test_four_percentiles_make_a_curve_where_the_whole_one_was_not_kept() -> None:
    outcome = outcomes.quality_off()
    short = outcomes.latency(300, 21, 8000)
    assert outcome.chosen is not None
    outcome.chosen.latency = type(short)(**{name: getattr(short, name) for name in short.__slots__[:12]})
    chart = render_report(outcome).split('data-chart="ttft"')[1].split("</svg>")[0]
    lengths = [len(each.split()) for each in re.findall(r'class="curve"[^>]*points="([^"]+)"', chart)]
    assert sorted(lengths) == [4, 21]


def test_it_says_what_it_does_not_show() -> None:
    unsettled = outcomes.cpu_without_objectives()
    unsettled.margin = 0.023
    assert any("Another finalist may be up to 2.3% cheaper" in each for each in not_shown(unsettled))
    assert any("--quality off" in each for each in not_shown(outcomes.quality_off()))
    shown = " ".join(not_shown(outcomes.cpu_without_objectives()))
    assert "No latency objective was given" in shown
    assert "No task was given" in shown
    assert "already quantized" in shown
    assert "not proven: Q3_K_S" in shown
    stopped = _Page(render_report(outcomes.interrupted())).text
    assert "This run is interrupted: repeat the command to continue it." in stopped
    assert "What is served today was not measured" in stopped


def test_hostile_names_stay_text() -> None:
    outcome = outcomes.gpu_with_a_rival_that_wins()
    clean = _Page(render_report(outcome)).tags
    for name in (
        "model",
        "source",
        "machine",
        "workload_words",
        "price_basis",
        "reason",
        "quality_text",
        "source_note",
    ):
        setattr(outcome, name, _HOSTILE)
    for each in (*outcome.candidates, *outcome.rivals, outcome.today, outcome.baseline):
        assert each is not None
        each.name = each.weights = each.reason = each.kv = each.verdict = _HOSTILE
    outcome.commands, outcome.unproven = [_HOSTILE], [_HOSTILE]
    outcome.launch_lines, outcome.files = {_HOSTILE: _HOSTILE}, {_HOSTILE: _HOSTILE, "serve.yaml": _HOSTILE}
    outcome.versions = {_HOSTILE: _HOSTILE}
    outcome.objectives += _HOSTILE
    page = _Page(render_report(outcome))
    assert not {"script", "img"} & set(page.tags)
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert "<script>alert(1)</script>" in page.text  # shown, not run
    assert set(page.tags) <= set(clean) | {"p"}


def test_objectives_become_limits_of_the_curves() -> None:
    words = "ttft p95=500ms, itl p99.9=0.04s, ttft p50=1.5s"
    assert objective_limits(words, "ttft") == [(500.0, "p95 limit 500 ms"), (1500.0, "p50 limit 1500 ms")]
    assert objective_limits(words, "itl") == [(40.0, "p99.9 limit 40 ms")]
    assert objective_limits("", "itl") == []
