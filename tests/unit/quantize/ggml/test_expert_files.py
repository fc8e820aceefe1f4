"""GGUF files of models with experts: the same logits as the source, tensors as llama.cpp names them, bad ones named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.parity import tiny_models
from tests.parity.engine_logits import engine_logits
from tests.parity.gguf_models import CHANGED
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill.checkpoint import gguf_description
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_names import canonical_name, gguf_name
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.quantize.ggml.export import quantize_gguf

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
    "granitemoe": "granitemoe",
    "glm4_moe": "glm4moe",
    "glm4_moe-groups": "glm4moe",
    "gpt_oss": "gpt-oss",
}


@pytest.fixture(autouse=True)
def _as_gguf_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CHANGED.keys() & ARCHITECTURES.keys():
        monkeypatch.setitem(tiny_models.CONFIGS, name, CHANGED[name])


def _make(name: str, folder: Path) -> Path:
    tiny_models.make(name, folder)
    save_tokenizer(folder, "qwen2")
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_float32_gguf_computes_the_same(name: str, tmp_path: Path) -> None:
    source, path = _make(name, tmp_path / "model"), tmp_path / "model.gguf"
    quantize_gguf(open_checkpoint(source), path, "F32")
    expected = engine_logits(source, IDS, "eager")
    torch.testing.assert_close(engine_logits(path, IDS, "eager"), expected, rtol=0, atol=2e-5)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.architecture"].contents() == ARCHITECTURES[name]
    stems = {name.rpartition(".")[0].split(".", 2)[-1] for name in (tensor.name for tensor in reader.tensors)}
    known = set(gguf.TENSOR_NAMES.values())
    assert {stem for stem in stems if f"blk.{{bid}}.{stem}" not in known and stem not in known} <= {"token_embd"}
    # Routers stay float32, experts are rounded, whatever is asked for; from the GGUF as from the source.
    again = tmp_path / "again.gguf"
    report = quantize_gguf(open_checkpoint(path), again, "Q8_0")
    types = {tensor.name: tensor.type_name for tensor in report.tensors}
    assert {types[tensor] for tensor in types if tensor.endswith("ffn_gate_inp.weight")} == {"F32"}
    assert {types[tensor] for tensor in types if "_exps.weight" in tensor} == {"Q8_0"}
    # Where two experts are nearly equally good, rounding sends a token to the other one.
    distance = (engine_logits(again, IDS, "eager") - expected).square().mean().sqrt() / expected.std()
    assert distance < 0.3


@pytest.mark.parametrize("name", ["qwen2_moe-windows", "qwen3_moe-unnormalized", "llama4_text"])
def test_what_gguf_cannot_say_is_refused(name: str, tmp_path: Path) -> None:
    source = _make(name, tmp_path / "model")
    with pytest.raises(UserError, match=r"GGUF cannot express this model's|llama.cpp does not load"):
        quantize_gguf(open_checkpoint(source), tmp_path / "model.gguf", "F16")


def test_single_experts_of_old_files() -> None:
    old, ours = "blk.3.ffn_up.7.weight", "model.layers.3.mlp.experts.7.up_proj.weight"
    assert canonical_name("llama", old) == ours
    for name in ("blk.0.attn_sinks.weight", "blk.2.exp_probs_b.bias", "blk.1.ffn_down_exps.weight"):
        assert gguf_name("glm4_moe", canonical_name("glm4moe", name)) == name


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_gating_func", 4, "('expert_gating_func') is not known"),
        ("expert_group_count", 3, "do not divide into 'expert_group_count' = 3"),
        ("expert_used_count", 9, "'expert_used_count' is 9 of 8 experts"),
    ],
)
def test_a_router_that_cannot_be_is_named(
    key: str, value: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    quantize_gguf(open_checkpoint(_make("glm4_moe", tmp_path / "model")), path, "F32")
    integer = gguf_description.Fields.integer

    def changed(fields: Any, name: str, *rest: Any, **named: Any) -> int:
        return value if name == key else integer(fields, name, *rest, **named)

    monkeypatch.setattr(gguf_description.Fields, "integer", changed)
    with pytest.raises(UserError) as caught:
        GGUFCheckpoint(path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
