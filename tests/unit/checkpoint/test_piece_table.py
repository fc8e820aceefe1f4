"""Byte-level BPE in C++ gives the tokens of the `tokenizers` library, on real vocabularies and on made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.vocabularies import byte_level
from tokenmill.checkpoint import gguf_tokenizer
from tokenmill.checkpoint.gguf_header import read_gguf_metadata
from tokenmill.checkpoint.piece_table import ListedPieces, StoredPieces, stored_strings
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="the C++ module is not built")
_PARTS = ["hello", " the", "don't", "\r\n\t", "    ", "2024", "naïve", "日本語", "🙂", "ﬁ", "\u0301", "aaaaaaaa"]
_TEXTS = st.one_of(
    st.text(max_size=80),
    st.text("abc \nl'S1", max_size=200),
    st.lists(st.sampled_from(_PARTS), max_size=30).map("".join),
)


def _both(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Tokenizer]) -> tuple[Tokenizer, Tokenizer]:
    """In C++, and by the library."""
    ours = make()
    with monkeypatch.context() as patch:
        patch.setattr(native, "_missing", "not built")
        theirs = make()
    assert "Stored" in type(ours._vocabulary.table).__name__  # type: ignore[attr-defined]
    assert "Listed" in type(theirs._vocabulary.table).__name__  # type: ignore[attr-defined]
    return ours, theirs


@pytest.mark.parametrize("model", ["smollm2", "qwen2.5-coder-1.5b"])
def test_the_tokens_of_real_vocabularies(
    model: str, model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = model_path(model)
    ours, theirs = _both(monkeypatch, lambda: gguf_tokenizer.build_tokenizer(read_gguf_metadata(metadata)))
    assert (ours.vocab_size, ours.eos_ids, ours.special_ids) == (theirs.vocab_size, theirs.eos_ids, theirs.special_ids)
    some = range(0, ours.vocab_size, 97)
    assert [ours.token_bytes(each) for each in some] == [theirs.token_bytes(each) for each in some]

    @settings(max_examples=200, deadline=None)
    @given(_TEXTS)
    def same(text: str) -> None:
        assert ours.encode(text) == theirs.encode(text)

    same()
    long = Path(__file__).read_text() * 3
    assert ours.encode(long) == theirs.encode(long)
    assert ours.encode("a" * 5000 + "é" * 500) == theirs.encode("a" * 5000 + "é" * 500)


@pytest.mark.parametrize("pre", ["default", "minicpm5"])  # the second takes whole words first
def test_the_tokens_of_a_small_vocabulary(pre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [*byte_level()["tokenizer.ggml.tokens"]]
    tokens[150:180] = [""] * 10 + [f"[no {number}]" for number in range(20)]  # bytes without a token, and empty pieces
    merges = ["l l", "h e", "he ll"]
    for metadata in (byte_level(pre=pre), byte_level(pre=pre, tokens=tokens, merges=merges)):
        ours, theirs = _both(monkeypatch, lambda metadata=metadata: gguf_tokenizer.build_tokenizer(metadata))  # type: ignore[misc]
        for text in ("hello well", "hehellll", "\x00\x7fÿ he", "zZ~|{}"):
            assert ours.encode(text) == theirs.encode(text)
        assert [ours.id_to_piece(each) for each in range(-1, ours.vocab_size + 1)] == [
            theirs.id_to_piece(each) for each in range(-1, theirs.vocab_size + 1)
        ]
        assert ours.min_tokens("hello\x00") == theirs.min_tokens("hello\x00")


def test_pieces_by_id_and_by_text() -> None:
    pieces = ["a", "", "b", "a", "日"]
    stored, listed = StoredPieces(stored_strings(pieces), stored_strings([]), False), ListedPieces(pieces)
    assert stored.pieces == listed.pieces == ["a", "[EMPTY_1]", "b", "a", "日"]
    assert stored.ids == listed.ids
    assert [stored.find(each) for each in ("a", "b", "日", "c")] == [0, 2, 4, None]


def test_merges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CheckpointError, match="merges do not fit"):
        gguf_tokenizer.build_tokenizer(byte_level(merges=["h e", "he nothing"]))
    damaged = stored_strings(["a", "b"])
    with pytest.raises(IndexError):
        StoredPieces(type(damaged)(damaged.buffer[:-1], damaged.starts), stored_strings([]), False)
    with pytest.raises(IndexError):
        StoredPieces(type(damaged)(damaged.buffer, np.array([0, 1 << 60], np.uint64)), stored_strings([]), False)
