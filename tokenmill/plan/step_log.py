"""A short run of the real engine with every step timed: what calibrate.py fits its cost to.

Drives the engine core as the offline facade does, with a runner that notes what each step held. Prompts of several
lengths, batches of several sizes, and prompts that join running batches, until the time is up. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from tokenmill.bench.prompts import random_requests
from tokenmill.engine.core import Runner
from tokenmill.engine.llm import LLM
from tokenmill.plan.measured_cost import TimedStep
from tokenmill.types import Request, SamplingParams, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` requests of `prompt` tokens start together; with `joins`, one more joins every eight steps."""

    batch: int
    prompt: int
    output: int
    joins: int = 0


# Short contexts and long ones, one sequence and many: enough to tell the parts of a step from each other. A model of
# short context leaves the long ones out.
_SCENARIOS = (
    Scenario(1, 128, 16),
    Scenario(4, 128, 16),
    Scenario(16, 64, 16),
    Scenario(1, 768, 8),
    Scenario(4, 16, 32, joins=4),
    Scenario(8, 256, 16, joins=2),
    Scenario(2, 512, 12),
    Scenario(32, 32, 12),
)


class _NotingRunner:
    """The real runner; keeps what the last step held."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.plan = StepPlan()

    def execute(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        return self.runner.execute(plan)


def log_steps(llm: LLM, seconds: float) -> list[TimedStep]:
    """Timed steps of all scenarios, at least once each after one warm-up, then again until `seconds` have passed."""
    core = llm.parts.core
    real, noting = core.runner, _NotingRunner(core.runner)
    core.runner = noting
    steps: list[TimedStep] = []
    try:
        _run(llm, Scenario(4, 64, 4), noting, 0)
        fitting = [each for each in _SCENARIOS if each.prompt + each.output <= llm.parts.config.context]
        deadline = time.perf_counter() + seconds
        for number, scenario in enumerate(cycle(fitting), 1):
            if number > len(fitting) and time.perf_counter() > deadline:
                break
            steps += _run(llm, scenario, noting, number)
    finally:
        core.runner = real
    return steps


def _run(llm: LLM, scenario: Scenario, noting: _NotingRunner, seed: int) -> list[TimedStep]:
    core = llm.parts.core
    requests = _requests(llm, scenario, seed)
    for _ in range(scenario.batch):
        core.add(next(requests))
    steps: list[TimedStep] = []
    while core.has_work:
        if scenario.joins and len(steps) % 8 == 7:
            late = next(requests, None)
            if late is not None:
                core.add(late)
        begin = time.perf_counter()
        core.step()
        steps.append(timed_step(noting.plan, 1e3 * (time.perf_counter() - begin)))
    return steps


def _requests(llm: LLM, scenario: Scenario, seed: int) -> Iterator[Request]:
    params = SamplingParams(max_tokens=scenario.output, temperature=0.0, ignore_eos=True)
    count = scenario.batch + scenario.joins
    vocabulary = llm.parts.description.vocab_size
    for each in random_requests(vocabulary, count, scenario.prompt, scenario.output, seed=seed):
        yield llm.parts.intake.request(each.prompt_ids, params)


def timed_step(plan: StepPlan, ms: float) -> TimedStep:
    """What the simulator's runner would count in this plan, with the time that it took."""
    prefill = tuple((row.count, row.start) for row in plan.scheduled if row.count > 1)
    decodes = [row.start + 1 for row in plan.scheduled if row.count == 1]
    return TimedStep(prefill, len(decodes), sum(decodes), ms)
