"""Descriptions and tokenizers written as Hugging Face files, read back by us and by transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from tests.parity.tiny_models import CONFIGS, WRITTEN
from tests.unit.checkpoint.gguf_builder import write_model
from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.gguf_header import read_gguf_metadata
from tokenmill.checkpoint.gguf_tokenizer import read_tokenizer
from tokenmill.checkpoint.hf_config import describe
from tokenmill.checkpoint.hf_export import (
    export_config,
    export_tokenizer,
    exported_description,
    generation_config,
    to_gguf_layout,
    to_hf_layout,
)
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.rope_divisors import fit_llama3, llama3_divisors
from tokenmill.checkpoint.tokenizer_export import build_backend
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import CheckpointError


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - set(WRITTEN)))
def test_what_is_not_written_is_refused_by_name(name: str) -> None:
    description = describe(CONFIGS[name]().to_dict())
    with pytest.raises(CheckpointError, match=rf"'{description.architecture}' cannot be written|norms of each head"):
        export_config(description)


@pytest.mark.parametrize("name", WRITTEN)
def test_config_says_what_it_was_made_from(name: str, tmp_path: Path) -> None:
    theirs = CONFIGS[name]()
    description = describe(theirs.to_dict())
    config = export_config(description, "float16")
    assert describe(config) == description
    assert config["dtype"] == "float16"
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(theirs)
    if description.rope_tables:
        assert again.rope_parameters == _without_defaults(theirs.rope_parameters, again.rope_parameters)
    for key in ("head_dim", "layer_types", "sliding_window", "tie_word_embeddings", "query_pre_attn_scalar"):
        if getattr(theirs, key, None) is not None:
            assert getattr(again, key) == getattr(theirs, key), key


def _without_defaults(expected: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """An exported yarn also spells out what the class would assume."""
    return {**{key: given[key] for key in ("beta_fast", "beta_slow", "truncate") if key in given}, **expected}


def test_several_ends_and_their_order() -> None:
    description = replace(describe(CONFIGS["llama"]().to_dict()), eos_ids=(7, 3), name="somewhere/model")
    assert generation_config(description) == {"bos_token_id": 1, "eos_token_id": [7, 3]}
    assert describe(export_config(description)) == description


def test_what_no_model_type_says_is_refused() -> None:
    description = describe(CONFIGS["llama"]().to_dict()).with_attention(qkv_bias=True)  # and no bias on the output
    with pytest.raises(CheckpointError, match="output_bias"):
        export_config(description)


@pytest.mark.parametrize("context", [8192, 4096])
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_divisors_tell_their_rule(factor: float, context: int) -> None:
    wavelengths = [2 * math.pi * 5e5 ** (2 * place / 64) for place in range(32)]
    rule = RopeScaling("llama3", factor, context, low_freq_factor=1.0, high_freq_factor=4.0)
    stored = torch.tensor(llama3_divisors(rule, wavelengths)).tolist()  # float32, as in the file
    assert fit_llama3(stored, 64, 5e5) == rule
    assert fit_llama3([1.0] * 32, 64, 5e5) == RopeScaling()
    with pytest.raises(CheckpointError, match="llama3"):
        fit_llama3([1.0 + place for place in range(32)], 64, 5e5)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_layouts_are_inverse(architecture: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", architecture)
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    target = exported_description(checkpoint)
    assert not target.rope_interleaved
    changed = 0
    for name in checkpoint.names():
        weight = torch.arange(math.prod(checkpoint.tensor(name).shape)).view(checkpoint.tensor(name).shape).float()
        there = to_hf_layout(name, weight, checkpoint.description)
        changed += not torch.equal(there, weight)
        assert torch.equal(to_gguf_layout(name, there, target), weight), name
    assert changed == (6 if architecture == "llama" else 3 * 6 + 1)  # q and k; six norms a layer and the last one


def _texts(data_path: Path, size: int) -> list[str]:
    files = sorted((data_path / "text").glob("*.txt"))
    odd = ["", "  two  spaces\n\n", "日本 😀 é", "a\t\tb    c", "▁▁x", "<|im_start|>user\nhi<|im_end|>\n<s>x</s>"]
    return [*(path.read_text()[:size] for path in files), *odd]


@pytest.mark.parametrize("alias", ["smollm2", "stories15m"])
def test_tokenizer_gives_the_same_ids(
    alias: str, data_path: Path, model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(model_path(alias))
    written = export_tokenizer(checkpoint, tmp_path)
    assert {path.name for path in written} >= {"tokenizer.json", "tokenizer_config.json"}
    (tmp_path / "config.json").write_text(json.dumps(export_config(exported_description(checkpoint))))
    ours, again, theirs = (
        load_tokenizer(checkpoint.path),
        load_tokenizer(tmp_path),
        AutoTokenizer.from_pretrained(tmp_path),
    )
    for text in _texts(data_path, 60_000):
        ids = ours.encode(text, parse_special=True)
        assert again.encode(text, parse_special=True) == ids
        assert theirs.encode(text) == ids
        assert again.encode(text) == ours.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert (again.bos_id, again.special_ids) == (ours.bos_id, ours.special_ids)
    template = load_chat_template(checkpoint.path)
    if template is not None:
        messages = [{"role": "user", "content": "Hello"}]
        copy = load_chat_template(tmp_path)
        assert copy is not None
        expected = template.render(messages)
        assert copy.render(messages) == expected
        assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == expected


def test_sentencepiece_scores_become_merges(data_path: Path, vocabulary: Callable[[str], Path]) -> None:
    """Phi-3 took over llama 2's vocabulary; its special tokens eat the blanks after them."""
    path = vocabulary("phi-3")
    backend, ours = build_backend(read_tokenizer(read_gguf_metadata(path))), load_tokenizer(path)
    for text in [*_texts(data_path, 20_000), "<|user|>\n Hi<|end|>\n<|assistant|>\n", "<unk>x</s>"]:
        assert backend.encode(text).ids == ours.encode(text, parse_special=True), repr(text[:40])


def test_a_directory_without_a_tokenizer_is_refused(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).symlink_to(model_path("stories15m") / name)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export_tokenizer(open_checkpoint(source), tmp_path)


def test_descriptions_of_real_files_export(model_path: Callable[[str], Path]) -> None:
    for alias in ("smollm2", "gemma3-270m", "qwen2.5-coder-1.5b"):
        description: ModelDescription = exported_description(open_checkpoint(model_path(alias)))
        assert describe(export_config(description)) == description
