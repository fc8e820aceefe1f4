"""The queue and the step of an encoder: tokens of a step, order, cancellation, what is counted; through the loop."""

from __future__ import annotations

from tokenmill.engine.embedding.core import EncoderCore, TokenMeter
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.order import DISCIPLINES
from tokenmill.types import Request, SamplingParams, TokenEvent

_PARAMS = SamplingParams(max_tokens=1, temperature=0.0)


class Lengths:
    """The vector of a request is its length; remembers what was computed together."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def compute(self, requests: list[Request]) -> list[list[float]]:
        self.steps.append([request.request_id for request in requests])
        return [[float(len(request.prompt_ids))] for request in requests]


class Heard:
    def __init__(self) -> None:
        self.events: list[TokenEvent] = []
        self.refused: list[str] = []

    def on_events(self, events: list[TokenEvent]) -> None:
        self.events += events

    def on_refused(self, request_id: str, _error: Exception) -> None:
        self.refused.append(request_id)


def _core(batch_tokens: int = 10, rows: int = 100, scheduling: str = "fcfs") -> tuple[EncoderCore, Lengths]:
    runner = Lengths()
    return EncoderCore(runner, DISCIPLINES.get(scheduling)(0.0), batch_tokens, rows), runner


def _add(core: EncoderCore | EngineLoop, name: str, length: int, arrival: int, **fields: object) -> None:
    request = Request(name, [1] * length, _PARAMS, arrival=arrival, embeds=True, **fields)  # type: ignore[arg-type]
    (core.submit if isinstance(core, EngineLoop) else core.add)(request)


def test_steps_hold_so_many_tokens_and_a_longer_text_alone() -> None:
    core, runner = _core()
    for number, length in enumerate([4, 5, 2, 30, 1]):
        _add(core, str(number), length, number)
    events = [event for _ in range(4) for event in core.step()]
    assert runner.steps == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [event.embedding for event in events] == [[4.0], [5.0], [2.0], [30.0], [1.0]]
    assert all(event.finish_reason == "stop" and not event.token_ids for event in events)
    assert not core.has_work
    assert core.step() == []
    assert core.stats.num_tokens_computed == 42
    assert core.stats.num_finished == 5


def test_rows_of_a_step_are_bounded() -> None:
    core, runner = _core(rows=2)
    for number in range(3):
        _add(core, str(number), 1, number)
    core.step()
    assert runner.steps == [["0", "1"]]
    assert core.stats.num_waiting == 1


def test_priority_comes_first_and_a_cancelled_request_is_never_computed() -> None:
    core, runner = _core(scheduling="priority")
    _add(core, "late", 1, 0, priority=5)
    _add(core, "gone", 1, 1)
    _add(core, "first", 1, 2, priority=-1)
    assert core.cancel("gone")
    assert not core.cancel("gone")
    assert not core.knows("gone")
    core.step()
    assert runner.steps == [["first", "late"]]


def test_tenants_share_the_steps() -> None:
    core, runner = _core(batch_tokens=4, scheduling="fair")
    for number in range(8):
        _add(core, f"a{number}", 2, number, tenant="a")
    _add(core, "b", 2, 9, tenant="b")
    core.step()
    core.step()
    assert "b" in [name for step in runner.steps for name in step]


def test_the_loop_drives_it_and_drops_what_is_late() -> None:
    core, runner = _core()
    heard = Heard()
    now = 100.0
    loop = EngineLoop(core, heard, clock=lambda: now)
    _add(loop, "in time", 3, 0, deadline=101.0)
    _add(loop, "late", 3, 1, deadline=99.0)
    loop.drain()
    assert [event.request_id for event in heard.events] == ["in time"]
    assert heard.refused == ["late"]
    assert runner.steps == [["in time"]]


def test_device_time_is_divided_by_tokens() -> None:
    core, _ = _core()
    core.meter = TokenMeter()
    _add(core, "0", 6, 0, tenant="a")
    _add(core, "1", 2, 1, tenant="b")
    events = core.step()
    shares = core.meter.take()
    assert abs(shares["a"] - 3 * shares["b"]) < 1e-12
    assert [event.device_seconds for event in events] == [shares["a"], shares["b"]]
    assert core.meter.take() == {}
