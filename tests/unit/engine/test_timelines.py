"""When prompts waited and were computed: chunk by chunk, once, and nothing is kept of requests that are gone."""

from __future__ import annotations

import pytest

from tokenmill.engine import messages
from tokenmill.engine.messages import Events
from tokenmill.engine.timelines import _MAX_CHUNKS, Timelines
from tokenmill.timeline import Timeline
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan, TokenEvent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def _request(name: str, length: int = 8) -> Request:
    return Request(name, [1] * length, SamplingParams())


def _row(request: Request, start: int, count: int, samples: bool) -> ScheduledTokens:
    return ScheduledTokens(request, start, count, (), samples)


def _line(request: Request) -> Timeline:
    assert request.timeline is not None
    return request.timeline


def test_each_chunk_is_listed_until_the_first_token() -> None:
    clock = Clock()
    lines = Timelines(clock)
    one, other = _request("one"), _request("other")
    lines.open(one)
    clock.now = 101.0
    lines.open(other)
    clock.now = 103.0
    lines.record(StepPlan([_row(one, 0, 5, False)]), 0.5)
    clock.now = 104.0
    lines.record(StepPlan([_row(one, 5, 3, True), _row(other, 0, 4, False)]), 0.25)
    lines.record(StepPlan([_row(one, 8, 1, True), _row(other, 4, 4, True)]), 0.25)
    assert _line(one).queued == 100.0
    assert [(each.began, each.ended, each.start, each.count, each.num_rows) for each in _line(one).chunks] == [
        (102.5, 103.0, 0, 5, 1),
        (103.75, 104.0, 5, 3, 2),
    ]
    assert [(each.start, each.count) for each in _line(other).chunks] == [(0, 4), (4, 4)]
    assert len(lines) == 0


def test_many_chunks_become_one() -> None:
    lines, request = Timelines(), _request("long", 1000)
    lines.open(request)
    for number in range(100):
        lines.record(StepPlan([_row(request, number * 10, 10, number == 99)]), 0.0)
    line = _line(request)
    assert (len(line.chunks), line.num_chunks) == (_MAX_CHUNKS, 100)
    assert line.chunks[-1].start + line.chunks[-1].count == 1000
    assert sum(chunk.count for chunk in line.chunks) == 1000


def test_a_cancelled_request_leaves_nothing() -> None:
    lines, request = Timelines(), _request("gone")
    lines.open(request)
    lines.forget("gone")
    lines.forget("gone")
    assert len(lines) == 0


def test_the_first_and_the_last_event_carry_it() -> None:
    request = _request("r")
    Timelines().open(request)
    request.num_preemptions = 2
    event = TokenEvent("r", token_ids=[1])
    event.report(request)
    received = messages.decode_from_engine(messages.encode(Events([event])))
    assert isinstance(received, Events)
    line = received.events[0].timeline
    assert line is not None
    assert line.num_preemptions == 2
    assert line.queued == pytest.approx(_line(request).queued)
