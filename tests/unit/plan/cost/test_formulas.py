"""Numeric checks of time, communication, speculation, ceilings and cost (F4 to F15, C2, C8, C9, C27)."""

from __future__ import annotations

from statistics import fmean

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost import ceilings, communication, kernel_time, tables
from tokenmill.plan.cost.engine_costs import roof_shares
from tokenmill.plan.cost.kernel_time import coverage
from tokenmill.plan.cost.speculation import break_even_batch, expected_tokens, speedup, speedup_at
from tokenmill.plan.cost.step_cost import StepCost
from tokenmill.plan.question.deployment import Deployment
from tokenmill.plan.question.model_names import built_in
from tokenmill.plan.question.pricing import power_dollars_per_hour
from tokenmill.plan.question.question import Speculation

H100, H200 = find_device("h100"), find_device("h200")


def efficiency(dtype: str, tokens: int, size: int) -> tuple[float, float]:
    """(share of bandwidth, share of arithmetic) of a square matrix on the measured device."""
    points, times = tables.gemm(dtype, size, size)
    seconds = times[points.index(tokens)] / 1e3
    width, rate = (2, 989e12) if dtype == "bfloat16" else (1, 1979e12)
    return width * size * size / seconds / 4.8e12, 2 * tokens * size * size / seconds / rate


def test_measured_gemm_efficiency() -> None:
    """F4 and F5: large BF16 layers read at about 0.82 and compute at 0.8; FP8 at 0.67 and 0.52 to 0.75."""
    sizes = (8192, 10240, 12288, 16384)
    assert fmean(efficiency("bfloat16", 8, size)[0] for size in sizes) == pytest.approx(0.82, abs=0.06)
    assert fmean(efficiency("fp8", 8, size)[0] for size in sizes) == pytest.approx(0.67, abs=0.06)
    assert efficiency("bfloat16", 1024, 8192)[1] == pytest.approx(0.80, abs=0.05)
    assert 0.52 <= efficiency("fp8", 1024, 8192)[1] <= 0.75


def test_prefill_of_70b() -> None:
    """F4: 8192 tokens of Llama-70B FP8 on one H200: predicted 1,181 ms in the study, measured 1,156."""
    cost = StepCost(Deployment(built_in("llama-3.1-70b"), H200, find_format("fp8"), 1.0))
    assert cost.step_ms([(8192, 0)], (0, 0)) == pytest.approx(1170, rel=0.15)


def test_decode_of_70b_over_eight() -> None:
    """F8: four sequences at TP8 take 7.9 ms, of which the all-reduces are 0.8."""
    cost = StepCost(Deployment(built_in("llama-3.1-70b"), H200, find_format("fp8"), 1.0, tp=8))
    parts = cost.parts([], (4, 4 * 1536))
    assert parts.total == pytest.approx(7.9, rel=0.10)
    assert parts.communication == pytest.approx(0.8, rel=0.25)


def test_expert_coverage() -> None:
    """F7: experts touched of 256 by 4 to 64 tokens of 8 each; 37B active parameters would promise 0.96 ms."""
    touched = [round(coverage(tokens, 8, 256)) for tokens in (4, 8, 16, 32, 64)]
    assert touched == pytest.approx([30, 57, 102, 163, 222], abs=1)
    naive = 37e9 / (8 * 4.8e12) * 1e3
    assert naive == pytest.approx(0.96, abs=0.01)
    d = Deployment(built_in("deepseek-r1"), H200, find_format("fp8"), tp=8, ep=8, engine="trtllm")
    assert StepCost(d).decode_ms(4, 4 * 1536) > 7 * naive


@pytest.mark.parametrize(("nbytes", "us"), [(8 << 10, 5.2), (1 << 20, 18.0), (16 << 20, 166.0)])
def test_all_reduce_over_eight(nbytes: int, us: float) -> None:
    """F8, measured on H200."""
    assert communication.all_reduce_ms(nbytes, 8, H200) * 1e3 == pytest.approx(us, rel=0.10)


def test_large_nccl_all_reduce() -> None:
    assert communication.all_reduce_ms(134e6, 8, H100, nccl=True) * 1e3 == pytest.approx(722, rel=0.05)


def test_one_device_exchanges_nothing() -> None:
    assert communication.all_reduce_ms(1e9, 1, H100) == 0.0
    assert communication.all_to_all_ms(100, 8, 7168, 1.0, 1, H100) == 0.0


def test_pipeline_latency() -> None:
    """F9: 405B on eight H200: tensor parallelism is 5.6 times faster at the least latency."""
    model, weights = built_in("llama-3.1-405b"), find_format("fp8")
    tensor = StepCost(Deployment(model, H200, weights, tp=8, engine="trtllm")).decode_ms(1, 1024)
    pipeline = StepCost(Deployment(model, H200, weights, pp=8, engine="trtllm")).decode_ms(1, 1024)
    assert pipeline / tensor == pytest.approx(5.6, rel=0.20)


@pytest.mark.parametrize(
    ("k", "acceptance", "cost", "expected"),
    [(1, 0.85, 0.03, 1.80), (7, 0.75, 0.02, 3.16), (5, 0.7, 0.114, 1.87), (5, 0.7, 0.05, 2.35)],
)
def test_speculation(k: int, acceptance: float, cost: float, expected: float) -> None:
    """F10: DeepSeek's MTP, Leviathan's T5, and a 7B or 3B draft for 70B (C27)."""
    assert speedup(Speculation(k, acceptance, cost)) == pytest.approx(expected, rel=0.01)


def test_certain_acceptance_yields_every_draft() -> None:
    assert expected_tokens(Speculation(4, 1.0, 0.1)) == 5.0


def test_speculation_dies_with_batch() -> None:
    cost = StepCost(Deployment(built_in("llama-3.1-70b"), H100, find_format("fp8"), 1.0, tp=4))
    speculation = Speculation(4, 0.7, 0.05)
    gains = [speedup_at(speculation, cost, batch, 1024) for batch in (1, 64, 512)]
    assert gains[0] > 1.8
    assert gains[0] > gains[1] > gains[2]
    assert gains[2] < 1.0
    assert 32 <= break_even_batch(lambda batch: speedup_at(speculation, cost, batch, 1024)) <= 256


def test_prefill_is_two_operations_per_parameter() -> None:
    """C2, Splitwise: 688 ms for 2048 tokens of 70B on two A100 is 0.67 of peak; 6 N would need 1.96 times the peak."""
    a100, model = find_device("a100-80"), built_in("llama-2-70b")
    flops = ceilings.prefill_flops(model.parameters, 2048, 80, 8192)
    peak = 2 * 0.688 * a100.rate("bf16") * 1e12
    assert flops / peak == pytest.approx(0.67, abs=0.02)
    assert 6 * model.parameters * 2048 / peak == pytest.approx(1.96, abs=0.03)


@pytest.mark.parametrize(
    ("model", "device", "weights", "ceiling"),
    [
        ("llama-3.1-70b", "a100-80", "bf16", 14.5),
        ("llama-3.1-70b", "h100", "fp8", 47),
        ("llama-3.1-70b", "h200", "fp8", 68),
        ("llama-3.1-70b", "b200", "nvfp4", 194),
        ("llama-2-7b", "a10g", "bf16", 44),
        ("llama-2-7b", "a100-80", "bf16", 151),
    ],
)
def test_single_stream_ceilings(model: str, device: str, weights: str, ceiling: float) -> None:
    """C9: what bandwidth allows; the seeds' figures above these need more devices or speculation."""
    found = ceilings.decode_ceiling(built_in(model), find_format(weights), find_device(device))
    assert found == pytest.approx(ceiling, rel=0.05)


@pytest.mark.parametrize(
    ("device", "rate"), [("rtx-4090", 46.8), ("v100", 31.1), ("a100", 46.1), ("h100", 73.8), ("h200", 77.1)]
)
def test_llama_cpp_stops_scaling_with_bandwidth(device: str, rate: float) -> None:
    """F13: Qwen 27B Q4_K_M, 16.8 GB: an H200 is hardly faster than an H100."""
    found = find_device(device)
    shares = roof_shares("llama.cpp", found.name, found.kind)
    assert shares is not None
    assert shares.memory * found.bandwidth_gb_s / 16.8 == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize(
    ("price", "rate", "dollars"), [(4, 100, 11.11), (4, 120, 9.26), (16, 350, 12.70), (4, 60, 18.52)]
)
def test_batch_one_costs_of_the_seeds(price: float, rate: float, dollars: float) -> None:
    """C8: the seed's dollars per million are batch-1 speeds, not loaded ones."""
    assert ceilings.dollars_per_million(price, rate) == pytest.approx(dollars, abs=0.005)


def test_loaded_cost_and_break_even() -> None:
    """F15: 1,709 output tokens/s at $3.5/h is $0.57 per million out, $0.28 blended, level with $0.90 at 32 % load."""
    assert ceilings.dollars_per_million(3.5, 1709) == pytest.approx(0.57, abs=0.005)
    blended = ceilings.dollars_per_million(3.5, 2 * 1709)
    assert blended == pytest.approx(0.28, abs=0.005)
    assert blended / 0.90 == pytest.approx(0.32, abs=0.005)
    assert power_dollars_per_hour(H100, 1.4, 0.1) == pytest.approx(0.10, abs=0.005)


def test_five_billion_tokens_a_month() -> None:
    """C12: that is 1,903 tokens/s all month."""
    assert pytest.approx(1903, rel=0.002) == 5e9 / (86400 * 365.25 / 12)


def test_negative_price_is_refused() -> None:
    with pytest.raises(UserError, match="negative"):
        ceilings.dollars_per_million(-1, 100)


def test_the_busiest_rank_of_experts() -> None:
    """Every step waits for the busiest rank: far above the mean in small batches, the skew remains in large ones."""
    assert kernel_time.uneven(64, 8, 1, 0.05) == 1.0
    few, many = (kernel_time.uneven(tokens, 8, 8, 0.05) for tokens in (4, 8192))
    assert few > 1.5
    assert many == pytest.approx(1.05, abs=0.03)
    assert kernel_time.uneven(1, 1, 8, 0.05) <= 8
