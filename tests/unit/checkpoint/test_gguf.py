"""The GGUF reader against files from the gguf package: contents, descriptions per architecture, and refusals."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from tests.unit.checkpoint.gguf_builder import (
    FFN,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    VOCAB,
    layer_shapes,
    tokens,
    write_model,
)
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.errors import CheckpointError
from tokenmill.kernels.ref_ggml import dequantize

Settings = Callable[[gguf.GGUFWriter], object]


def describe(path: Path, architecture: str, settings: Settings | None = None) -> ModelDescription:
    write_model(path, architecture, settings)
    return GGUFCheckpoint(path).description


def test_tensors_and_metadata(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    values = write_model(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns about read-only memory
        checkpoint = GGUFCheckpoint(path)
        embedding = checkpoint.tensor("model.embed_tokens.weight")
        norm = checkpoint.tensor("model.layers.1.input_layernorm.weight")
    assert len(list(checkpoint.names())) == len(values)
    assert (embedding.type_name, embedding.shape) == ("Q8_0", (VOCAB, HIDDEN))
    assert embedding.data.shape == (VOCAB, HIDDEN // 32 * 34)
    expected = values["token_embd.weight"]
    assert np.abs(dequantize("Q8_0", embedding.data).numpy() - expected).max() < 0.02
    assert (norm.type_name, norm.data.dtype) == ("F32", torch.float32)
    assert np.array_equal(norm.data.numpy(), values["blk.1.attn_norm.weight"])
    down = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    assert down.shape == (HIDDEN, FFN)
    assert checkpoint.quantization() == {}
    assert checkpoint.metadata["tokenizer.ggml.tokens"] == tokens()
    assert checkpoint.metadata["tokenizer.ggml.scores"][:3] == [0.0, -1.0, -2.0]
    assert checkpoint.metadata["general.name"] == "tiny llama"
    assert "nothing" not in checkpoint.metadata


def test_writing_to_a_tensor_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    before = path.read_bytes()
    GGUFCheckpoint(path).tensor("model.norm.weight").data.zero_()
    assert path.read_bytes() == before


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_name_is_canonical(tmp_path: Path, architecture: str) -> None:
    write_model(tmp_path / "model.gguf", architecture)
    names = set(GGUFCheckpoint(tmp_path / "model.gguf").names())
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.2.self_attn.o_proj.weight"} <= names
    assert all(name.startswith("model.") for name in names)
    extra = 3 * LAYERS if architecture == "qwen2" else 0
    assert len(names) == 2 + LAYERS * len(layer_shapes(architecture)) + extra
    sandwich = {f"model.layers.0.{name}_layernorm.weight" for name in ("pre_feedforward", "post_feedforward")}
    assert (sandwich <= names) == (architecture == "gemma3")
    assert "model.layers.0.post_attention_layernorm.weight" in names


def test_llama_description(tmp_path: Path) -> None:
    description = describe(tmp_path / "model.gguf", "llama")
    sizes = (description.hidden_size, description.num_heads, description.num_kv_heads, description.head_dim)
    assert sizes == (HIDDEN, HEADS, KV_HEADS, HIDDEN // HEADS)
    assert (description.num_layers, description.intermediate_size, description.vocab_size) == (LAYERS, FFN, VOCAB)
    assert description.context_length == 512
    assert description.rope_interleaved
    assert description.tie_embeddings
    assert description.layer_kinds == ("full",) * LAYERS
    assert (description.rope_table("full").theta, description.rope_table("full").scaling.kind) == (50000.0, "default")
    assert (description.bos_id, description.eos_ids) == (1, (2, 3))
    assert not description.layers[0].attention.qkv_bias


def test_llama_with_window_scaling_output_and_rope_factors(tmp_path: Path) -> None:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(128)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(128)
        writer.add_eot_token_id(4)

    factors = np.arange(1, 9, dtype=np.float32)
    extra = {"rope_freqs.weight": factors, "output.weight": np.ones((VOCAB, HIDDEN), np.float32)}
    write_model(tmp_path / "model.gguf", "llama", settings, extra)
    checkpoint = GGUFCheckpoint(tmp_path / "model.gguf")
    description = checkpoint.description
    assert (description.sliding_window, set(description.layer_kinds)) == (128, {"sliding"})
    assert not description.tie_embeddings
    assert "lm_head.weight" in checkpoint
    assert np.array_equal(checkpoint.tensor("rope_freqs.weight").data.numpy(), factors)
    scaling = description.rope_table("full").scaling
    assert (scaling.kind, scaling.factor, scaling.original_context, scaling.attention_factor) == (
        "yarn",
        4.0,
        128,
        None,
    )
    assert description.eos_ids == (2, 4, 3)


def test_qwen_descriptions(tmp_path: Path) -> None:
    qwen2 = describe(tmp_path / "qwen2.gguf", "qwen2", lambda writer: writer.add_sliding_window(64))
    assert qwen2.layers[0].attention.qkv_bias
    assert not qwen2.layers[0].attention.output_bias
    assert not qwen2.rope_interleaved
    assert qwen2.num_sliding_layers == 0
    qwen3 = describe(tmp_path / "qwen3.gguf", "qwen3", lambda writer: writer.add_key_length(16))
    attention = qwen3.layers[0].attention
    assert (qwen3.architecture, qwen3.head_dim, attention.qkv_bias, attention.head_norms) == (
        "qwen3",
        16,
        False,
        "head",
    )


def test_gemma3_description(tmp_path: Path) -> None:
    def settings(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(32)
        writer.add_key_length(16)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)

    description = describe(tmp_path / "model.gguf", "gemma3", settings)
    assert description.layer_kinds == ("sliding", "full", "sliding")
    assert (description.sliding_window, description.rope_table("sliding").theta) == (32, 10000.0)
    scaling = description.rope_table("full").scaling
    assert (scaling.kind, scaling.factor) == ("linear", 8.0)
    assert (description.norm_offset, description.activation) == (0.0, "gelu_tanh")
    assert (description.layers[0].attention.scale, description.embedding_scale) == (0.25, 8.0)


def test_version_2_reads_like_version_3(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<I", 2)
    path.write_bytes(data)
    assert GGUFCheckpoint(path).description.num_layers == LAYERS


@pytest.mark.parametrize(
    ("version", "message"),
    [
        (struct.pack("<I", 1), "version 1"),
        (struct.pack(">I", 3), "big-endian"),
        (struct.pack("<I", 99), "version 99"),
    ],
)
def test_other_versions_are_refused(tmp_path: Path, version: bytes, message: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    data = bytearray(path.read_bytes())
    data[4:8] = version
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(path)


def longrope(writer: gguf.GGUFWriter) -> None:
    writer.add_string("llama.rope.scaling.type", "longrope")
    writer.add_rope_scaling_factor(2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (lambda writer: writer.add_uint16("split.count", 3), "3 parts"),
        (lambda writer: writer.add_rope_dimension_count(7), "rotated"),
        (lambda writer: writer.add_rope_dimension_sections([2, 3, 3, 0]), "M-RoPE"),
        (lambda writer: writer.add_value_length(32), "different sizes"),
        (lambda writer: writer.add_causal_attention(False), "causal"),
        (lambda writer: writer.add_uint32("general.alignment", 12), "alignment"),
        (lambda writer: writer.add_eot_token_id(VOCAB), "eot_token_id"),
        (longrope, "longrope"),
    ],
)
def test_variants_we_do_not_run_are_refused(tmp_path: Path, settings: Settings, message: str) -> None:
    write_model(tmp_path / "model.gguf", "llama", settings)
    with pytest.raises(CheckpointError, match=message):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_unknown_architecture_lists_what_we_run(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", "bloom")
    with pytest.raises(CheckpointError, match=r"'bloom' is not supported.*llama.*gemma3"):
        GGUFCheckpoint(tmp_path / "model.gguf")


def test_truncated_file_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path)
    path.write_bytes(path.read_bytes()[:-5000])
    with pytest.raises(CheckpointError, match=r"past the end of the file.*download"):
        GGUFCheckpoint(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        GGUFCheckpoint(tmp_path / "model.gguf").tensor("lm_head.weight")


def test_real_file_equals_the_gguf_package(model_path: Callable[[str], Path]) -> None:
    path = model_path("smollm2")
    checkpoint = GGUFCheckpoint(path)
    theirs = gguf.GGUFReader(path).tensors
    for name, tensor in zip(checkpoint.names(), theirs, strict=True):  # ours keep the file's order
        stored = checkpoint.tensor(name)
        assert stored.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert np.array_equal(stored.data[:4].numpy(), tensor.data[:4])


@pytest.mark.parametrize("alias", ["smollm2", "gemma3-270m", "qwen2.5-coder-1.5b"])
def test_real_values_equal_the_gguf_package(alias: str, model_path: Callable[[str], Path]) -> None:
    checkpoint = GGUFCheckpoint(model_path(alias))
    sample: dict[str, torch.Tensor] = {}
    for name in checkpoint.names():
        stored = checkpoint.tensor(name)
        sample.setdefault(stored.type_name, stored.data[:64])
    assert len(sample) >= 3
    for type_name, data in sample.items():
        ours = dequantize(type_name, data)
        assert np.array_equal(ours.numpy(), gguf.quants.dequantize(data.numpy(), gguf.GGMLQuantizationType[type_name]))
        assert 0 < ours.abs().mean() < 100


def test_real_descriptions(model_path: Callable[[str], Path]) -> None:
    gemma = GGUFCheckpoint(model_path("gemma3-270m")).description
    assert [layer for layer, kind in enumerate(gemma.layer_kinds) if kind == "full"] == [5, 11, 17]
    assert (gemma.head_dim, gemma.layers[0].attention.scale) == (256, 0.0625)
    assert (gemma.vocab_size, gemma.eos_ids) == (262144, (1, 106))
    smollm = GGUFCheckpoint(model_path("smollm2")).description
    assert (smollm.rope_interleaved, smollm.tie_embeddings, smollm.eos_ids) == (True, True, (2, 0))
