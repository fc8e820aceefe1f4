"""`--itl`: prompts in chunks that keep the steps of running sequences short, by costs that the engine learns itself.

Steps are those of the engine core on a simulated clock, so every number is the same in every run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from tests.unit.engine.building import make_kv, make_request
from tokenmill.engine.core import EngineCore
from tokenmill.engine.order import DISCIPLINES
from tokenmill.engine.pace import StepPace
from tokenmill.engine.scheduler import Scheduler
from tokenmill.plan.simulate.runner import SimRunner
from tokenmill.types import StepPlan

_ITL = 40.0  # ms


@dataclass
class _Device:
    """A step: 5 ms, 0.5 for each decode, 0.25 for each prompt token, 2 for a million attended positions; and noise."""

    noise: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(7))

    def step_ms(self, prefill: Sequence[tuple[int, int]], decode: tuple[int, float]) -> float:
        count, context = decode
        positions = context + sum(new * (before + new) for new, before in prefill)
        ms = 5.0 + 0.5 * count + 0.25 * sum(new for new, _ in prefill) + 2e-6 * positions
        return ms * (1.0 + self.chance.uniform(-self.noise, self.noise))


class _Engine:
    def __init__(self, device: _Device, itl: float, discipline: str = "fcfs", max_running: int = 64) -> None:
        self.runner = SimRunner(device)
        kv = make_kv(num_pages=4096, page_size=16)
        clock = self.runner.clock
        pace = StepPace(itl / 1000.0, kv.stats, clock) if itl else None
        scheduler = Scheduler(kv, DISCIPLINES.get(discipline)(), 2048, max_running, 16384, pace=pace)
        self.core = EngineCore(scheduler, self.runner, clock)
        self.num_added = 0

    def add(self, prompt: int, output: int, tenant: str = "") -> None:
        first = self.num_added * 100_000  # no shared prefixes
        request = make_request(
            list(range(first, first + prompt)),
            f"r{self.num_added}",
            max_tokens=output,
            arrival=self.num_added,
            tenant=tenant,
        )
        self.core.add(request)
        self.num_added += 1

    def step(self) -> tuple[StepPlan, float]:
        self.core.step()
        return self.runner.plan, self.runner.ms

    def gaps(self, steps: int) -> list[float]:
        """Milliseconds of the next steps that had decodes, prompts beside them or not."""
        times = []
        for _ in range(steps):
            plan, ms = self.step()
            if any(row.count == 1 for row in plan.scheduled):
                times.append(ms)
        return times


def _loaded(itl: float, noise: float = 0.0) -> _Engine:
    """Eight sequences that decode, then long prompts."""
    engine = _Engine(_Device(noise), itl)
    for _ in range(8):
        engine.add(20, 4000)
    for _ in range(40):
        engine.step()
    for _ in range(4):
        engine.add(6000, 50)
    return engine


def test_without_an_objective_a_prompt_takes_the_whole_step() -> None:
    assert max(_loaded(0.0).gaps(20)) > 500.0


def test_gaps_stay_under_the_objective_and_use_it() -> None:
    gaps = _loaded(_ITL).gaps(200)
    assert max(gaps) <= _ITL
    with_prompts = [ms for ms in gaps[20:] if ms > 15.0]
    assert len(with_prompts) > 100
    assert sum(with_prompts) / len(with_prompts) > 0.85 * _ITL, "chunks are much smaller than they could be"


def test_gaps_stay_under_the_objective_where_steps_vary() -> None:
    gaps = _loaded(_ITL, noise=0.1).gaps(300)
    late = [ms for ms in gaps if ms > _ITL]
    assert len(late) <= 0.1 * len(gaps)
    assert max(gaps) <= 1.1 * _ITL


def test_late_steps_are_counted() -> None:
    engine = _loaded(_ITL)
    engine.gaps(50)
    assert engine.core.stats.num_late_steps == 0
    assert engine.core.stats.step_prompt_tokens > 0
    hopeless = _loaded(6.0)
    hopeless.gaps(50)
    assert hopeless.core.stats.num_late_steps >= 50


def test_prompts_advance_even_where_the_objective_cannot_be_kept() -> None:
    engine = _loaded(6.0)
    before = engine.runner.prompt_tokens
    engine.gaps(50)
    assert engine.runner.prompt_tokens - before >= 50 * 16


def test_without_running_sequences_there_is_no_limit() -> None:
    engine = _Engine(_Device(), _ITL)
    engine.add(6000, 5)
    plan, _ = engine.step()
    assert plan.num_tokens == 2048


def test_many_waiting_prompts_begin_one_after_the_other() -> None:
    """A step that has no time left admits nobody for a token or two."""
    engine = _loaded(_ITL)
    for _ in range(20):
        engine.add(3000, 10)
    engine.gaps(30)
    plan, _ = engine.step()
    assert sum(row.count > 1 for row in plan.scheduled) == 1


def test_tenants_share_what_the_objective_leaves() -> None:
    engine = _Engine(_Device(), _ITL, "fair")
    for tenant in ("a", "b"):
        engine.add(20, 4000, tenant)
    for _ in range(40):
        engine.step()
    for tenant in ("a", "b"):
        engine.add(6000, 50, tenant)
    assert max(engine.gaps(150)[30:]) <= _ITL


@pytest.mark.parametrize("wanted", [0, 5, 500])
def test_limit_never_exceeds_what_is_wanted(wanted: int) -> None:
    pace = StepPace(0.04, make_kv().stats, lambda: 0.0)
    for num_decodes in (0, 3):
        pace.begin(num_decodes)
        assert pace.limit(wanted, 0) <= wanted


@pytest.mark.parametrize("discipline", ["fcfs", "priority", "fair"])
def test_every_request_ends_under_random_traffic(discipline: str) -> None:
    """Tight objectives, few pages: whatever comes is answered, and pages add up."""
    chance = random.Random(11)
    runner = SimRunner(_Device(0.3, chance))
    kv = make_kv(num_pages=40, page_size=16)
    pace = StepPace(0.009, kv.stats, runner.clock)
    scheduler = Scheduler(kv, DISCIPLINES.get(discipline)(), 128, 6, 512, pace=pace)
    core = EngineCore(scheduler, runner, runner.clock)
    ended = added = 0
    for _ in range(3000):
        if added < 60 and chance.random() < 0.1:
            prompt = [added * 1000 + each for each in range(chance.randrange(1, 300))]
            request = make_request(
                prompt, f"r{added}", max_tokens=chance.randrange(1, 80), arrival=added, tenant=chance.choice("abc")
            )
            core.add(request)
            added += 1
        if core.has_work:
            ended += sum(event.finish_reason is not None for event in core.step())
            kv.check()
    assert ended == added == 60
