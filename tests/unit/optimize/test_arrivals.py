"""Arrivals of a replay: which part of a trace, at which rate, with which shared tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tokenmill.bench.trace_rows import Row
from tokenmill.checkpoint.number_tokenizer import numbering_tokenizer
from tokenmill.errors import UserError
from tokenmill.optimize.arrivals import Arrivals, ReplayLimits, busiest_window
from tokenmill.optimize.traffic import TrafficRequest, build_arrivals, build_traffic


def _trace(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _mooncake(seconds: float, prompt: int, output: int, blocks: list[int]) -> dict[str, Any]:
    return {"timestamp": 1000 * seconds, "input_length": prompt, "output_length": output, "hash_ids": blocks}


def _shared(first: Any, second: Any) -> int:
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def test_the_window_with_the_most_tokens_is_taken_and_the_first_of_equal_ones() -> None:
    assert busiest_window([0, 1, 2, 10, 11, 20, 21], [1, 1, 1, 5, 5, 5, 5], 2) == (3, 5)
    assert busiest_window([0, 10], [3, 3], 1) == (0, 1)
    assert busiest_window([0, 1, 2], [1, 1, 1], 100) == (0, 3)
    assert busiest_window([0, 0, 0], [1, 1, 1], 0) == (0, 3)


def test_a_trace_is_cut_to_its_busiest_window_and_says_so(tmp_path: Path) -> None:
    rows = [_mooncake(10 * n, 20, 4, []) for n in range(10)] + [_mooncake(50 + n, 20, 4, []) for n in range(1, 5)]
    path = _trace(tmp_path / "t.jsonl", sorted(rows, key=lambda row: row["timestamp"]))
    arrivals = Arrivals.from_trace(path, 100, ReplayLimits(seconds=4))
    assert arrivals.times_s == (0, 1, 2, 3, 4)
    assert "5 requests of t.jsonl: the busiest 4 s of 90 s" in arrivals.words
    whole = Arrivals.from_trace(path, 100, ReplayLimits(seconds=1000))
    assert len(whole) == 14
    assert "busiest" not in whole.words


def test_a_lower_rate_covers_less_of_the_trace_in_the_same_time(tmp_path: Path) -> None:
    path = _trace(tmp_path / "t.jsonl", [_mooncake(n, 20, 4, []) for n in range(100)])
    slow = Arrivals.from_trace(path, 100, ReplayLimits(seconds=20, rate_scale=0.25))
    assert slow.times_s == (0, 4, 8, 12, 16, 20)
    assert "0.25 x its rate" in slow.words
    assert slow.requests_s == pytest.approx(0.25)


def test_prompts_share_exactly_the_blocks_of_the_trace(tmp_path: Path) -> None:
    rows = [_mooncake(0, 1100, 4, [7, 8, 9]), _mooncake(1, 1024, 9, [7, 5]), _mooncake(2, 600, 1, [])]
    path = _trace(tmp_path / "t.jsonl", rows)
    first, second, third = Arrivals.from_trace(path, 30_000, ReplayLimits()).prompts
    assert _shared(first, second) == 512
    assert _shared(first, third) == 0
    assert [len(first), len(second), len(third)] == [1100, 1024, 600]
    again = Arrivals.from_trace(path, 30_000, ReplayLimits())
    assert again.prompts[0] == first


def test_a_trace_without_times_is_sent_at_the_rate_stated(tmp_path: Path) -> None:
    path = _trace(tmp_path / "t.jsonl", [{"input_length": 10, "output_length": 2}] * 50)
    drawn = Arrivals.from_trace(path, 100, ReplayLimits(seconds=100), rate=5.0)
    assert len(drawn) == 50
    assert drawn.duration_s < 10
    assert drawn.has_rate


def test_traffic_without_a_rate_says_that_one_is_searched(tmp_path: Path) -> None:
    lengths = _trace(tmp_path / "t.jsonl", [{"input_length": 10, "output_length": 2}] * 50)
    prompts = _trace(tmp_path / "p.jsonl", [{"prompt": "one two"}])
    timed = _trace(tmp_path / "m.jsonl", [_mooncake(n, 40, 4, [n % 2]) for n in range(6)])
    for request in (TrafficRequest(trace=lengths), TrafficRequest(prompts=prompts), TrafficRequest(input_len=8)):
        arrivals = build_arrivals(request, 100, 4096)
        assert not arrivals.has_rate
        assert not arrivals.at_rate(2.0).lasting(3.0).has_rate
        assert "at the highest rate that keeps the objectives" in arrivals.words
        assert arrivals.at_once(4).has_rate, "all at the start is a rate"
        assert build_arrivals(replace(request, rate=3.0), 100, 4096).has_rate
    assert build_arrivals(TrafficRequest(trace=timed), 100, 4096).has_rate


def test_few_requests_beyond_the_context_are_left_out_and_many_refused() -> None:
    rows: list[Row] = [(float(n), 500 if n == 7 else 20, 4, []) for n in range(40)]
    arrivals = Arrivals.from_rows(rows, 512, "t", 100, ReplayLimits(seconds=100, context=64))
    assert len(arrivals) == 39
    assert "1 too long left out" in arrivals.words
    with pytest.raises(UserError, match="--length-scale"):
        Arrivals.from_rows([(0.0, 500, 4, [])] * 3, 512, "t", 100, ReplayLimits(context=64))
    halved = Arrivals.from_rows([(0.0, 500, 4, [])], 512, "t", 100, ReplayLimits(context=64, length_scale=0.1))
    assert len(halved.prompts[0]) == 50


def test_another_rate_keeps_the_requests() -> None:
    base = Arrivals((0.0, 2.0, 4.0), ([1, 2], [1, 3], [4, 5]), (1, 2, 3), "three")
    fast = base.at_rate(2.0)
    assert fast.times_s == (0, 1, 2)
    assert fast.prompts == base.prompts
    assert "2 x" in fast.words
    assert base.at_rate(1.0) is base


def test_variations_keep_what_is_shared_within_and_share_nothing_between() -> None:
    base = Arrivals((0.0, 1.0), ([1, 2, 3, 9], [1, 2, 8]), (1, 1), "two", vocab_size=1000)
    for number in (1, 2, 1 << 20):
        first, second = base.variation(number).prompts
        assert _shared(first, second) == 2
        assert all(ours != theirs for ours, theirs in zip(first, base.prompts[0], strict=True))
        assert all(0 <= token_id < 1000 for token_id in [*first, *second])
    texts = Arrivals((0.0,), ("a story",), (1,), "text")
    assert texts.variation(3).prompts != texts.prompts
    assert "a story" in texts.variation(3).prompts[0]


def test_arrivals_are_repeated_or_cut_to_last() -> None:
    base = Arrivals((0.0, 1.0, 2.0), ([1], [2], [3]), (1, 2, 3), "three", vocab_size=50)
    longer = base.lasting(7.0)
    assert longer.times_s == (0, 1, 2, 3, 4, 5, 6, 7)
    assert longer.output_lens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert longer.prompts[3] != base.prompts[0]
    assert base.lasting(1.5).times_s == (0, 1)
    assert base.lasting(0.0001).times_s == (0,)


def test_poisson_arrivals_repeat_and_have_the_rate_asked_for() -> None:
    prompts = [[n] for n in range(400)]
    arrivals = Arrivals.poisson(prompts, [1] * 400, 8.0)
    assert arrivals == Arrivals.poisson(prompts, [1] * 400, 8.0)
    assert arrivals.duration_s == pytest.approx(50.0)
    for rate in (0.0, -1.0, float("inf")):
        with pytest.raises(UserError, match="--rate"):
            Arrivals.poisson(prompts, [1] * 400, rate)


@pytest.mark.parametrize("name", ["seconds", "rate_scale", "length_scale"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(UserError, match=name.replace("_", "-")):
        ReplayLimits(**{name: 0.0})


def test_the_workload_options_give_the_same_requests_with_and_without_times(tmp_path: Path) -> None:
    path = _trace(tmp_path / "t.jsonl", [_mooncake(n, 40, 4, [n % 2]) for n in range(6)])
    tokenizer = numbering_tokenizer(100)
    request = TrafficRequest(trace=path)
    traffic, arrivals = build_traffic(request, 100, tokenizer, 4096), build_arrivals(request, 100, 4096)
    assert [each.prompt_ids for each in traffic.draw(6, 0)] == list(arrivals.prompts)
    drawn = build_arrivals(TrafficRequest(input_len=8, output_len=3, rate=2.0, replay_seconds=10), 100, 64)
    assert {len(prompt) for prompt in drawn.prompts} == {8}
    assert set(drawn.output_lens) == {3}
    assert len(drawn) == 20
    prompts = _trace(tmp_path / "p.jsonl", [{"prompt": "one two"}, {"prompt": [4, 5], "output_tokens": 2}])
    from_file = build_arrivals(TrafficRequest(prompts=prompts, rate=4.0, replay_seconds=0.5), 100, 64)
    assert from_file.prompts == ("one two", [4, 5])
    assert from_file.output_lens == (64, 2)
    with pytest.raises(UserError, match="--prompts and --trace"):
        TrafficRequest(prompts=prompts, trace=path)
