"""Whole files: a model written as GGUF computes what it computed before, and quantized ones say what they lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.parity import tiny_models
from tests.parity.gguf_models import CHANGED
from tests.unit.checkpoint.gguf_builder import write_model
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_header import read_gguf_raw_pairs
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.checkpoint.pretokenizers import PRE_TOKENIZERS
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.errors import UserError
from tokenmill.quantize.base import LinearGroup, Statistics
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.quantize.methods.imatrix import Importance, ImportanceMatrix

PROMPT = [1, 5, 30, 77, 4, 9, 100, 42, 8, 8, 60, 23, 19, 99, 7, 3, 55, 12, 90, 33]
WORDS = "the cat sat on a mat hat that chat and then"


def save_tokenizer(folder: Path, pre: str) -> None:
    """A byte-level BPE of fewer than 131 tokens."""
    letters = sorted(set(WORDS.replace(" ", "Ġ")) | set("0123456789.,"))
    merges = [("t", "h"), ("a", "t"), ("th", "e"), ("Ġ", "the"), ("c", "at"), ("Ġ", "cat")]
    pieces = ["<pad>", "<s>", "</s>", *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    backend.add_tokens([AddedToken("<tool>", special=False)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages }}"}))


def prompt_logprobs(path: Path) -> list[float]:
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(path), context=64, concurrency=1, kernels="ref") as llm:
        (output,) = llm.generate([PROMPT], params)
    assert output.prompt_logprobs is not None
    return [entry[PROMPT[i]].logprob for i, entry in enumerate(output.prompt_logprobs) if entry]


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    from transformers import Gemma3TextConfig

    settings = {"num_hidden_layers": 8, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16}
    common: dict[str, Any] = tiny_models._COMMON | settings
    monkeypatch.setitem(tiny_models.CONFIGS, "gemma3-plain", lambda: Gemma3TextConfig(**common))

    for name in ("cohere", "deepseek_v2-yarn"):
        monkeypatch.setitem(tiny_models.CONFIGS, name, CHANGED[name])

    def make(name: str) -> Path:
        folder = tmp_path / name
        tiny_models.make(name, folder)
        save_tokenizer(folder, "qwen2")
        return folder

    return make


SAME = [
    "llama",
    "llama-biases",
    "llama-tied",
    "llama-linear",
    "llama-llama3",
    "llama-yarn",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "phi3",
    "phi3-longrope",
    "olmo2",
    "olmo3",
    "granite",
    "cohere",
    "cohere2",
    "smollm3",
    "glm",
    "glm4",
    "starcoder2",
    "stablelm",
    "stablelm-parallel",
    "gpt_neox",
    "gpt2",
    "falcon",
    "falcon-40b",
    "falcon-11b",
    "phi-plain",
    "deepseek_v2",
    "deepseek_v2-yarn",
    "deepseek_v3",
]


@pytest.mark.parametrize("name", [*SAME, "gemma3-plain"])
def test_a_float32_gguf_computes_the_same(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source, path = tiny(name), tmp_path / "model.gguf"
    report = quantize_gguf(open_checkpoint(source), path, "F32")
    assert {tensor.type_name for tensor in report.tensors} == {"F32"}
    assert prompt_logprobs(path) == pytest.approx(prompt_logprobs(source), abs=2e-5)
    assert gguf.GGUFReader(path).fields["general.architecture"].contents() in gguf.MODEL_ARCH_NAMES.values()
    ours, theirs = load_tokenizer(path), load_tokenizer(source)
    for text in ("the cat sat, 12345 cats.", "<tool>the</s>"):
        assert ours.encode(text, parse_special=True) == theirs.encode(text, parse_special=True)


@pytest.mark.parametrize("name", ["qwen2-windows", "gemma3", "gemma2", "gpt2-scaled", "falcon-sequential", "phi"])
def test_what_gguf_cannot_say_is_refused(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny(name)
    with pytest.raises(UserError, match="GGUF cannot express this model's"):
        quantize_gguf(open_checkpoint(source), tmp_path / "model.gguf", "F16")
    assert not (tmp_path / "model.gguf").exists()


def test_an_unknown_way_to_cut_words_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    source = tiny("llama")
    definition = json.loads((source / "tokenizer.json").read_text())
    definition["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[aeiou]+"}
    (source / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(UserError, match="GGUF has no name for"):
        quantize_gguf(open_checkpoint(source), tmp_path / "model.gguf", "F16")


def test_sentencepiece_from_merges_gives_the_same_ids(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    """stories15m: scores are rebuilt from the merges; the file has its own head where asked."""
    source, path = model_path("stories15m"), tmp_path / "model.gguf"
    report = quantize_gguf(open_checkpoint(source), path, "Q8_0", untied_output=True)
    assert "output.weight" in {tensor.name for tensor in report.tensors}
    ours, theirs = load_tokenizer(path), load_tokenizer(source)
    text = "Once upon a time, there was a little girl named Lily.  She said: ünïcode 🙂 12!\n\n"
    assert ours.encode(text) == theirs.encode(text)
    assert max(tensor.relative_error for tensor in report.tensors) < 0.01
    assert report.nbytes == path.stat().st_size
    assert 8.5 <= report.bits_per_weight < 8.51


def test_requantizing_a_gguf_keeps_its_metadata_and_copies_what_is_right_already(tmp_path: Path) -> None:
    source, path = tmp_path / "source.gguf", tmp_path / "model.gguf"
    write_model(source, "qwen3")
    report = quantize_gguf(GGUFCheckpoint(source), path, "Q8_0")
    assert {tensor.is_copied for tensor in report.tensors if len(tensor.shape) == 2} == {True}
    before, after = read_gguf_raw_pairs(source), read_gguf_raw_pairs(path)
    added = {"general.quantization_version", "general.file_type"}
    assert {key: value for key, value in after.items() if key not in added} == before
    assert gguf.GGUFReader(path).fields["general.file_type"].contents() == 7
    old, new = GGUFCheckpoint(source), GGUFCheckpoint(path)
    assert list(new.names()) == list(old.names())
    assert all(torch.equal(new.tensor(name).data, old.tensor(name).data) for name in old.names())
    report = quantize_gguf(GGUFCheckpoint(source), path, "Q4_0")
    assert {tensor.type_name for tensor in report.tensors if tensor.name.startswith("blk.0.ffn_up")} == {"Q4_0"}
    assert 0 < next(tensor.relative_error for tensor in report.tensors if tensor.type_name == "Q4_0") < 0.1


class Block:
    """As much of a BlockView as importance needs."""

    index, head_dim = 0, 16
    groups = (
        LinearGroup(("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"), None, False),
        LinearGroup(("model.layers.0.mlp.down_proj",), None, False),
    )

    def statistics(self, group: LinearGroup, kinds: list[str]) -> Statistics:
        assert kinds == ["mean_square"]
        size = 96 if "down" in group.names[0] else 64
        return Statistics(512, mean_square=torch.arange(1.0, size + 1) / 7)


@pytest.fixture
def matrix() -> ImportanceMatrix:
    found = ImportanceMatrix()
    found.collect(Block())  # type: ignore[arg-type]
    return found


def test_importance_files_are_those_of_llama_imatrix(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    matrix.write(path, "llama", "text.txt", 128)
    reader = gguf.GGUFReader(path)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.chunk_count"].contents() == 4
    assert reader.fields["imatrix.datasets"].contents() == ["text.txt"]
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    assert set(tensors) == {
        f"blk.0.{part}.weight.{kind}" for part in ("attn_q", "attn_k", "ffn_down") for kind in ("in_sum2", "counts")
    }
    assert tensors["blk.0.attn_q.weight.counts"].tolist() == [[512.0]]
    again = ImportanceMatrix.read(path, "llama")
    assert set(again) == set(matrix)
    for name in matrix:
        assert torch.allclose(again[name], matrix[name])


def test_a_file_of_something_else_is_no_importance(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=r"plain one is expected|not an importance matrix"):
        ImportanceMatrix.read(tmp_path / "model.gguf", "llama")


def test_importance_is_used_and_what_lacks_it_is_named(matrix: ImportanceMatrix, tmp_path: Path) -> None:
    write_model(tmp_path / "source.gguf")
    source = GGUFCheckpoint(tmp_path / "source.gguf")
    plain = quantize_gguf(source, tmp_path / "plain.gguf", "Q4_1")
    weighted = quantize_gguf(source, tmp_path / "weighted.gguf", "Q4_1", matrix)
    assert "blk.0.attn_v.weight" in weighted.without_importance
    assert "blk.0.attn_q.weight" not in weighted.without_importance
    changed = {
        a.name for a, b in zip(plain.tensors, weighted.tensors, strict=True) if a.relative_error != b.relative_error
    }
    assert changed == {f"blk.0.{part}.weight" for part in ("attn_q", "attn_k", "ffn_down")}
    wrong = ImportanceMatrix({"model.layers.0.mlp.down_proj": Importance(torch.ones(5), 1)})
    with pytest.raises(UserError, match=r"blk\.0\.ffn_down\.weight: .*another length"):
        quantize_gguf(source, tmp_path / "wrong.gguf", "Q4_1", wrong)
    assert not (tmp_path / "wrong.gguf").exists()
