"""Step cost, closed loop, estimates: behaviour that any honest model of an engine has."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.roofline import Work, smooth_max, transferred
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.closed_loop import Load, Scheduling, run_closed_loop
from tokenmill.plan.cost.curves import Curve
from tokenmill.plan.cost.engine_costs import engine_costs
from tokenmill.plan.cost.performance import Estimate, basis_of, estimate
from tokenmill.plan.cost.step_cost import StepCost, equivalent_length
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.engines import engine_names
from tokenmill.plan.question.model_names import built_in

LLAMA = Deployment(built_in("llama-3.1-8b"), find_device("h200"))


@pytest.fixture(scope="module")
def cost() -> StepCost:
    return StepCost(LLAMA)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "qwen3.5-397b-a17b", "jamba-v0.1"])
@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_fast_path_equals_the_sum_of_its_parts(name: str, engine: str) -> None:
    d = Deployment(built_in(name), find_device("h200"), find_format("fp8"), tp=2, data_parallel=2, ep=4, engine=engine)
    cost = StepCost(replace(d, ep=1 if not d.model.is_moe else 4))
    for prefill, decode in ((), (8, 9000.0)), ([(2048, 0)], (0, 0.0)), ([(512, 100), (7, 0)], (32, 50_000.0)):
        assert cost.step_ms(prefill, decode) == pytest.approx(cost.parts(prefill, decode).total, rel=0.02)
        assert min(asdict(cost.parts(prefill, decode)).values()) >= 0


def test_a_list_of_contexts_is_the_same_as_its_sum(cost: StepCost) -> None:
    assert cost.step_ms([], [100, 300, 500]) == cost.step_ms([], (3, 900.0))


def test_an_empty_step_costs_nothing(cost: StepCost) -> None:
    assert cost.step_ms([], (0, 0.0)) == 0.0
    assert cost.parts([], []).total == 0.0


def test_more_work_takes_longer(cost: StepCost) -> None:
    decode = [cost.decode_ms(batch, batch * 2000) for batch in (1, 8, 64, 256, 1024)]
    assert decode == sorted(decode)
    context = [cost.decode_ms(16, 16 * length) for length in (100, 1000, 10_000, 100_000)]
    assert context == sorted(context)
    prefill = [cost.step_ms([(length, 0)], (0, 0.0)) for length in (512, 2048, 8192, 32768, 131072)]
    assert prefill == sorted(prefill)
    assert cost.step_ms([(2048, 30_000)], (0, 0.0)) > cost.step_ms([(2048, 0)], (0, 0.0))


def test_attention_is_quadratic_past_the_tables(cost: StepCost) -> None:
    """C4: the cache grows linearly, the arithmetic does not."""
    short, long = (cost.parts([(length, 0)], (0, 0.0)).attention for length in (65536, 131072))
    assert long / short == pytest.approx(4.0, rel=0.05)


def test_chunks_add_up_to_the_whole_prompt() -> None:
    whole = equivalent_length(8192, 0) ** 2
    assert whole == 8192**2
    chunks = sum(equivalent_length(2048, before) ** 2 for before in range(0, 8192, 2048))
    assert chunks == pytest.approx(whole)
    assert equivalent_length(8192, 0, window=128) ** 2 < 0.04 * whole


def test_fewer_bits_help_decode_but_not_the_w4a16_prompt() -> None:
    """C15 and R3: 8-bit arithmetic speeds prompts up, 4-bit weights alone do not; both speed up single streams."""
    costs = {name: StepCost(replace(LLAMA, weights=find_format(name))) for name in ("bf16", "fp8", "awq")}
    decode = {name: cost.decode_ms(1, 1000) for name, cost in costs.items()}
    prefill = {name: cost.step_ms([(8192, 0)], (0, 0.0)) for name, cost in costs.items()}
    assert decode["awq"] < decode["fp8"] < decode["bf16"]
    assert decode["bf16"] / decode["fp8"] < 1.9
    assert prefill["fp8"] < 0.85 * prefill["bf16"]
    assert prefill["awq"] == pytest.approx(prefill["bf16"], rel=0.05)


def test_fp8_on_ampere_is_memory_only() -> None:
    """C11: no FP8 arithmetic there."""
    a100 = find_device("a100-80")
    bf16, fp8 = (StepCost(replace(LLAMA, device=a100, weights=find_format(name))) for name in ("bf16", "fp8"))
    assert fp8.decode_ms(1, 1000) < bf16.decode_ms(1, 1000)
    assert fp8.step_ms([(8192, 0)], (0, 0.0)) == pytest.approx(bf16.step_ms([(8192, 0)], (0, 0.0)), rel=0.05)


def test_tensor_parallelism_over_pcie_costs_more_than_over_nvlink() -> None:
    sxm, pcie = (
        StepCost(replace(LLAMA, device=find_device(name), tp=4)).parts([(4096, 0)], (0, 0.0)).communication
        for name in ("h100-sxm", "h100-pcie")
    )
    assert pcie > 4 * sxm


def test_transfer_between_devices() -> None:
    h100, h200 = find_device("h100"), find_device("h200")
    read = Work(4.8e9 * 0.8, 0.0)  # 0.8 ms at the H200's full bandwidth
    assert transferred(1.0, read, h200, read, h200, 0.003) == pytest.approx(1.0)
    assert transferred(1.0, read, h200, read, h100, 0.0) == pytest.approx(4.8 / 3.35)
    slow = transferred(4.0, read, h200, read, h100, 0.0)  # three quarters latency: memory does not mend that
    assert slow == pytest.approx(3.0 + 4.8 / 3.35)
    assert smooth_max(0.0, 2.0) == 2.0
    assert smooth_max(1.0, 1.0) == pytest.approx(2 ** (1 / 3))


def test_curve_extends_straight() -> None:
    curve = Curve([1, 2, 4], [10, 20, 30])
    assert [curve(x) for x in (0, 1, 1.5, 3, 8)] == [10, 10, 15, 25, 50]


def test_closed_loop_is_deterministic_and_steady(cost: StepCost) -> None:
    load, scheduling = Load(1024, 128, 16, 0.2), Scheduling()
    first, second = (run_closed_loop(cost.step_ms, load, scheduling) for _ in range(2))
    assert first == second
    assert not first.saturated
    alone = cost.decode_ms(16, 16 * 1100)
    assert alone < first.tpot_ms < 2 * alone + 5
    assert first.ttft_ms > cost.step_ms([(820, 0)], (0, 0.0))


def test_closed_loop_throughput_follows_little_s_law(cost: StepCost) -> None:
    load = Load(512, 256, 32, 0.2)
    result = run_closed_loop(cost.step_ms, load, Scheduling(turnaround_ms=0.0))
    per_request = result.steady_ttft_ms + result.steady_tpot_ms * (256 * 0.9 - 1)
    assert result.output_tok_s == pytest.approx(32 * 256 * 0.9 / per_request * 1e3, rel=0.1)


def test_too_little_room_saturates(cost: StepCost) -> None:
    load = Load(1024, 128, 16)
    free, full = (run_closed_loop(cost.step_ms, load, Scheduling(max_running=room)) for room in (16, 4))
    assert full.saturated
    assert full.steady_ttft_ms > 3 * free.steady_ttft_ms
    assert full.tpot_ms < free.tpot_ms


def test_prompts_that_stop_decodes_stretch_tpot(cost: StepCost) -> None:
    load = Load(4096, 128, 16, 0.2)
    mixed, apart = (run_closed_loop(cost.step_ms, load, Scheduling(mixed=flag)) for flag in (True, False))
    assert apart.tpot_ms > mixed.tpot_ms


def test_estimate_carries_interval_and_basis() -> None:
    bases = {}
    for name in ("h200", "b200", "a100-80", "m4-max"):
        d = replace(LLAMA, device=find_device(name), engine="llama.cpp" if name == "m4-max" else "vllm")
        bases[name] = basis_of(d).split(":")[0]
        found = estimate(d, Load(512, 64, 2))
        for figure in (found.ttft, found.tpot, found.output_rate):
            assert figure.low <= figure.value <= figure.high
            assert figure.low < figure.high
            assert figure.basis.startswith(f"{basis_of(d)}; interval: ")
    assert bases == {"h200": "table", "b200": "table scaled", "a100-80": "extrapolated", "m4-max": "formula"}


def test_estimate_of_what_was_not_measured_is_wider() -> None:
    known, unknown = (
        estimate(replace(LLAMA, device=find_device(name)), Load(512, 64, 2)).tpot for name in ("h200", "a100")
    )
    assert unknown.high / unknown.low > 2 * known.high / known.low


def pipeline(stages: int, users: int, output: int = 1024) -> Estimate:
    d = Deployment(built_in("llama-3.1-70b"), find_device("h200"), find_format("fp8"), 1.0, pp=stages)
    return estimate(d, Load(1024, output, users, 0.2))


def test_a_pipeline_adds_throughput_less_its_bubble() -> None:
    """Stages wait for the slowest micro-batch: the more steps hold prompts, the more unequal they are."""
    one, two = pipeline(1, 8), pipeline(2, 16)
    assert (one.bubble, one.tpot.value) < (two.bubble, two.tpot.value)
    assert two.output_rate.value == pytest.approx(2 * (1 - two.bubble) * one.output_rate.value, rel=0.05)
    assert 0.0 < two.bubble < 0.25
    assert pipeline(2, 16, output=128).bubble > two.bubble
    assert pipeline(4, 32).bubble > two.bubble
    assert "stages idle" in two.tpot.basis


def test_a_pipeline_with_one_user_has_one_busy_stage() -> None:
    """F9 with one micro-batch in flight: stages do not make a single stream faster."""
    one, eight = pipeline(1, 1), pipeline(8, 1)
    assert eight.bubble == pytest.approx(7 / 8)
    assert eight.output_rate.value == pytest.approx(one.output_rate.value, rel=0.05)


def test_engines_and_their_mistakes() -> None:
    assert {"vllm", "sglang", "trtllm", "llama.cpp", "tokenmill"} <= set(engine_names())
    with pytest.raises(UserError, match="did you mean 'vllm'"):
        engine_costs("vlm")


def test_a_request_waits_for_running_steps_unless_it_is_alone() -> None:
    """The scheduler's wait is a number of steps: it grows with the batch's step, and an idle engine has none."""
    prompt = StepCost(LLAMA, replace(engine_costs("vllm"), queue_steps=0.0))
    queued = prompt.with_costs(replace(prompt.costs, queue_steps=10.0, replica_queue_steps=99.0))
    for users in (1, 2, 64):
        load = Load(1024, 256, users)
        plain, later = estimate(LLAMA, load, prompt), estimate(LLAMA, load, queued)
        assert later.tpot.value == plain.tpot.value
        expected = 10 * plain.tpot.value * (1 - 1 / users)
        assert later.ttft.value - plain.ttft.value == pytest.approx(expected)
    replicated = StepCost(replace(LLAMA, data_parallel=2), queued.costs)
    assert replicated.queue_steps == 109.0
