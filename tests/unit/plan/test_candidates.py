"""Which plans are tried: what chips, links and engines can run, and nothing else."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.candidates import Fixed, cuts, default_engine, enumerate_plans, expert_cuts, formats_for
from tokenmill.plan.model_names import built_in
from tokenmill.resolution import DEVICE_DEFAULTS

CATALOG = load_catalog()


@pytest.mark.parametrize(
    ("device", "has", "lacks"),
    [
        ("h100-sxm", "fp8", "nvfp4"),
        ("a100-80", "int8", "fp8"),
        ("b200-sxm", "nvfp4", "mxfp4"),
        ("mi355x", "mxfp4", "nvfp4"),
        ("xeon-8480", "q4_k_m", "fp8"),
    ],
)
def test_formats_follow_the_hardware(device: str, has: str, lacks: str) -> None:
    names = [each.name for each in formats_for(CATALOG.find_device(device), built_in("llama-3.1-8b"))]
    assert has in names
    assert lacks not in names


def test_formats_follow_the_engine() -> None:
    """llama.cpp on a GPU runs GGUF blocks, not FP8, and its KV stays at 16 bits."""
    plans = enumerate_plans(built_in("llama-3.1-8b"), [CATALOG.parse_gpu("rtx-4090")], Fixed(engine="llama.cpp"))
    assert {plan.weights.name for plan in plans} >= {"q8_0", "q4_k_m"}
    assert "fp8" not in {plan.weights.name for plan in plans}
    assert {plan.kv_bytes for plan in plans} == {2.0}


def test_tensor_cuts_stay_on_the_link_and_divide_the_heads() -> None:
    model = built_in("llama-3.1-70b")
    assert list(cuts(CATALOG.find_device("h100-sxm"), 16, model)) == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)]
    assert list(cuts(CATALOG.find_device("rtx-3090"), 4, model)) == [(1, 1), (2, 1), (2, 2)]
    assert max(tp for tp, _ in cuts(CATALOG.find_device("gb200"), 72, model)) == 64


def test_what_the_user_fixes_stays_fixed() -> None:
    group = [CATALOG.parse_gpu("h100x8")]
    plans = enumerate_plans(built_in("llama-3.1-70b"), group, Fixed("fp8", "fp8", "sglang", tp=4))
    assert [(p.weights.name, p.kv_bytes, p.engine, p.tp, p.pp) for p in plans] == [("fp8", 1.0, "sglang", 4, 1)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv": "int5"}, "unknown KV dtype"),
        ({"weights": "nvfp4"}, "cannot multiply fp4"),
        ({"tp": 3}, "no combination"),
        ({"weights": "fp9"}, "unknown weight format"),
    ],
)
def test_bad_settings_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        enumerate_plans(built_in("llama-3.1-8b"), [CATALOG.parse_gpu("h100x4")], Fixed(**fields))  # type: ignore[arg-type]


def test_defaults() -> None:
    assert default_engine(CATALOG.find_device("mi300x")) == "vllm"
    assert default_engine(CATALOG.find_device("m4-max")) == "llama.cpp"


def test_experts_are_cut_or_placed_where_they_divide() -> None:
    deepseek = built_in("deepseek-v3")  # 256 experts
    assert expert_cuts(8, deepseek, "vllm") == [(8, 1, 1), (8, 1, 8), (1, 8, 8)]
    assert expert_cuts(1, deepseek, "vllm") == [(1, 1, 1)]
    assert expert_cuts(8, deepseek, "llama.cpp") == [(8, 1, 1)]
    assert expert_cuts(8, built_in("llama-3.1-70b"), "vllm") == [(8, 1, 1)]
    plans = enumerate_plans(deepseek, [CATALOG.parse_gpu("h200x8")], Fixed("fp8-block", "fp8", ep=8))
    assert {(p.tp, p.data_parallel, p.devices) for p in plans} == {(8, 1, 8), (1, 8, 8)}


def test_limits_are_the_engine_s_own_and_memory_can_be_stated() -> None:
    ours = enumerate_plans(
        built_in("llama-3.2-1b"), [CATALOG.parse_gpu("xeon-8480")], Fixed("q4_k_m", engine="tokenmill")
    )
    theirs = enumerate_plans(built_in("llama-3.1-8b"), [CATALOG.parse_gpu("h100")], Fixed("fp8", memory_share=0.98))
    assert ours[0].batch_tokens == DEVICE_DEFAULTS["cpu"].batch_tokens
    assert (theirs[0].batch_tokens, theirs[0].utilization) == (8192, 0.98)
    with pytest.raises(UserError, match="memory share"):
        Fixed(memory_share=92)
