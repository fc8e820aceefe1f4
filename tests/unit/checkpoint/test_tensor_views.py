"""Fused matrices cut into those they join, in every layout that files have; and names that are not canonical."""

from __future__ import annotations

import pytest
import torch

from tokenmill.checkpoint.configs.tensor_names import CanonicalName, canonical, naming_of
from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription
from tokenmill.checkpoint.mapped_tensor import take_view
from tokenmill.checkpoint.mixers import Attention
from tokenmill.checkpoint.tensor_views import TensorView, split_fused
from tokenmill.errors import CheckpointError

HEADS, KV_HEADS, DIM, INNER, WIDTH = 4, 2, 8, 24, 16
ROWS = (HEADS + 2 * KV_HEADS) * DIM
MODEL = ModelDescription(
    "phi3",
    WIDTH,
    (LayerDescription((Attention(HEADS, KV_HEADS, DIM, DIM),), FeedForward(INNER)),),
    vocab_size=10,
    context_length=32,
)
FUSED, MLP = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"


def pieces(name: str, stored: torch.Tensor, grouped: bool = False) -> dict[str, torch.Tensor]:
    views = split_fused(MODEL, {name: TensorView((name,))}, grouped)
    return {key.removeprefix("model.layers.0."): take_view(view, [stored]) for key, view in views.items()}


def numbers(rows: int, columns: int = 3) -> torch.Tensor:
    return torch.arange(rows * columns).view(rows, columns)


def test_queries_then_keys_then_values() -> None:
    stored = numbers(ROWS)
    found = pieces(f"{FUSED}.weight", stored)
    assert list(found) == [f"self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(torch.cat(list(found.values())), stored)
    assert [each.shape[0] for each in found.values()] == [32, 16, 16]
    assert found["self_attn.k_proj.weight"].data_ptr() == stored[32:].data_ptr()  # nothing is copied


def test_rows_by_kv_head() -> None:
    stored = numbers(ROWS)
    by_head = stored.view(KV_HEADS, HEADS // KV_HEADS + 2, DIM, 3)
    found = pieces(f"{FUSED}.weight", stored, grouped=True)
    assert torch.equal(found["self_attn.q_proj.weight"], by_head[:, :2].reshape(-1, 3))
    assert torch.equal(found["self_attn.k_proj.weight"], by_head[:, 2].reshape(-1, 3))
    assert torch.equal(found["self_attn.v_proj.weight"], by_head[:, 3].reshape(-1, 3))


def test_gate_then_up() -> None:
    stored = numbers(2 * INNER)
    found = pieces(f"{MLP}.weight", stored)
    assert torch.equal(found["mlp.gate_proj.weight"], stored[:INNER])
    assert torch.equal(found["mlp.up_proj.weight"], stored[INNER:])


@pytest.mark.parametrize(
    ("part", "shape", "shapes"),
    [
        ("bias", (ROWS,), [(32,), (16,), (16,)]),
        ("weight_packed", (ROWS, 2), [(32, 2), (16, 2), (16, 2)]),
        ("weight_scale", (ROWS, 1), [(32, 1), (16, 1), (16, 1)]),
        ("weight_scale", (1,), [(1,)] * 3),  # one scale for the whole matrix
        ("weight_scale_inv", (ROWS // 8, 2), [(4, 2), (2, 2), (2, 2)]),  # a scale for each block of rows
        ("qweight", (2, ROWS), [(2, 32), (2, 16), (2, 16)]),  # GPTQ: outputs are columns
        ("qzeros", (2, ROWS // 8), [(2, 4), (2, 2), (2, 2)]),
        ("g_idx", (WIDTH,), [(WIDTH,)] * 3),
    ],
)
def test_parts_of_quantized_matrices(part: str, shape: tuple[int, ...], shapes: list[tuple[int, ...]]) -> None:
    found = pieces(f"{FUSED}.{part}", torch.zeros(shape))
    assert [tuple(each.shape) for each in found.values()] == shapes


def test_the_stated_shape_follows() -> None:
    found = pieces(f"{FUSED}.weight_shape", torch.tensor([ROWS, WIDTH]))
    assert [each.tolist() for each in found.values()] == [[32, WIDTH], [16, WIDTH], [16, WIDTH]]


def test_rows_that_cannot_be_cut_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight' of 61 rows"):
        pieces(f"{FUSED}.weight", numbers(61))


def test_unknown_parts_stay_for_the_reader_to_report() -> None:
    assert list(pieces(f"{FUSED}.absmax", numbers(ROWS))) == ["self_attn.qkv_proj.absmax"]


@pytest.mark.parametrize(
    ("architecture", "stored", "name"),
    [
        ("gpt2", "h.3.attn.c_attn.weight", CanonicalName("model.layers.3.self_attn.qkv_proj.weight", transposed=True)),
        ("gpt2", "transformer.h.3.ln_1.bias", CanonicalName("model.layers.3.input_layernorm.bias")),
        ("gpt2", "transformer.wpe.weight", CanonicalName("model.position_embeddings.weight")),
        ("gpt2", "transformer.h.0.attn.bias", None),
        ("gpt_neox", "gpt_neox.layers.1.attention.masked_bias", None),
        ("gpt_neox", "embed_out.weight", CanonicalName("lm_head.weight")),
        ("falcon", "transformer.h.1.ln_mlp.bias", CanonicalName("model.layers.1.post_attention_layernorm.bias")),
        (
            "stablelm",
            "model.layers.2.self_attn.q_layernorm.norms.3.weight",
            CanonicalName("model.layers.2.self_attn.q_norm.weight", part=3),
        ),
        (
            "glm4",
            "model.layers.0.post_attention_layernorm.weight",
            CanonicalName("model.layers.0.pre_feedforward_layernorm.weight"),
        ),
        ("llama", "model.layers.0.mlp.up_proj.weight", CanonicalName("model.layers.0.mlp.up_proj.weight")),
    ],
)
def test_names(architecture: str, stored: str, name: CanonicalName | None) -> None:
    assert canonical(naming_of(architecture), stored) == name
