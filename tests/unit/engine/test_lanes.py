"""Several steps under way: no sequence is in two of them, lanes are of one size, everything ends as without lanes."""

from __future__ import annotations

import random
from collections import deque

import pytest

from tests.unit.engine.building import make_kv, make_request, make_scheduler
from tokenmill.engine import lanes as lanes_module
from tokenmill.engine.core import EngineCore
from tokenmill.engine.lanes import LaneCore
from tokenmill.types import StepPlan, StepResult


@pytest.fixture(autouse=True)
def _small_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes_module, "MIN_SEQUENCES", 1)


class _Runner:
    """Answers in the order of steps; each token follows from the sequence alone."""

    def __init__(self) -> None:
        self.flying: deque[StepPlan] = deque()
        self.sizes: list[int] = []

    def begin(self, plan: StepPlan) -> StepPlan:
        busy = {row.request for other in self.flying for row in other.scheduled}
        assert not busy & {row.request for row in plan.scheduled}, "a sequence is in two steps"
        self.flying.append(plan)
        self.sizes.append(len(plan.scheduled))
        return plan

    def finish(self, begun: StepPlan) -> StepResult:
        assert self.flying.popleft() is begun
        return self.execute(begun)

    def execute(self, plan: StepPlan) -> StepResult:
        sequences = [row.request.token_ids if row.samples else None for row in plan.scheduled]
        tokens = [None if ids is None else (7 * sum(ids) + len(ids)) % 97 + 3 for ids in sequences]
        return StepResult(tokens, [None] * len(tokens), [None] * len(tokens))


def _run(lanes: int, pages: int, cancelled: frozenset[str] = frozenset()) -> tuple[dict[str, list[int]], _Runner]:
    runner = _Runner()
    scheduler = make_scheduler(make_kv(num_pages=pages), max_batch_tokens=12, max_running=6, context_length=60)
    core = LaneCore(scheduler, runner, lanes) if lanes > 1 else EngineCore(scheduler, runner)
    numbers = random.Random(3)
    for number in range(12):
        prompt = [numbers.randrange(3, 90) for _ in range(numbers.randrange(1, 30))]
        core.add(make_request(prompt, f"r{number}", arrival=number, max_tokens=numbers.randrange(1, 12)))
    found: dict[str, list[int]] = {}
    steps = 0
    while core.has_work:
        for event in core.step():
            found.setdefault(event.request_id, []).extend(event.token_ids)
        core.check()
        steps += 1
        if steps == 4:
            for request_id in cancelled:
                core.cancel(request_id)
        assert steps < 1000
    assert not runner.flying
    return found, runner


@pytest.mark.parametrize("pages", [200, 18])
@pytest.mark.parametrize("lanes", [2, 3])
def test_lanes_give_the_tokens_of_one_step_at_a_time(lanes: int, pages: int) -> None:
    """With plenty of pages, and with so few that sequences drive each other out."""
    assert _run(lanes, pages)[0] == _run(1, pages)[0]


def test_sequences_that_are_cancelled_while_their_step_is_under_way() -> None:
    gone = frozenset({"r0", "r1", "r5"})
    found, _ = _run(2, 200, gone)
    wanted, _ = _run(1, 200)
    assert {name: ids for name, ids in found.items() if name not in gone} == {
        name: ids for name, ids in wanted.items() if name not in gone
    }


def test_all_are_cancelled_while_steps_are_under_way() -> None:
    _run(2, 200, frozenset(f"r{number}" for number in range(12)))


def test_lanes_are_of_one_size() -> None:
    runner = _Runner()
    core = LaneCore(make_scheduler(make_kv(num_pages=200), max_running=6), runner, 2)
    for number in range(6):
        core.add(make_request([3 + number], f"r{number}", arrival=number, max_tokens=20))
    for _ in range(20):
        core.step()
    assert set(runner.sizes[6:]) == {3}
