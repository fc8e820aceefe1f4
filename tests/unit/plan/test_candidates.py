"""Which plans are tried: what chips, links and engines can run, and nothing else."""

from __future__ import annotations

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.catalog import load_catalog
from tokenmill.plan.candidates import cuts, default_engine, enumerate_plans, formats_for
from tokenmill.plan.model_names import built_in

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
    plans = enumerate_plans(built_in("llama-3.1-8b"), [CATALOG.parse_gpu("rtx-4090")], engine="llama.cpp")
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
    plans = enumerate_plans(built_in("llama-3.1-70b"), group, weights="fp8", kv="fp8", engine="sglang", tp=4)
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
        enumerate_plans(built_in("llama-3.1-8b"), [CATALOG.parse_gpu("h100x4")], **fields)  # type: ignore[arg-type]


def test_defaults() -> None:
    assert default_engine(CATALOG.find_device("mi300x")) == "vllm"
    assert default_engine(CATALOG.find_device("m4-max")) == "llama.cpp"
