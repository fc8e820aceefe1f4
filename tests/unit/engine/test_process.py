"""What the engine process sends: tokens at once, statistics now and then, and always when they tell something new."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.unit.engine.building import CountingRunner, make_request, make_scheduler
from tests.unit.engine.test_loop import Clock
from tokenmill.engine import messages, process
from tokenmill.engine.activity import Activity
from tokenmill.engine.core import EngineCore
from tokenmill.engine.messages import Cancel, Events, FromEngine, Ping, Pong, Refused, Submit, ToEngine
from tokenmill.engine.process import EngineProcess


class Socket:
    """Both ends of one direction, in memory."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.timeouts: list[int] = []

    def send(self, data: bytes) -> None:
        self.queue.append(data)

    def recv(self) -> bytes:
        return self.queue.popleft()

    def poll(self, timeout: int) -> int:
        self.timeouts.append(timeout)
        return len(self.queue)

    def getsockopt(self, _option: int) -> int:
        return zmq.POLLIN if self.queue else 0


class Engine:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = Clock()
        monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=self.clock))
        self.inbox, self.outbox = Socket(), Socket()
        parts: Any = SimpleNamespace(
            core=EngineCore(make_scheduler(), CountingRunner()),
            grammars=None,
            adapters=None,
            idle_work=(),
            config=SimpleNamespace(context=64),
            description=SimpleNamespace(vocab_size=1000),
        )
        self.process = EngineProcess(parts, self.inbox, self.outbox, Activity())  # type: ignore[arg-type]

    def tell(self, *told: ToEngine) -> None:
        for message in told:
            self.inbox.send(messages.encode(message))
        self.process.receive(0.0)

    def step(self, seconds: float = 0.001) -> None:
        self.clock.advance(seconds)
        self.process.loop.turn()

    def news(self) -> list[FromEngine]:
        sent = [messages.decode_from_engine(data) for data in self.outbox.queue]
        self.outbox.queue.clear()
        return sent

    def stats_sent(self) -> list[bool]:
        return [each.stats is not None for each in self.news() if isinstance(each, Events)]


def test_statistics_come_now_and_then_while_tokens_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.tell(Submit.of(make_request(5, "a", max_tokens=50)))
    engine.step()
    assert engine.stats_sent() == [True]
    for _ in range(20):  # 20 ms of decoding
        engine.step()
    assert engine.stats_sent() == [False] * 20
    engine.step(0.05)
    engine.step()
    assert engine.stats_sent() == [True, False]
    while engine.process.loop.has_work:
        engine.step()
    last = engine.news()[-1]
    assert isinstance(last, Events)
    assert last.stats is not None  # at the end nothing is left out
    assert (last.stats.num_tokens_sampled, last.stats.num_running, last.stats.num_pages_held) == (50, 0, 0)


def test_statistics_come_with_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.tell(Submit.of(make_request(5, "a", max_tokens=50)))
    engine.step()
    engine.tell(Submit.of(make_request([7] * 40, "b", max_tokens=2, arrival=1)))
    engine.step()
    sent = [each for each in engine.news() if isinstance(each, Events)]
    assert sent[-1].stats is not None  # the server learns the pace of prompts from it
    assert sent[-1].stats.step_tokens == 41


def test_a_cancellation_and_a_deadline_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.tell(Submit.of(make_request(5, "a", max_tokens=50)), Ping(3))
    engine.step()
    engine.tell(Cancel("a"))
    engine.step()
    first, *_, last = engine.news()
    assert first == Pong(3)
    assert isinstance(last, Events)
    assert last.events == []
    assert last.stats is not None
    assert last.stats.num_pages_held == 0
    engine.tell(Submit.of(make_request(5, "late", max_tokens=50, deadline=1.0)))
    engine.step()
    refused = engine.news()[0]
    assert isinstance(refused, Refused)
    assert (refused.request_id, refused.code) == ("late", "deadline")


def test_the_inbox_is_polled_only_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.process.receive(0.0)
    assert engine.inbox.timeouts == []
    engine.process.receive(0.0003)
    engine.process.receive(None)
    engine.process.receive(3600.0)  # never longer than a watchdog allows
    assert engine.inbox.timeouts == [1, 1000, 1000]
