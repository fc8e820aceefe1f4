"""The safetensors reader against files from transformers and from the safetensors package, and against damaged ones."""

from __future__ import annotations

import json
import random
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Gemma3TextConfig, Gemma3TextModel, LlamaConfig, LlamaForCausalLM

from tokenmill.checkpoint.safetensors import INDEX_FILE, SafetensorsCheckpoint
from tokenmill.errors import CheckpointError

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def write(folder: Path, tensors: dict[str, torch.Tensor], **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_raw(folder: Path, header: object, data: bytes = b"") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder


@pytest.mark.parametrize(
    ("said", "stored", "expected"),
    [
        ({"torch_dtype": "float16"}, torch.float32, "float16"),
        ({"dtype": "bfloat16"}, torch.float16, "bfloat16"),
        ({"text_config": CONFIG | {"dtype": "torch.float16"}}, torch.bfloat16, "float16"),
        ({}, torch.float16, "float16"),
        ({"torch_dtype": "auto"}, torch.bfloat16, "bfloat16"),
        ({}, torch.int32, ""),
    ],
    ids=str,
)
def test_the_type_that_a_model_computes_in(
    tmp_path: Path, said: dict[str, Any], stored: torch.dtype, expected: str
) -> None:
    folder = write(tmp_path, {"model.norm.weight": torch.zeros(32, dtype=stored)}, **said)
    assert SafetensorsCheckpoint(folder).float_type() == expected


def test_of_mixed_tensors_the_widest_counts(tmp_path: Path) -> None:
    tensors = {"model.norm.weight": torch.zeros(32), "lm_head.weight": torch.zeros(64, 32, dtype=torch.float16)}
    assert SafetensorsCheckpoint(write(tmp_path, tensors)).float_type() == "float32"


@pytest.mark.parametrize("shard_size", ["10MB", "10KB"], ids=["one file", "shards"])
def test_a_saved_model(tmp_path: Path, shard_size: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"}))
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (shard_size == "10KB")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = SafetensorsCheckpoint(tmp_path)
        expected = model.state_dict()
        assert set(checkpoint.names()) == set(expected)
        for name, value in expected.items():
            stored = checkpoint.tensor(name)
            assert (stored.type_name, stored.shape) == ("F32", tuple(value.shape))
            assert torch.equal(stored.data, value)
    assert (checkpoint.description.num_layers, checkpoint.description.eos_ids) == (2, (2,))
    assert checkpoint.quantization() == {}


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
     torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool],
)  # fmt: skip
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.randint(0, 2, (3, 5)).to(dtype)
    stored = SafetensorsCheckpoint(write(tmp_path, {"a": value})).tensor("a")
    assert stored.data.dtype == dtype
    assert torch.equal(stored.data.view(torch.uint8), value.view(torch.uint8))


def test_misaligned_and_empty_tensors(tmp_path: Path) -> None:
    header = {
        "odd": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "empty": {"dtype": "F16", "shape": [0, 4], "data_offsets": [9, 9]},
        "scalar": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
    }
    checkpoint = SafetensorsCheckpoint(write_raw(tmp_path, header, b"\x07" + struct.pack("<2f", 1.5, -2.5)))
    assert checkpoint.tensor("odd").data.tolist() == [1.5, -2.5]
    assert checkpoint.tensor("empty").data.shape == (0, 4)
    assert checkpoint.tensor("scalar").data.item() == 7


def test_quantization_config_and_generation_config(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)}, quantization_config={"quant_method": "awq", "bits": 4}, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert checkpoint.quantization() == {"quant_method": "awq", "bits": 4}
    assert checkpoint.description.eos_ids == (5, 6, 2)
    assert checkpoint.description.name == tmp_path.name


def test_what_the_text_model_does_not_use_is_left_out(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(1),
        "lm_head.weight": torch.ones(1),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(1),
    }
    tied = SafetensorsCheckpoint(write(tmp_path / "tied", tensors, tie_word_embeddings=True))
    assert set(tied.names()) == {"model.embed_tokens.weight"}
    untied = SafetensorsCheckpoint(write(tmp_path / "untied", tensors))
    assert set(untied.names()) == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma3(tmp_path: Path, prefix: str) -> None:
    text = Gemma3TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        head_dim=8, vocab_size=64,
    )  # fmt: skip
    weights = Gemma3TextModel(text).state_dict()
    image = "model.vision_tower." if prefix.startswith("model.") else "vision_tower."
    tensors = {prefix + name: value for name, value in weights.items()} | {f"{image}x.weight": torch.zeros(1)}
    write(tmp_path, tensors, model_type="gemma3", text_config=text.to_dict())
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == {f"model.{name}" for name in weights}
    assert checkpoint.description.architecture == "gemma3"
    assert checkpoint.description.head_dim == 8


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"{", "JSON"),
        (b"[1, 2]", "JSON object"),
        (b"[" * 100_000, "JSON"),
        ({"a": 3}, "'a' has no description"),
        ({"a": ENTRY | {"dtype": "F4"}}, "F4"),
        ({"a": ENTRY | {"shape": [-2]}}, "shape"),
        ({"a": ENTRY | {"shape": [2.0]}}, "shape"),
        ({"a": ENTRY | {"shape": [2**40, 2**40]}}, "shape"),
        ({"a": ENTRY | {"shape": [3]}}, "8 bytes"),
        ({"a": ENTRY | {"data_offsets": [8, 0]}}, "-8 bytes"),
        ({"a": ENTRY | {"data_offsets": [0]}}, "offsets"),
        ({"a": ENTRY | {"data_offsets": [4, 12]}}, "4 bytes past the end"),
    ],
)
def test_damaged_headers(tmp_path: Path, header: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(write_raw(tmp_path, header, bytes(8)))


def test_truncation_anywhere_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.randn(20, 4), "b": torch.randn(3)})
    data = (tmp_path / "model.safetensors").read_bytes()
    generator = random.Random(0)
    for length in [0, 5, 8, 9, *(generator.randrange(len(data)) for _ in range(100))]:
        (tmp_path / "model.safetensors").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="download"):
            SafetensorsCheckpoint(tmp_path)


def test_shards_that_are_not_what_the_index_says(tmp_path: Path) -> None:
    write(tmp_path, {"a": torch.zeros(1)})
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")

    def open_with(weight_map: object) -> None:
        (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
        SafetensorsCheckpoint(tmp_path)

    open_with({"a": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors is missing"):
        open_with({"a": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"'b' in one\.safetensors"):
        open_with({"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(CheckpointError, match="not a file name"):
        open_with({"a": "../one.safetensors"})
    with pytest.raises(CheckpointError, match="weight_map"):
        open_with([])


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = SafetensorsCheckpoint(write(tmp_path, {"a": torch.zeros(1)}))
    assert "b" not in checkpoint
    with pytest.raises(CheckpointError, match="'b'"):
        checkpoint.tensor("b")
