"""Memory against what engines logged: weights, KV tokens and refusals (F1, F12 and the cases of C12 to C14)."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import find_device
from tokenmill.hardware.memory import GIB, RuntimeCosts
from tokenmill.hardware.weight_formats import find_format
from tokenmill.plan.cost.closed_loop import Load
from tokenmill.plan.cost.performance import estimate
from tokenmill.plan.question.deployment import (
    Deployment,
    bits_per_weight,
    plan_memory,
    room_for,
    total_weight_bytes,
    weight_bytes_per_device,
)
from tokenmill.plan.question.model_names import built_in

NO_GRAPHS = RuntimeCosts(graphs=0.0)  # engines of the time did not count captured graphs


@pytest.mark.parametrize(
    ("name", "bits"), [("q4_k_m", 4.894), ("q5_k_m", 5.70), ("q2_k", 3.159), ("q8_0", 8.50), ("q3_k_m", 4.00)]
)
def test_gguf_mixes_of_llama_8b(name: str, bits: float) -> None:
    """C14: published bits per weight of llama.cpp's mixes."""
    assert bits_per_weight(built_in("llama-3.1-8b"), find_format(name)) == pytest.approx(bits, rel=0.005)


def test_q4_k_m_is_more_than_half_of_q8() -> None:
    model = built_in("llama-3.1-8b")
    q4, q8 = (total_weight_bytes(model, find_format(name)) for name in ("q4_k_m", "q8_0"))
    assert q4 / GIB == pytest.approx(4.58, rel=0.005)
    assert q4 / q8 == pytest.approx(0.576, abs=0.003)


def test_weights_of_known_checkpoints() -> None:
    assert total_weight_bytes(built_in("llama-3.1-8b"), find_format("bf16")) / GIB == pytest.approx(14.96, rel=0.005)
    awq = total_weight_bytes(built_in("llama-3.1-70b"), find_format("awq"))
    assert awq / 1e9 == pytest.approx(39.8, rel=0.005)  # C13: not 35 GB
    w8a8 = Deployment(built_in("llama-3.1-70b"), find_device("h100"), find_format("w8a8"))
    assert weight_bytes_per_device(w8a8) / GIB == pytest.approx(67.7, rel=0.005)


def test_llama_70b_w8a8_on_one_h100() -> None:
    """C12, vllm#12569: 1,381 blocks = 22,096 tokens at 0.98. The step size is not in the log; 16k explains it."""
    d = Deployment(
        built_in("llama-3.1-70b"),
        find_device("h100"),
        find_format("w8a8"),
        utilization=0.98,
        batch_tokens=16384,
        runtime=NO_GRAPHS,
    )
    assert room_for(d, 1).kv_tokens == pytest.approx(22_096, rel=0.05)
    assert room_for(d, 2048).sequences == pytest.approx(10, abs=1)


def test_fp8_with_fp8_cache_at_the_default_share() -> None:
    d = Deployment(built_in("llama-3.1-70b"), find_device("h100"), find_format("fp8"), kv_bytes=1.0)
    assert room_for(d, 1).kv_tokens == pytest.approx(22_000, rel=0.05)


def test_llama_8b_on_an_rtx_4090() -> None:
    """LLMServingSim#59: 41,408 tokens logged."""
    d = Deployment(built_in("llama-3.1-8b"), find_device("rtx-4090"), utilization=0.9, runtime=NO_GRAPHS)
    assert room_for(d, 1).kv_tokens == pytest.approx(41_408, rel=0.05)


@pytest.mark.parametrize(("tp", "logged"), [(1, 53.29), (2, 58.97)])
def test_llama_8b_kv_memory_on_h100(tp: int, logged: float) -> None:
    """vllm#10511: GiB left for KV, by an engine that counted the context as its own."""
    costs = RuntimeCosts(context=0.6 * GIB, communication=0.39 * GIB, graphs=0.0)
    d = Deployment(built_in("llama-3.1-8b"), find_device("h100"), utilization=0.9, tp=tp, runtime=costs)
    assert plan_memory(d).kv / GIB == pytest.approx(logged, rel=0.05)


def test_qwen_32b_on_two_l40s() -> None:
    """vllm#15815: 30.71 GiB of weights per device, 7.71 GiB for KV, 3,947 blocks of 16."""
    d = Deployment(built_in("qwen2.5-32b"), find_device("l40s"), utilization=0.9, tp=2, runtime=NO_GRAPHS)
    assert weight_bytes_per_device(d) / GIB == pytest.approx(30.71, rel=0.01)
    assert room_for(d, 1).kv_tokens == pytest.approx(3947 * 16, rel=0.05)


def test_llama2_7b_on_a100() -> None:
    """vllm#2031: 7,351 blocks of 16."""
    d = Deployment(
        built_in("llama-2-7b"), find_device("a100-80"), utilization=0.9, batch_tokens=4096, runtime=NO_GRAPHS
    )
    assert room_for(d, 1).kv_tokens == pytest.approx(7351 * 16, rel=0.05)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_opt_13b_as_distserve_logged(tp: int) -> None:
    """F12: weights and KV together are 92.5 to 93.0 % of 80 GiB (0.95 asked for, the context counted)."""
    costs = RuntimeCosts(context=0.5 * GIB, graphs=0.36 * GIB)
    device = find_device("custom:mem=80,usable=80,bw=2039,bf16=312")
    d = Deployment(built_in("opt-13b"), device, utilization=0.95, tp=tp, batch_tokens=2048, runtime=costs)
    plan = plan_memory(d)
    assert (plan.kv + plan.weights) / (80 * GIB) == pytest.approx(0.9275, abs=0.01)


@pytest.mark.parametrize(("device", "weights"), [("h100", "bf16"), ("a100-40", "awq")])
def test_what_cannot_fit_is_refused(device: str, weights: str) -> None:
    d = Deployment(built_in("llama-3.1-70b"), find_device(device), find_format(weights))
    with pytest.raises(UserError, match=r"does not fit.*weights") as error:
        estimate(d, Load(1000, 200, 1))
    assert error.value.remedy


def test_int8_cache_halves_less_scales() -> None:
    """C1: 48.4 % with a float32 scale per token and head, not 75 %."""
    model = built_in("llama-3.1-70b")
    saved = 1 - model.kv_bytes_per_token(value_bytes=1 + 4 / 128) / model.kv_bytes_per_token()
    assert saved == pytest.approx(0.484, abs=0.001)


def test_all_experts_take_memory() -> None:
    """Memory counts every expert, not the active ones; expert cuts spread them over the group."""
    model = built_in("mixtral-8x7b")
    assert total_weight_bytes(model, find_format("bf16")) / 1e9 == pytest.approx(93.4, rel=0.01)
    whole = weight_bytes_per_device(Deployment(model, find_device("h200")))
    copied = Deployment(model, find_device("h200"), data_parallel=4, ep=4)
    assert whole / 4 < weight_bytes_per_device(copied) < whole / 3


def test_impossible_parallelism_is_refused() -> None:
    with pytest.raises(UserError, match="tp must be at least 1"):
        Deployment(built_in("llama-3.1-8b"), find_device("h100"), tp=0)
    with pytest.raises(UserError, match="ep 8 exceeds"):
        Deployment(built_in("mixtral-8x7b"), find_device("h100"), ep=8)
