"""Hugging Face tokenizers as GGUF metadata: names of pre-tokenizers found by what they do, and the same ids after."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tokenmill.checkpoint import gguf_tokenizer, hf_tokenizer
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_vocabulary import vocabulary_values
from tokenmill.checkpoint.hf_export import export_tokenizer
from tokenmill.errors import CheckpointError

# As the models' own files spell them.
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXT = "Hello world's 12345 I'LL go\n\n  to 你好 Привет\t x=1; 🙂 <|im_end|>"


def split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level]


PUBLISHED = {
    "gpt-2": ([pre_tokenizers.ByteLevel(add_prefix_space=False)], False),
    "smollm": (
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        False,
    ),
    "qwen2": (split(_CASELESS + r"|\p{N}" + _TAIL), False),
    "llama-bpe": (split(_CASELESS + r"|\p{N}{1,3}" + _TAIL), True),
}


def save(folder: Path, steps: list[pre_tokenizers.PreTokenizer], ignore_merges: bool) -> None:
    pieces = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_published_tokenizers_get_their_names(name: str, tmp_path: Path) -> None:
    save(tmp_path, *PUBLISHED[name])
    definition = json.loads((tmp_path / "tokenizer.json").read_text())
    definition["model"]["merges"] = [["h", "e"]]  # GGUF has no array of nothing
    definition["model"]["vocab"]["he"] = 256
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    values = vocabulary_values(tmp_path, 300)
    assert values["tokenizer.ggml.pre"] == name
    ours = hf_tokenizer.build_tokenizer(tmp_path / "tokenizer.json", None)
    assert gguf_tokenizer.build_tokenizer(values).encode(TEXT) == ours.encode(TEXT)


def test_there_and_back_gives_the_same_ids(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = GGUFCheckpoint(model_path("smollm2"))
    export_tokenizer(checkpoint, tmp_path)
    values = vocabulary_values(tmp_path, checkpoint.description.vocab_size)
    ours, theirs = gguf_tokenizer.build_tokenizer(values), gguf_tokenizer.build_tokenizer(checkpoint.metadata)
    assert ours.encode(TEXT, parse_special=True) == theirs.encode(TEXT, parse_special=True)
    assert (ours.bos_id, ours.vocab_size) == (theirs.bos_id, theirs.vocab_size)
    for key in ("model", "pre", "merges", "eos_token_id", "add_bos_token"):
        assert values.get(f"tokenizer.ggml.{key}") == checkpoint.metadata.get(f"tokenizer.ggml.{key}"), key


def test_a_vocabulary_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path, *PUBLISHED["gpt-2"])
    with pytest.raises(CheckpointError, match="the tokenizer has id 255, the model 100 rows"):
        vocabulary_values(tmp_path, 100)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        vocabulary_values(tmp_path, 100)
