"""The log of engine steps: what a step held, how long it counts, and that it never disturbs the engine."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.step_log import SERVER_FILE, STEPS_FILE, StepLog, log_steps_to
from tokenmill.plan.simulate.logged_server import read_server
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan, StepResult


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A runner that takes 10 ms."""

    def __init__(self, clock: Clock, drafts: bool = False) -> None:
        self.clock = clock
        self.drafts = drafts

    def execute(self, plan: StepPlan) -> StepResult:
        self.clock.now += 0.010
        nothing = [None] * len(plan.scheduled)
        return StepResult([1] * len(nothing), nothing, nothing, num_drafted={0: 3} if self.drafts else {})  # type: ignore[arg-type]


def row(request: Request, start: int, count: int) -> ScheduledTokens:
    return ScheduledTokens(request, start, count, (), True)


A, B = (Request(name, [1, 2, 3], SamplingParams()) for name in "ab")


def logged(file: io.StringIO) -> list[list[float]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_a_step_counts_until_the_next_one_of_its_requests_begins() -> None:
    clock, file = Clock(), io.StringIO()
    log = StepLog(Slow(clock), file, clock=clock)
    log.execute(StepPlan([row(A, 0, 3)]))
    clock.now += 0.005  # events are sent, messages taken in
    log.execute(StepPlan([row(A, 3, 1), row(B, 4, 20)]))
    clock.now += 60.0  # idle
    log.execute(StepPlan([row(Request("c", [1], SamplingParams()), 0, 5)]))
    assert logged(file) == [[1000.0, 15.0, 0, 0, 3, 0], [1000.015, 10.0, 1, 4, 20, 4]]


def test_drafts_are_left_out_and_later_steps_are_thinned() -> None:
    clock, file = Clock(), io.StringIO()
    log = StepLog(Slow(clock, drafts=True), file, clock=clock)
    for _ in range(3):
        log.execute(StepPlan([row(A, 3, 1)]))
    assert logged(file) == []
    log = StepLog(Slow(clock), file, all_steps=5, clock=clock)
    for _ in range(200):  # two seconds
        log.execute(StepPlan([row(A, 3, 1)]))
    assert 20 <= len(logged(file)) <= 36


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    class Full(io.StringIO):
        def write(self, _text: str) -> int:
            raise OSError(28, "no space left")

    clock = Clock()
    log = StepLog(Slow(clock), Full(), clock=clock)
    for _ in range(3):
        assert log.execute(StepPlan([row(A, 3, 1)])).token_ids == [1]


def test_an_engine_says_what_it_is(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    folder = tmp_path / "log"
    with LLM(str(model_path("stories15m")), EngineConfig(context=64, concurrency=4, batch_tokens=32)) as llm:
        log_steps_to(folder, llm.parts)
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        for number in range(2):
            llm.parts.core.add(llm.parts.intake.request([number, 5, 9] * 8, params))
        while llm.parts.core.has_work:
            llm.parts.core.step()
        pages = llm.parts.runtime.budget.num_pages
        llm.parts.core.runner._file.flush()  # type: ignore[attr-defined]
    for name in (SERVER_FILE, STEPS_FILE):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    server = read_server(folder)
    shape = server.shape()
    assert (shape.context, shape.max_running, shape.batch_tokens, shape.num_pages) == (64, 4, 32, pages)
    assert sum(new for each in server.steps for new, _ in each.step.prefill) >= 24
    assert all(each.step.ms > 0 for each in server.steps)


def test_a_folder_that_cannot_be_written_is_no_failure(
    tmp_path: Path, model_path: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with LLM(str(model_path("stories15m")), EngineConfig(context=64)) as llm:
        log_steps_to(tmp_path / "file", llm.parts)
        assert "not logged" in caplog.text
        assert not isinstance(llm.parts.core.runner, StepLog)
