"""Adapters against the PEFT library: what we read, applied to the base, is what PEFT merges."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import make
from tests.peft_adapters import make_adapter, save_merged
from tests.unit.quantize.test_convert import add_tokenizer
from tokenmill.checkpoint.adapters.adapter import Adapter
from tokenmill.checkpoint.adapters.fit import check_base
from tokenmill.checkpoint.adapters.join import joined_as_stored
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.adapters.write import write_adapter
from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.quantize.convert import convert

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rsdora": {"use_dora": True, "use_rslora": True},
    "ranks": {"rank_pattern": {"layers.1.self_attn.q_proj": 3, r".*2\.mlp\.down_proj": 7}, "use_rslora": True},
    "alphas": {"alpha_pattern": {"v_proj": 5, "^model.layers.0.self_attn.q_proj": 31}},
    "edges": {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "whole": {"modules_to_save": ["lm_head", "embed_tokens"]},
    "norms": {"modules_to_save": ["input_layernorm"]},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "all": {"target_modules": "all-linear", "lora_alpha": 1},
}


def merged(adapter: Adapter, base: Checkpoint, name: str) -> torch.Tensor:
    values = base.tensor(name).data.float()
    matrix = adapter.matrices.get(name.removesuffix(".weight"))
    if name in adapter.saved:
        return adapter.saved[name]
    return values if matrix is None else matrix.apply(values)


def assert_same(adapter: Adapter, base: Checkpoint, expected: Checkpoint) -> None:
    """Every tensor of PEFT's merged model; at least one differs from the base."""
    changed = 0
    for name in expected.names():
        wanted = expected.tensor(name).data.float()
        torch.testing.assert_close(merged(adapter, base, name), wanted, atol=1e-5, rtol=1e-5, msg=name)
        changed += not torch.equal(wanted, base.tensor(name).data.float())
    assert changed == len(adapter.matrices) + len(adapter.saved)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make("llama", folder)
    add_tokenizer(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_peft_merges(llama: Path, tmp_path: Path, kind: str) -> None:
    peft = make_adapter(llama, tmp_path / "adapter", **KINDS[kind])
    base = open_checkpoint(llama)
    adapter = check_base(read_adapter(tmp_path / "adapter"), base.description)
    assert_same(adapter, base, open_checkpoint(save_merged(peft, tmp_path / "merged")))


# Fused and transposed matrices, other names, Conv1D: each becomes an adapter of the canonical matrices.
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gpt2", ["c_attn", "c_fc", "attn.c_proj"]),
        ("gpt_neox", ["query_key_value", "dense_h_to_4h"]),
        ("starcoder2", ["q_proj", "c_fc"]),
        ("gemma3", ["q_proj", "down_proj"]),
        ("qwen3", ["k_proj", "gate_proj"]),
    ],
)
def test_families_whose_files_have_other_names(tmp_path: Path, family: str, targets: list[str]) -> None:
    (tmp_path / "base").mkdir()
    make(family, tmp_path / "base")
    peft = make_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=targets)
    base = open_checkpoint(tmp_path / "base")
    adapter = check_base(read_adapter(tmp_path / "adapter"), base.description)
    assert_same(adapter, base, open_checkpoint(save_merged(peft, tmp_path / "merged")))


def test_rows_follow_those_of_a_gguf(llama: Path, tmp_path: Path) -> None:
    """A GGUF keeps the rows of q and k by pairs: DoRA's magnitudes and B move with them."""
    peft = make_adapter(llama, tmp_path / "adapter", target_modules=["q_proj", "k_proj"], use_dora=True)
    add_tokenizer(save_merged(peft, tmp_path / "merged"))
    convert(tmp_path / "merged", tmp_path / "merged.gguf", "gguf")
    convert(llama, tmp_path / "base.gguf", "gguf")
    base, expected = open_checkpoint(tmp_path / "base.gguf"), open_checkpoint(tmp_path / "merged.gguf")
    assert base.description.rope_interleaved
    assert_same(check_base(read_adapter(tmp_path / "adapter"), base.description), base, expected)


@pytest.mark.parametrize("kind", ["ranks", "alphas", "dora", "edges", "whole"])
def test_what_is_written_is_read_by_peft(llama: Path, tmp_path: Path, kind: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    peft = make_adapter(llama, tmp_path / "adapter", **KINDS[kind])
    adapter = check_base(read_adapter(tmp_path / "adapter"), open_checkpoint(llama).description)
    write_adapter(adapter, tmp_path / "written")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(llama), tmp_path / "written").eval()
    ids = torch.tensor([[3, 17, 101, 64, 9]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, peft(ids).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3", ["qkv_proj", "gate_up_proj", "o_proj"]),
        ("gpt2", ["c_attn", "c_fc"]),
        ("gpt_neox", ["query_key_value"]),
        ("falcon", ["query_key_value", "dense_4h_to_h"]),
    ],
)
def test_parts_are_joined_again_for_peft(tmp_path: Path, family: str, targets: list[str]) -> None:
    """What was cut into q, k and v is written as one adapter of the whole, and PEFT computes the same with it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    (tmp_path / "base").mkdir()
    make(family, tmp_path / "base")
    peft = make_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=targets)
    base = open_checkpoint(tmp_path / "base")
    adapter = joined_as_stored(check_base(read_adapter(tmp_path / "adapter"), base.description), base)
    write_adapter(adapter, tmp_path / "written", partial(stored_name, naming_of(base.description.architecture)))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again = PeftModel.from_pretrained(model, tmp_path / "written").eval()
    ids = torch.tensor([[3, 17, 101, 64, 9]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, peft(ids).logits, atol=1e-4, rtol=1e-4)


def test_names_hashes_and_sizes(llama: Path, tmp_path: Path) -> None:
    make_adapter(llama, tmp_path / "a", rank_pattern={"v_proj": 9})
    make_adapter(llama, tmp_path / "b", rank_pattern={"v_proj": 9}, lora_alpha=13)
    first, again, other = (read_adapter(tmp_path / name) for name in ("a", "a", "b"))
    assert (first.name, first.max_rank, first.base_name) == ("a", 9, str(llama))
    assert first.hash == again.hash != other.hash  # the weights are equal, the scale is not
    assert first.nbytes == sum(4 * (each.a.numel() + each.b.numel()) for each in first.matrices.values())
    assert read_adapter(tmp_path / "a", "support").name == "support"
