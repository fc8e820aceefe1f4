"""The steady state in closed form: it agrees with the event loop and with the simulator, and keeps Little's law."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.closed_loop import Load, Scheduling, run_closed_loop
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.cost.speculation import speculative_step, speedup_at
from tokenmill.plan.cost.steady_state import steady_state
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import built_in
from tokenmill.plan.question.question import Speculation
from tokenmill.plan.simulate.job import simulate
from tokenmill.plan.simulate.question import LoadQuestion, load_of

LLAMA_70B = Deployment(built_in("llama-3.1-70b"), find_device("h100"), find_format("int4-g128"))
DEPLOYMENTS = {
    "70b": LLAMA_70B,
    "8b": Deployment(built_in("llama-3.1-8b"), find_device("h100"), find_format("fp8")),
    "experts": Deployment(built_in("deepseek-v3"), find_device("h200"), find_format("fp8"), tp=8),
}


@pytest.fixture(scope="module")
def costs() -> dict[str, StepCost]:
    return {name: StepCost(deployment) for name, deployment in DEPLOYMENTS.items()}


@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_it_agrees_with_users_who_drift_apart(costs: dict[str, StepCost], name: str, mixed: bool) -> None:
    """Lengths of 0.8 to 1.2 of the mean keep the event loop's users from moving in step."""
    for tokens_in, tokens_out, step in ((1024, 256, 8192), (8192, 512, 8192), (6144, 64, 2048), (128, 1024, 8192)):
        for users in (1, 2, 8, 32, 128):
            scheduling = Scheduling(step, mixed, 64, 30.0)
            varied = Load(round(1.2 * tokens_in), round(1.2 * tokens_out), users, spread=1 / 3)
            events = run_closed_loop(costs[name].step_ms, varied, scheduling)
            found = steady_state(costs[name].step_ms, Load(tokens_in, tokens_out, users), scheduling)
            case = (name, mixed, tokens_in, tokens_out, users)
            assert found.tpot_ms == pytest.approx(events.steady_tpot_ms, rel=0.2), case
            assert found.ttft_ms == pytest.approx(events.steady_ttft_ms, rel=0.3), case
            assert found.output_tok_s == pytest.approx(events.output_tok_s, rel=0.15), case
            assert found.saturated == (users > 64), case


def test_it_agrees_with_the_simulator_under_poisson_load() -> None:
    """Sixteen users' worth of requests, arriving at random, through the real scheduler."""
    cost = StepCost(LLAMA_70B)
    found = steady_state(cost.step_ms, Load(1024, 256, 16), Scheduling(8192, True, 64, cost.costs.request_ms))
    rate = found.output_tok_s / 256
    load = LoadQuestion(input_tokens=1024, output_tokens=256, rate=0.95 * rate, limit=250)
    simulated = simulate(LLAMA_70B, load_of(load), cost=cost)
    assert found.ttft_ms == pytest.approx(simulated.ttft.mean, rel=0.25)
    assert found.tpot_ms == pytest.approx(simulated.tpot.mean, rel=0.15)


@pytest.mark.parametrize("stages", [2, 8])
@pytest.mark.parametrize(("tokens_in", "tokens_out", "users"), [(1024, 256, 32), (4096, 128, 16)])
def test_a_pipeline_agrees_with_the_simulator(stages: int, tokens_in: int, tokens_out: int, users: int) -> None:
    """The simulator moves every step through its stages; the closed form takes the slowest of those in flight."""
    d = Deployment(built_in("llama-3.1-70b"), find_device("h200"), find_format("fp8"), 1.0, pp=stages)
    cost = StepCost(d)
    found = estimate(d, Load(tokens_in, tokens_out, users), cost)
    load = LoadQuestion(input_tokens=tokens_in, output_tokens=tokens_out, users=users, spread=0.3, limit=160)
    simulated = simulate(d, load_of(load), cost=cost)
    assert found.tpot.value == pytest.approx(simulated.tpot.mean, rel=0.12)
    assert found.output_rate.value == pytest.approx(simulated.throughput_tok_s, rel=0.12)


def test_little_s_law(costs: dict[str, StepCost]) -> None:
    """Users are what their cycle times the throughput makes of them, with room and without."""
    for room in (64, 8):
        scheduling = Scheduling(8192, True, room, 30.0, turnaround_ms=20.0)
        found = steady_state(costs["8b"].step_ms, Load(1024, 256, 32), scheduling)
        cycle_ms = found.ttft_ms + 255 * found.tpot_ms + 10.0
        assert found.output_tok_s / 256 * cycle_ms / 1e3 == pytest.approx(32, rel=0.02)


def test_more_users_wait_longer_and_bring_more(costs: dict[str, StepCost]) -> None:
    for prompt in (512, 16384):  # the second takes two steps
        line = [
            steady_state(costs["8b"].step_ms, Load(prompt, 128, users), Scheduling(8192, True, 256))
            for users in (1, 2, 4, 8, 16, 32, 64)
        ]
        for fewer, more in pairwise(line):
            assert more.tpot_ms >= fewer.tpot_ms
            assert more.output_tok_s > 0.99 * fewer.output_tok_s


def test_cached_prompts_cost_attention_but_no_prefill(costs: dict[str, StepCost]) -> None:
    scheduling = Scheduling(8192, True, 64)
    whole, cached, short = (
        steady_state(costs["8b"].step_ms, load, scheduling)
        for load in (Load(8192, 256, 16), Load(1024, 256, 16, cached_tokens=7168), Load(1024, 256, 16))
    )
    assert short.tpot_ms < cached.tpot_ms < whole.tpot_ms
    assert short.ttft_ms < cached.ttft_ms < whole.ttft_ms


def test_speculation_shortens_decoding_alone(costs: dict[str, StepCost]) -> None:
    cost, drafts = costs["70b"], Speculation(4, 0.7, 0.03)
    step = speculative_step(drafts, cost)
    assert step([(100, 0)], (4, 4000.0)) == cost.step_ms([(100, 0)], (4, 4000.0))
    gain = cost.step_ms([], (4, 4000.0)) / step([], (4, 4000.0))
    assert gain == pytest.approx(speedup_at(drafts, cost, 4, 1000.0), rel=0.01)
    assert step([], (512, 512e3)) == cost.step_ms([], (512, 512e3))  # it does not pay there: the engine stops
