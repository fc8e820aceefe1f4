"""Real vocabularies: the same ids as llama.cpp, the same text as the goldens, the same files read two ways."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer

MODELS = ("smollm2", "gemma3-270m", "qwen2.5-coder-1.5b")
LLAMA_CPP_VECTORS = ("gpt-2", "phi-3")

load = cache(load_tokenizer)


@cache
def missing_bytes(tokenizer: Tokenizer) -> frozenset[int]:
    """SmolLM2's vocabulary has no token for a few bytes."""
    tokens = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
    return frozenset(byte for byte in range(256) if bytes([byte]) not in tokens)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, model_path: Callable[[str], Path]) -> tuple[str, Tokenizer]:
    return request.param, load(model_path(request.param))


def golden(data_path: Path, name: str) -> dict[str, Any]:
    return json.loads((data_path / "golden" / f"{name}.json").read_text(encoding="utf-8"))


def vectors(data_path: Path, name: str) -> list[tuple[str, list[int]]]:
    with tarfile.open(data_path / "tokenizers" / "llamacpp_vocab_vectors.tar.gz") as archive:
        texts, ids = (_member(archive, f"ggml-vocab-{name}.gguf.{suffix}") for suffix in ("inp", "out"))
    rows = [[int(token_id) for token_id in line.split()] for line in ids.split("\n")]
    return list(zip(texts.split("\n__ggml_vocab_test__\n"), rows, strict=True))


def _member(archive: tarfile.TarFile, name: str) -> str:
    file = archive.extractfile(name)
    assert file is not None
    return file.read().decode()


def test_golden_tokenizations(data_path: Path, model: tuple[str, Tokenizer]) -> None:
    name, tokenizer = model
    for row in golden(data_path, name)["tokenizations"]:
        assert tokenizer.encode(row["text"], add_special_tokens=False) == row["ids"], row["text"]
        parsed = tokenizer.encode(row["text"], add_special_tokens=False, parse_special=True)
        assert parsed == row["ids_special"], row["text"]
        assert tokenizer.decode(row["ids"]) == row["text"]


def test_golden_prompts_and_outputs(data_path: Path, model: tuple[str, Tokenizer]) -> None:
    name, tokenizer = model
    for row in golden(data_path, name)["generations"]:
        assert tokenizer.encode(row["prompt"]) == row["prompt_ids"], row["prompt"]
        assert tokenizer.decode(row["greedy_ids"]) == row["greedy_text"]


@pytest.mark.parametrize("name", LLAMA_CPP_VECTORS)
def test_llama_cpp_vectors(data_path: Path, vocabulary: Callable[[str], Path], name: str) -> None:
    tokenizer = load(vocabulary(name))
    for text, ids in vectors(data_path, name):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


@pytest.mark.parametrize(("vector", "alias"), [("qwen2", "qwen2.5-coder-1.5b")])
def test_llama_cpp_vectors_of_the_same_vocabulary(
    data_path: Path, model_path: Callable[[str], Path], vector: str, alias: str
) -> None:
    """Qwen2 and Qwen2.5 share their vocabulary except for added tokens."""
    tokenizer = load(model_path(alias))
    for text, ids in vectors(data_path, vector):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


def test_llama_spm_vectors_on_the_phi_3_vocabulary(data_path: Path, vocabulary: Callable[[str], Path]) -> None:
    """Phi-3 took over llama 2's vocabulary; the texts hold no special tokens."""
    tokenizer = load(vocabulary("phi-3"))
    for text, ids in vectors(data_path, "llama-spm"):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, repr(text)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(text=st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n\r\t'sS1<>|_")), max_size=60))
def test_text_survives(model: tuple[str, Tokenizer], text: str) -> None:
    name, tokenizer = model
    text = "".join(character for character in text if not missing_bytes(tokenizer) & set(character.encode()))
    shown = text.replace("▁", " ") if name.startswith("gemma") else text
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == shown
    assert not tokenizer.special_ids & set(ids)


def test_stories15m_reads_as_transformers_does(model_path: Callable[[str], Path]) -> None:
    transformers = pytest.importorskip("transformers")
    path = model_path("stories15m")
    tokenizer = load(path)
    theirs = transformers.AutoTokenizer.from_pretrained(path)
    for text in ("Once upon a time", "  two  spaces\n\n", "", "日本 😀 é", "</s> <s>"):
        assert tokenizer.encode(text, parse_special=True) == theirs.encode(text)
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_phi_3_special_tokens_eat_blanks(vocabulary: Callable[[str], Path]) -> None:
    tokenizer = load(vocabulary("phi-3"))
    ids = tokenizer.encode("<|user|>\n Hi<|end|>\n<|assistant|>\n", add_special_tokens=False, parse_special=True)
    assert [tokenizer.id_to_piece(i) for i in ids] == ["<|user|>", "▁Hi", "<|end|>", "<|assistant|>"]
