"""Charts: well-formed SVG, ticks that can be read, labels that keep apart; tables, pages and the Pareto front."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

from tokenmill.report.canvas import Axis, nice_step, short
from tokenmill.report.charts import Bar, Curve, Point, bars, curves, scatter, stacked_bar
from tokenmill.report.page import Tile, render_page, section, table, tiles
from tokenmill.report.pareto import pareto_front


def test_marks_of_points_on_each_other_are_joined() -> None:
    points = [Point(1, 10, "red", "a", "1"), Point(1.001, 10, "red", "b", "2"), Point(9, 90, "red", "c", "3")]
    svg = scatter("pareto", "front", points, "x", "y", logarithmic=True)
    marks = re.findall(r'class="mark"[^>]*>([^<]+)<', svg)
    assert marks == ["1, 2", "3"]
    ElementTree.fromstring(svg)


def test_a_curve_of_one_value_can_be_drawn() -> None:
    svg = curves("one", "one", [Curve("a", [1], [5.0], low=[4.0], high=[6.0])], "x", "y", logarithmic=(False, True))
    assert "NaN" not in svg
    ElementTree.fromstring(svg)


def test_ticks() -> None:
    assert Axis("", 0, 100).ticks() == [0, 20, 40, 60, 80, 100]
    assert Axis("", 1, 1000, True).ticks() == [1, 10, 100, 1000]
    assert len(Axis("", 6, 14, True).ticks()) >= 3
    assert nice_step(0.03) == 0.05
    assert [short(value) for value in (0.5, 12000, 3e6)] == ["0.5", "12k", "3M"]
    assert Axis("", 0.0, 0.4, percent=True).text(0.25) == "25%"


def test_a_scatter_with_intervals_limit_and_diagonal() -> None:
    points = [
        Point(0.4, 0.01, "red", "a < b", "a < b", x_range=(0.3, 0.5), y_range=(-0.01, 0.03)),
        Point(1.0, 0.0, "blue", "far right", "baseline", ring=True),
    ]
    chart = scatter(
        "p", "cost & loss", points, "x", "y", percent=(True, True), limits=[(0.05, "limit 5%")], diagonal=True
    )
    root = ElementTree.fromstring(chart)
    kinds = [line.get("class") for line in root.iter("line")]
    assert kinds.count("error") == 2
    assert kinds.count("limit") == 2
    assert len([each for each in root.iter("circle") if each.get("class") != "ring"]) == 2
    texts = {each.text: each for each in root.iter("text")}
    assert texts["baseline"].get("text-anchor") == "end"  # it would leave the chart on the right
    assert texts["a < b"].get("text-anchor") == "start"
    assert "limit 5%" in texts


def test_the_front_is_joined_unless_it_is_too_long() -> None:
    points = [Point(float(x), float(20 - x), "red", "") for x in range(1, 15)]
    front = [(point.x, point.y) for point in points]
    assert 'class="front"' in scatter("p", "p", points, "x", "y", front=front[:3])
    assert 'class="front"' not in scatter("p", "p", points, "x", "y", front=front)


def test_bars_have_lengths_by_value() -> None:
    chart = bars("layers", "errors", [Bar("a & b", 4.0, text="4"), Bar("c", 1.0, text="1")])
    first, second = [float(rect.get("width", 0)) for rect in ElementTree.fromstring(chart).iter("rect")]
    assert abs(first / second - 4) < 0.01
    svg = stacked_bar("memory", "m", [Bar("weights", 30.0, 0), Bar("KV", 10.0, 1)], 50.0, "GiB", "50 GiB")
    widths = [float(each) for each in re.findall(r'<rect x="[^"]+" y="4" width="([^"]+)"', svg)]
    assert widths[1] > 2.9 * widths[2] > 0
    assert widths[0] > widths[1] + widths[2]


def test_tables_align_numbers_and_mark_a_row() -> None:
    text = table(["name", "ms", "share"], [["a", 1.5, "12%"], ["<b>", None, ""]], marked=1)
    assert text.count('<th class="number">') == 2
    assert '<tr class="marked"><td>&lt;b&gt;</td>' in text
    assert table(["name"], []) == ""
    assert section("empty", "") == ""


def test_a_page_is_whole_and_escaped() -> None:
    page = render_page("a <b>", "c & d", [tiles([Tile("1", "x", "good")])], badge=("fine", True), footer="end")
    assert "<title>a &lt;b&gt;</title>" in page
    assert "c &amp; d" in page
    assert "<style>:root" in page
    assert page.rstrip().endswith("</html>")


def test_pareto_front() -> None:
    points = {"a": (0.3, 0.02), "b": (0.4, 0.01), "c": (0.5, 0.015), "d": (0.6, 0.0), "e": (0.3, 0.02)}
    assert pareto_front(points, points.__getitem__) == ["a", "e", "b", "d"]
    assert pareto_front([], tuple) == []
