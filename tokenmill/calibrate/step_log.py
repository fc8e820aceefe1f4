"""A short run of the real engine with every step timed: job.py fits a cost model to it.

Drives the engine core as the offline facade does, with a runner that records what each step contained. Prompts of
several lengths, batches of several sizes, and prompts that join running batches, until the time is up; on a slow
machine scenarios are shortened or cut, and listed as skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice

from tokenmill.bench.prompts import random_requests
from tokenmill.engine.core import Runner
from tokenmill.engine.llm import LLM
from tokenmill.plan.cost.measured_cost import TimedStep
from tokenmill.types import Request, SamplingParams, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` requests of `prompt` tokens start together; with `joins`, one more joins every eight steps."""

    batch: int
    prompt: int
    output: int
    joins: int = 0

    def __str__(self) -> str:
        joining = f", {self.joins} joining" if self.joins else ""
        return f"{self.batch} x {self.prompt} tokens in, {self.output} out{joining}"


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


# On a GPU a step of few rows is one reading of the weights: more sequences and longer prompts tell the parts apart.
_GPU_SCENARIOS = (
    *_SCENARIOS,
    Scenario(64, 128, 32),
    Scenario(128, 64, 24),
    Scenario(1, 3072, 8),
    Scenario(8, 1024, 24, joins=4),
)


class _RecordingRunner:
    """The real runner; keeps the plan of the last step."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.plan = StepPlan()

    def execute(self, plan: StepPlan) -> StepResult:
        self.plan = plan
        return self.runner.execute(plan)


@dataclass(frozen=True, slots=True)
class StepLog:
    steps: list[TimedStep]
    skipped: list[str]  # scenarios that were left out or cut short, with the reason


def log_steps(llm: LLM, seconds: float, probe_seconds: float) -> StepLog:
    """Timed steps of all scenarios, once each after a warm-up, then again until `seconds` have passed. None takes much
    longer than `probe_seconds`."""
    core = llm.parts.core
    real, recording = core.runner, _RecordingRunner(core.runner)
    core.runner = recording
    log = StepLog([], [])
    try:
        _run(llm, Scenario(2, 16, 2), recording, 0, probe_seconds)
        scenarios = list(_fitting(llm, log))
        if llm.parts.config.device == "cuda":  # what is compiled and captured at first use is no step's cost
            llm.warm_up()
            for number, scenario in enumerate(scenarios):
                _run(llm, scenario, recording, number, probe_seconds)
        deadline = time.perf_counter() + seconds
        for number, requested in enumerate(cycle(scenarios), 1):
            if number > len(scenarios) and time.perf_counter() > deadline:
                break
            scenario = shortened(requested, _seconds_per_token(log.steps), probe_seconds)
            steps, ended = _run(llm, scenario, recording, number, probe_seconds)
            log.steps.extend(steps)
            if number <= len(scenarios) and (scenario != requested or not ended):
                became = f"shortened to {scenario.prompt} in" if scenario != requested else ""
                cut = "" if ended else f"cut after {probe_seconds:g} s"
                log.skipped.append(f"{requested}: {', '.join(filter(None, (became, cut)))}")
    finally:
        core.runner = real
    return log


def shortened(scenario: Scenario, seconds_per_token: float, probe_seconds: float) -> Scenario:
    """With prompts that take at most half of the time, so that the batch decodes too."""
    while scenario.prompt > 8 and scenario.batch * scenario.prompt * seconds_per_token > probe_seconds / 2:
        scenario = replace(scenario, prompt=scenario.prompt // 2)
    return scenario


def _fitting(llm: LLM, log: StepLog) -> Iterator[Scenario]:
    context = llm.parts.config.context
    for scenario in _GPU_SCENARIOS if llm.parts.config.device == "cuda" else _SCENARIOS:
        if scenario.prompt + scenario.output <= context:
            yield scenario
        else:
            log.skipped.append(f"{scenario}: longer than the context of {context} tokens")


def _seconds_per_token(steps: list[TimedStep]) -> float:
    """Seconds per prompt token, by the prompt-only steps so far; 0 before the first."""
    rates = [step.ms / 1e3 / sum(new for new, _ in step.prefill) for step in steps if step.prefill and not step.count]
    return min(rates, default=0.0)


def _run(
    llm: LLM, scenario: Scenario, recording: _RecordingRunner, seed: int, max_seconds: float
) -> tuple[list[TimedStep], bool]:
    """The scenario's steps, and whether it ran to completion."""
    core = llm.parts.core
    requests = _requests(llm, scenario, seed)
    sent = []
    for request in islice(requests, scenario.batch):
        sent.append(request.request_id)
        core.add(request)
    steps: list[TimedStep] = []
    start = time.perf_counter()
    while core.has_work:
        if time.perf_counter() - start > max_seconds:
            for request_id in sent:
                core.cancel(request_id)
            return steps, False
        if scenario.joins and len(steps) % 8 == 7:
            late = next(requests, None)
            if late is not None:
                sent.append(late.request_id)
                core.add(late)
        begin = time.perf_counter()
        core.step()
        steps.append(timed_step(recording.plan, 1e3 * (time.perf_counter() - begin)))
    return steps, True


def _requests(llm: LLM, scenario: Scenario, seed: int) -> Iterator[Request]:
    params = SamplingParams(max_tokens=scenario.output, temperature=0.0, ignore_eos=True)
    count = scenario.batch + scenario.joins
    vocabulary = llm.parts.description.vocab_size
    for each in random_requests(vocabulary, count, scenario.prompt, scenario.output, seed=seed):
        yield llm.parts.intake.request(each.prompt_ids, params)


def timed_step(plan: StepPlan, ms: float) -> TimedStep:
    """The plan as the simulator's runner counts it, with the measured time."""
    prefill = tuple((row.count, row.start) for row in plan.scheduled if row.count > 1)
    decodes = [row.start + 1 for row in plan.scheduled if row.count == 1]
    return TimedStep(prefill, len(decodes), sum(decodes), ms)
