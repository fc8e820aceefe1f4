"""The types of each mix, and with them the size of the file: to the byte what llama-quantize writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.checkpoint.gguf_writer import file_bytes
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.ggml.export import plan_gguf, plan_slots
from tokenmill.quantize.ggml.mixes import MIXES, Shape, choose_types, find_mix

# llama.cpp's files (llama-quantize, August 2026).
PEER_BYTES = {
    "smollm2": {
        "Q6_K": 138_382_912,
        "Q5_K_M": 112_103_488,
        "Q5_0": 104_997_952,
        "Q4_1": 98_362_432,
        "IQ4_NL": 92_058_688,
        "Q3_K_M": 93_510_208,
        "Q2_K": 88_201_792,
    },
    "qwen2.5-coder-1.5b": {
        "Q6_K": 1_464_178_752,
        "Q5_K_M": 1_285_494_336,
        "Q4_K_M": 1_117_320_768,
        "Q3_K_M": 924_456_000,
        "Q2_K": 752_880_192,
    },
    "stories15m": {
        "Q8_0": 26_671_360,
        "Q6_K": 26_349_952,
        "Q5_K_M": 21_952_768,
        "Q5_1": 21_925_120,
        "Q5_0": 20_975_872,
        "Q4_K_M": 20_986_240,
        "Q4_K_S": 20_830_720,
        "Q4_1": 20_026_624,
        "Q4_0": 19_077_376,
        "IQ4_NL": 19_077_376,
        "IQ4_XS": 19_035_904,
        "Q3_K_M": 19_212_160,
        "Q2_K": 18_901_120,
    },
}
# Of a safetensors source we make the metadata ourselves; of stories15m it comes out this much longer than that of
# llama.cpp's llama2.c converter (the keys vocab_size, pre, quantization_version and the like), whatever the type.
LONGER_METADATA = {"stories15m": 224}


@pytest.mark.parametrize("alias", list(PEER_BYTES))
def test_planned_bytes_are_llama_cpps(alias: str, model_path: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(model_path(alias))
    plan = plan_gguf(checkpoint, "Q8_0", untied_output=alias == "stories15m")
    for mix, peer_bytes in PEER_BYTES[alias].items():
        nbytes = file_bytes(plan.pairs, plan_slots(plan.source, MIXES[mix], has_importance=False))
        assert nbytes - peer_bytes == LONGER_METADATA.get(alias, 0), mix


def types_of(mix: str, row: int = 4096, layers: int = 32, heads: int = 32, kv_heads: int = 32, **model: bool) -> dict:
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (1000, row), "output_norm.weight": (row,)}
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(layers):
        shapes |= {f"blk.{layer}.{part}.weight": (row, row) for part in parts}
        shapes[f"blk.{layer}.attn_q_norm.weight"] = (128,)
    settings = {"has_output": True, "has_importance": False} | model
    if settings["has_output"]:
        shapes["output.weight"] = (1000, row)
    return choose_types(find_mix(mix), shapes, Shape(layers, heads, kv_heads, **settings))


def layers_of(types: dict, part: str, type_name: str) -> list[int]:
    return [layer for layer in range(32) if types[f"blk.{layer}.{part}.weight"] == type_name]


def test_more_bits_go_to_the_first_and_last_eighth_and_every_third() -> None:
    types = types_of("Q4_K_M")
    expected = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert layers_of(types, "attn_v", "Q6_K") == layers_of(types, "ffn_down", "Q6_K") == expected
    assert {types[f"blk.{layer}.attn_q.weight"] for layer in range(32)} == {"Q4_K"}
    assert (types["output.weight"], types["token_embd.weight"], types["output_norm.weight"]) == ("Q6_K", "Q4_K", "F32")
    assert types["blk.0.attn_q_norm.weight"] == "F32"


def test_mixes_by_part() -> None:
    small = types_of("Q4_K_S")
    assert layers_of(small, "attn_v", "Q5_K") == layers_of(small, "ffn_down", "Q5_K") == [0, 1, 2, 3]
    medium = types_of("Q3_K_M")
    assert layers_of(medium, "attn_v", "Q5_K") == layers_of(medium, "ffn_down", "Q5_K") == [0, 1]
    assert medium["blk.9.attn_v.weight"] == medium["blk.9.attn_output.weight"] == "Q4_K"
    two = types_of("Q2_K")
    assert (two["blk.5.attn_v.weight"], two["blk.5.ffn_down.weight"], two["blk.5.ffn_up.weight"]) == (
        "Q3_K",
        "Q3_K",
        "Q2_K",
    )


def test_few_value_rows_get_more_bits() -> None:
    assert types_of("Q2_K", kv_heads=8)["blk.5.attn_v.weight"] == "Q4_K"
    assert types_of("IQ4_XS", kv_heads=8)["blk.5.attn_v.weight"] == "Q5_K"
    assert types_of("IQ4_XS", kv_heads=16)["blk.5.attn_v.weight"] == "IQ4_XS"
    assert types_of("Q3_K_S", kv_heads=8, layers=80)["blk.5.attn_v.weight"] == "Q5_K"  # a 70B model


def test_an_importance_changes_the_first_down_projections() -> None:
    assert types_of("IQ4_NL")["blk.0.ffn_down.weight"] == "Q5_K"
    assert types_of("IQ4_NL", has_importance=True)["blk.0.ffn_down.weight"] == "IQ4_NL"
    assert types_of("Q4_0", has_importance=True)["blk.0.ffn_down.weight"] == "Q4_1"


@pytest.mark.parametrize(
    ("mix", "fallback"),
    [
        ("Q2_K", "Q4_0"),
        ("Q3_K_S", "Q4_0"),
        ("Q4_K_S", "Q5_0"),
        ("Q5_K_S", "Q5_1"),
        ("Q6_K", "Q8_0"),
        ("IQ4_XS", "IQ4_NL"),
        ("IQ2_XXS", "IQ4_NL"),
        ("IQ3_M", "IQ4_NL"),
        ("TQ1_0", "Q4_0"),
    ],
)
def test_rows_that_256_does_not_divide_fall_back(mix: str, fallback: str) -> None:
    types = types_of(mix, row=288)
    assert types["blk.5.attn_q.weight"] == fallback
    assert types["output.weight"] == "Q8_0"
    assert types_of(mix, row=40)["blk.5.attn_q.weight"] == "F16"


def test_mixes_of_two_and_three_bits() -> None:
    parts = ("attn_q", "attn_v", "attn_output", "ffn_up", "ffn_down")
    expected = {
        "IQ2_XXS": ("IQ2_XXS", "Q2_K", "IQ2_XXS", "IQ2_XXS", "IQ2_XXS"),
        "IQ2_XS": ("IQ2_XS", "Q2_K", "IQ2_XS", "IQ2_XS", "IQ2_XS"),
        "IQ2_S": ("IQ2_XS", "IQ3_S", "IQ3_S", "IQ2_XS", "IQ2_XS"),
        "IQ2_M": ("IQ2_S", "IQ3_S", "IQ3_S", "IQ2_S", "IQ2_S"),
        "IQ3_XXS": ("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ3_XXS", "IQ3_XXS"),
        "IQ3_XS": ("IQ3_XXS", "IQ3_S", "IQ3_S", "IQ3_XXS", "IQ3_S"),
        "IQ3_S": ("IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S", "IQ3_S"),
        "IQ3_M": ("IQ3_S", "Q4_K", "Q4_K", "IQ3_S", "IQ3_S"),
        "TQ2_0": ("TQ2_0", "TQ2_0", "TQ2_0", "TQ2_0", "TQ2_0"),
    }
    for mix, types in expected.items():
        found = types_of(mix, has_importance=True)
        assert tuple(found[f"blk.9.{part}.weight"] for part in parts) == types, mix
        assert types_of(mix, kv_heads=8)["blk.9.attn_v.weight"] == ("TQ2_0" if mix == "TQ2_0" else "Q4_K")
    small, large = types_of("IQ2_XS"), types_of("IQ2_M")
    assert (small["output.weight"], small["token_embd.weight"], small["blk.0.ffn_down.weight"]) == (
        "Q5_K",
        "Q2_K",
        "Q2_K",
    )
    assert (large["token_embd.weight"], large["blk.0.ffn_down.weight"]) == ("IQ3_S", "IQ3_S")
    assert types_of("IQ3_S")["output.weight"] == "Q6_K"
    assert types_of("IQ3_XXS")["blk.9.ffn_down.weight"] == "Q3_K"  # without an importance


def test_a_tied_embedding_has_the_type_of_the_head() -> None:
    assert types_of("Q4_K_M", has_output=False)["token_embd.weight"] == "Q6_K"
    assert types_of("Q8_0", has_output=False)["token_embd.weight"] == "Q8_0"


def test_unknown_mix() -> None:
    assert find_mix("q4_k_m") is MIXES["Q4_K_M"]
    with pytest.raises(UserError, match="unknown GGUF type 'Q4_K_X'"):
        find_mix("Q4_K_X")
