"""The engine loop: events in order, grammars awaited beside the steps, idle moments used, cancellations reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.engine.building import CountingRunner, make_request, make_scheduler
from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.engine.core import EngineCore
from tokenmill.engine.loop import EngineLoop
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


def nothing() -> None:
    pass


def make_loop(grammars: GrammarCompiler | None = None, **options: object) -> tuple[EngineLoop, Recorder]:
    core = EngineCore(make_scheduler(), CountingRunner())
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


def test_idle_moments_check_the_pages_then_do_their_work() -> None:
    left, done = [2], []

    def work() -> bool:
        done.append(loop.core.has_work)
        left[0] -= 1
        return left[0] >= 0

    loop, recorder = make_loop(idle_work=[work])
    request = make_request(5, "a", max_tokens=1)
    inbox = Script(lambda: loop.submit(request), *[nothing] * 6)
    loop.run(inbox)
    # Before the first step there is idle work; a step, the check of the pages, three pieces of work, then nothing.
    assert inbox.timeouts[0] is not None
    assert inbox.timeouts[1] == 0.0
    assert inbox.timeouts[-1] is None
    assert done == [False, False, False]
    assert [len(batch) for batch in recorder.batches] == [1, 0, 0]  # the step, the check, the end of the work
    left[0] = 0
    loop.submit(make_request(5, "b", max_tokens=1))
    loop.run(Script(*[nothing] * 4))
    assert len(done) == 4  # asked again after a step


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
    loop, recorder = make_loop()
    loop.submit(make_request(5, "a", max_tokens=1))
    loop.turn()
    assert recorder.core.stats.pages_consistent
    loop.core.scheduler.kv._pool._free.pop()
    loop.turn()
    assert not recorder.core.stats.pages_consistent
    assert "inconsistent" in caplog.text
    assert recorder.batches[-1] == []


def test_a_watchdog_sees_steps_only() -> None:
    loop, _ = make_loop()
    seen = []

    class Watching(CountingRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            seen.append(loop.step_began)
            return super().execute(plan)

    loop.core.runner = Watching()
    assert loop.step_began == 0.0
    loop.submit(make_request(5, "a", max_tokens=1))
    loop.drain()
    assert seen[0] > 0.0
    assert loop.step_began == 0.0
