"""WordPiece vocabularies, batches, pairs and cuts: as the tokenizers library does them."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from tests.embedding_models import TEXTS, save_tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.errors import UserError


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
def test_texts_pairs_and_cuts(tmp_path: Path, kind: str) -> None:
    save_tokenizer(tmp_path, kind, 64)
    ours, library = load_tokenizer(tmp_path), tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.no_padding()
    library.no_truncation()
    assert ours.encode_batch(TEXTS) == [library.encode(text).ids for text in TEXTS]
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    plain = ours.encode_batch(TEXTS, add_special_tokens=False)
    for first, second, limit in ((0, 5, 16), (5, 0, 16), (5, 2, 15), (1, 5, 12), (5, 1, 12), (0, 1, 64)):
        library.enable_truncation(limit, strategy="longest_first")
        wanted = library.encode(TEXTS[first], TEXTS[second])
        ids, start = ours.pair(plain[first], plain[second], limit)
        assert ids == wanted.ids
        assert start == wanted.sequence_ids.index(1)
        cut = library.encode(TEXTS[first]).ids
        assert ours.cut(ours.encode(TEXTS[first]), limit) == cut


def test_word_pieces_become_text_again(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "bert", 64)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat sat on the mat")) == "the cat sat on the mat"


def test_control_tokens_of_a_text_stay_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "bert", 64)
    tokenizer = load_tokenizer(tmp_path)
    separator = tokenizer.encode("rain")[-1]
    assert tokenizer.encode_batch(["the [SEP] dog"])[0].count(separator) == 1
    assert tokenizer.encode("the [SEP] dog").count(separator) == 1


def test_a_tokenizer_without_pairs_says_so(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, "qwen3", 64)
    with pytest.raises(UserError, match="pairs"):
        load_tokenizer(tmp_path).pair([1], [2])
