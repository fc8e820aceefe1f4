"""The notation of latency objectives."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.optimize.objectives import Objective, Objectives


@pytest.mark.parametrize(
    ("text", "percentile", "limit"),
    [
        ("p95=500ms", 95, 500),
        ("0.5s", 95, 500),
        ("40ms", 95, 40),
        ("p99.9 = 1.5 s", 99.9, 1500),
        ("P50=250us", 50, 0.25),
        ("p100=1m", 100, 60_000),
        (".5s", 95, 500),
    ],
)
def test_every_way_to_write_a_limit(text: str, percentile: float, limit: float) -> None:
    assert Objectives.parse([text], []).items == (Objective("ttft", percentile, limit),)


@pytest.mark.parametrize(
    "text", ["", "500", "p95", "p95=", "p95=ms", "fast", "p0=5ms", "p101=5ms", "0ms", "p95=-5ms", "p=5ms", "5 ms 6 ms"]
)
def test_what_is_no_limit_is_refused_by_the_flag_s_name(text: str) -> None:
    with pytest.raises(UserError, match="--itl"):
        Objectives.parse([], [text])


def test_words_are_what_the_user_would_write() -> None:
    stated = Objectives.parse(["p95=500ms", "p50=1.5s"], ["40ms"], ["p99=10s"])
    assert stated.words == "ttft p95=500ms, ttft p50=1.5s, itl p95=40ms, e2e p99=10s"
    again = Objectives.parse(["p95=500ms", "p50=1.5s"], ["p95=40ms"], ["p99=10s"])
    assert again == stated


def test_none_are_false_and_the_same_twice_is_one() -> None:
    assert not Objectives.parse([], [])
    assert not Objectives()
    assert Objectives().words == ""
    assert len(Objectives.parse(["500ms", "0.5s"], []).items) == 1


def test_two_limits_of_one_percentile_contradict_each_other() -> None:
    with pytest.raises(UserError, match="twice"):
        Objectives.parse(["p95=500ms", "p95=400ms"], [])
