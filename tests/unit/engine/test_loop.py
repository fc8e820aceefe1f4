"""The engine loop: events in order, grammars awaited beside the steps, idle moments used, cancellations reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.building import CountingRunner, make_request, make_scheduler
from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.engine.core import EngineCore
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.scheduler import Scheduler
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.types import StepPlan, StepResult, StructuredSpec, TokenEvent


class Recorder:
    """A listener that remembers, with the statistics of the moment."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.batches: list[list[TokenEvent]] = []
        self.refused: dict[str, str] = {}
        self.held: list[int] = []

    def on_events(self, events: list[TokenEvent]) -> None:
        self.batches.append(events)
        self.held.append(self.core.stats.num_pages_held)

    def on_refused(self, request_id: str, error: UserError) -> None:
        self.refused[request_id] = str(error)

    @property
    def tokens(self) -> list[int]:
        return [token for batch in self.batches for event in batch for token in event.token_ids]


class Script:
    """An inbox that makes one call per turn of the loop, then closes; remembers how long it was allowed to wait."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = list(calls)
        self.timeouts: list[float | None] = []

    @property
    def closed(self) -> bool:
        return not self._calls

    def receive(self, timeout: float | None) -> None:
        self.timeouts.append(timeout)
        self._calls.pop(0)()


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self._now = 1000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


def nothing() -> None:
    pass


def make_loop(
    grammars: GrammarCompiler | None = None, scheduler: Scheduler | None = None, **options: object
) -> tuple[EngineLoop, Recorder]:
    core = EngineCore(scheduler or make_scheduler(), CountingRunner())
    recorder = Recorder(core)
    return EngineLoop(core, recorder, grammars, **options), recorder  # type: ignore[arg-type]


def test_all_that_was_submitted_is_computed() -> None:
    loop, recorder = make_loop()
    loop.submit(make_request(5, "a", max_tokens=2))
    loop.submit(make_request(3, "b", max_tokens=1, arrival=1))
    assert loop.knows("a")
    loop.drain()
    assert recorder.tokens == [100, 101, 102]
    assert not loop.has_work
    assert not loop.knows("a")


def test_requests_wait_for_their_grammar_and_hold_nobody_up() -> None:
    loop, recorder = make_loop(GrammarCompiler(ByteTokens(), [ByteTokens.vocab_size - 1], seconds=20.0))
    for name, regex in (("good", "a+"), ("bad", "("), ("left", "b+")):
        loop.submit(make_request(3, name, max_tokens=1, structured=StructuredSpec("regex", regex)))
    loop.submit(make_request(3, "plain", max_tokens=1))
    assert loop.knows("left")
    assert loop.cancel("left")
    assert not loop.knows("left")
    loop.drain()
    assert {event.request_id for batch in recorder.batches for event in batch} == {"good", "plain"}
    assert list(recorder.refused) == ["bad"]
    assert "unclosed" in recorder.refused["bad"]


def test_idle_moments_do_their_work_then_check_the_pages() -> None:
    left, done = [2], []

    def work() -> bool:
        done.append(loop.core.has_work)
        left[0] -= 1
        return left[0] >= 0

    clock = Clock()
    loop, recorder = make_loop(idle_work=[work], clock=clock)
    request = make_request(5, "a", max_tokens=1)
    inbox = Script(lambda: loop.submit(request), *[nothing] * 5, lambda: clock.advance(0.3), nothing)
    loop.run(inbox)
    # Before the first step there is idle work; a step, three pieces of work, a while without any, the check, nothing.
    assert inbox.timeouts[0] is not None
    assert all(0.0 < timeout < 0.01 for timeout in inbox.timeouts[1:4])
    assert inbox.timeouts[5] == pytest.approx(0.2)
    assert inbox.timeouts[-1] is None
    assert done == [False, False, False]
    assert [len(batch) for batch in recorder.batches] == [1, 0, 0]  # the step, the end of the work, the check
    left[0] = 0
    loop.submit(make_request(5, "b", max_tokens=1))
    loop.run(Script(*[nothing] * 4))
    assert len(done) == 4  # asked again after a step


def test_pages_are_checked_rarely_and_never_before_tokens_are_sent() -> None:
    clock = Clock()
    loop, recorder = make_loop(clock=clock)
    kv, checks = loop.core.scheduler.kv, []
    check = kv.check

    def slow_check() -> None:
        checks.append(clock())
        clock.advance(0.1)  # many pages
        check()

    kv.check = slow_check  # type: ignore[method-assign]
    for number in range(50):  # a request that begins every 0.1 s: never idle for long
        loop.submit(make_request(5, f"r{number}", max_tokens=1, arrival=number))
        loop.turn()
        assert len(recorder.batches) == number + 1
        clock.advance(0.1)
        loop.turn()
    assert checks == []
    assert not recorder.core.stats.pages_checked
    clock.advance(0.2)
    loop.turn()
    assert len(checks) == 1
    assert recorder.core.stats.pages_checked
    for number in range(50, 60):  # idle between requests, but the check takes too long to come each time
        loop.submit(make_request(5, f"r{number}", max_tokens=1, arrival=number))
        loop.turn()
        clock.advance(0.5)
        loop.turn()
    assert len(checks) == 1
    clock.advance(10.0)
    loop.turn()
    assert len(checks) == 2


def test_a_request_past_its_deadline_is_dropped_before_it_is_computed() -> None:
    clock = Clock()
    loop, recorder = make_loop(clock=clock, scheduler=make_scheduler(max_running=1))
    loop.submit(make_request(5, "runs", max_tokens=40, deadline=clock() + 1.0))
    loop.submit(make_request([7] * 5, "waits", max_tokens=4, arrival=1, deadline=clock() + 2.0))
    loop.submit(make_request([8] * 5, "patient", max_tokens=1, arrival=2, deadline=clock() + 1e6))
    loop.turn()
    clock.advance(1.5)  # the first has begun to answer: its deadline is kept
    loop.turn()
    assert recorder.refused == {}
    clock.advance(1.0)
    loop.turn()
    assert list(recorder.refused) == ["waits"]
    assert "deadline" in recorder.refused["waits"]
    assert not loop.knows("waits")
    loop.drain()
    assert recorder.core.stats.num_expired == 1
    assert {event.request_id for batch in recorder.batches for event in batch} == {"runs", "patient"}
    assert len(loop._deadlines) == 0  # nothing of a finished request is kept until its deadline


def test_a_half_computed_prompt_past_its_deadline_gives_its_pages_back() -> None:
    clock = Clock()
    loop, recorder = make_loop(clock=clock, scheduler=make_scheduler(max_batch_tokens=4))
    loop.submit(make_request(20, "long", max_tokens=4, n=2, deadline=clock() + 1.0))
    loop.turn()
    assert loop.core.stats.num_pages_held > 0
    clock.advance(2.0)
    loop.turn()
    assert list(recorder.refused) == ["long"]
    assert not loop.has_work
    assert recorder.held[-1] == 0
    loop.core.scheduler.kv.check()


def test_a_deadline_passes_while_the_grammar_is_compiled() -> None:
    clock = Clock()
    loop, recorder = make_loop(GrammarCompiler(ByteTokens(), [ByteTokens.vocab_size - 1], seconds=20.0), clock=clock)
    spec = StructuredSpec("regex", "a+")
    loop.submit(make_request(3, "late", max_tokens=1, structured=spec, deadline=clock() + 1.0))
    clock.advance(2.0)
    loop.drain()
    assert list(recorder.refused) == ["late"]
    assert loop.core.stats.num_steps == 0


def test_a_cancelled_request_leaves_no_deadline() -> None:
    clock = Clock()
    loop, recorder = make_loop(clock=clock)
    loop.submit(make_request(5, "a", max_tokens=9, deadline=clock() + 1.0))
    loop.cancel("a")
    loop.submit(make_request(5, "a", max_tokens=1))  # the id is free again, and has no deadline now
    clock.advance(2.0)
    loop.drain()
    assert recorder.refused == {}
    assert len(recorder.tokens) == 1


def test_a_cancellation_is_reported_without_a_step() -> None:
    loop, recorder = make_loop()
    loop.submit(make_request(5, "a", max_tokens=9))
    loop.turn()
    assert recorder.held == [2]
    loop.cancel("a")
    assert not loop.cancel("a")
    loop.run(Script(nothing, nothing))
    assert recorder.held == [2, 0]


def test_pages_that_do_not_add_up_are_told(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    loop, recorder = make_loop(clock=clock)
    loop.submit(make_request(5, "a", max_tokens=1))
    loop.turn()
    assert recorder.core.stats.pages_consistent
    loop.core.scheduler.kv._pool._free.pop()
    clock.advance(1.0)
    loop.turn()
    assert not recorder.core.stats.pages_consistent
    assert "inconsistent" in caplog.text
    assert recorder.batches[-1] == []


def test_a_watchdog_sees_every_activity() -> None:
    seen: dict[str, tuple[float, float]] = {}  # activity: age and limit
    clock = Clock()

    def note() -> None:
        clock.advance(5.0)
        name, age, limit = loop.activity.read()
        seen[name] = (age, limit)

    class Watching(CountingRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            note()
            return super().execute(plan)

    def idle_work() -> bool:
        note()
        return False

    class Telling(Recorder):
        def on_events(self, events: list[TokenEvent]) -> None:
            note()
            super().on_events(events)

    core = EngineCore(make_scheduler(), Watching())
    loop = EngineLoop(core, Telling(core), idle_work=[idle_work], clock=clock)
    check = core.scheduler.kv.check

    def checked() -> None:
        note()
        check()

    core.scheduler.kv.check = checked  # type: ignore[method-assign]
    request = make_request(5, "a", max_tokens=1)
    loop.run(Script(lambda: (note(), loop.submit(request)), nothing, nothing, nothing))
    assert all(age == 5.0 for age, _ in seen.values())
    names = sorted(seen)
    assert [name for name in names if not name.startswith("idle work")] == [
        "a step",
        "checking pages",
        "sending events",
        "waiting for messages",
    ]
    idle = next(name for name in names if name.startswith("idle work"))
    assert "idle_work" in idle
    assert seen[idle][1] > 60.0  # it may capture a graph
    assert seen["a step"][1] == 0.0  # the server's stall timeout
