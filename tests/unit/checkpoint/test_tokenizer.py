"""Encoding, decoding and special tokens on small vocabularies; real ones are in tests/parity/test_tokenization.py."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from tests.unit.checkpoint.vocabularies import byte_level, sentencepiece
from tokenmill.checkpoint import gguf_tokenizer, hf_tokenizer
from tokenmill.checkpoint.sentencepiece import SentencePieceBPE
from tokenmill.checkpoint.special_tokens import SpecialToken, SpecialTokenSplitter
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_tokenizer, tokenizer_of
from tokenmill.errors import CheckpointError, UserError

WORDS = {"▁": -1.0, "▁h": -2.0, "el": -3.0, "▁hel": -4.0, "lo": -5.0, "▁hello": -6.0, **dict.fromkeys("helo", -9.0)}


BYTE_LEVEL = gguf_tokenizer.build_tokenizer(byte_level())
SENTENCEPIECE = gguf_tokenizer.build_tokenizer(sentencepiece(WORDS))
_pieces = [*byte_level()["tokenizer.ggml.tokens"]]
_pieces[150:250] = [f"[no {number}]" for number in range(100)]
INCOMPLETE = gguf_tokenizer.build_tokenizer(byte_level(tokens=_pieces, merges=["l l"]))  # without a hundred bytes


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.id_to_piece(token_id) for token_id in ids]


class TestByteLevel:
    def test_merges_within_words(self) -> None:
        tokenizer = BYTE_LEVEL
        assert pieces(tokenizer, tokenizer.encode("hello we")) == ["hell", "o", "Ġw", "e"]

    def test_control_tokens_only_on_request(self) -> None:
        tokenizer = BYTE_LEVEL
        end = tokenizer.eos_ids[0]
        assert end not in tokenizer.encode("he<|im_end|>")
        assert tokenizer.encode("he<|im_end|>", parse_special=True)[-1] == end

    def test_user_defined_tokens_in_plain_text(self) -> None:
        tokenizer = BYTE_LEVEL
        assert pieces(tokenizer, tokenizer.encode("he<tag>he")) == ["he", "<tag>", "he"]

    def test_edges_follow_the_file(self) -> None:
        tokenizer = gguf_tokenizer.build_tokenizer(byte_level(bos_token_id=7, add_bos_token=True, add_eos_token=True))
        assert tokenizer.encode("")[0] == 7
        assert tokenizer.encode("") == [7, tokenizer.eos_ids[0]]
        assert tokenizer.encode("", add_special_tokens=False) == []

    def test_token_bytes(self) -> None:
        tokenizer = BYTE_LEVEL
        ids = tokenizer.encode(" \xff\n", add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)) == " \xff\n".encode()
        assert tokenizer.token_bytes(tokenizer.eos_ids[0]) == b"<|im_end|>"
        assert tokenizer.token_bytes(tokenizer.vocab_size - 1) == b""  # unused
        assert tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(-1) == b""

    def test_special_tokens_are_hidden_on_request(self) -> None:
        tokenizer = BYTE_LEVEL
        ids = tokenizer.encode("he<|im_end|><tag>", parse_special=True)
        assert tokenizer.decode(ids) == "he<tag>"
        assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|im_end|><tag>"

    @settings(deadline=None)
    @given(st.text())
    def test_round_trip(self, text: str) -> None:
        assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text)) == text

    def test_missing_byte_keeps_neighbours_apart(self) -> None:
        tokenizer = gguf_tokenizer.build_tokenizer(
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.pre": "gpt-2",
                "tokenizer.ggml.tokens": ["a", "b", "ab"],
                "tokenizer.ggml.merges": ["a b"],
            }
        )
        assert tokenizer.encode("ab") == [2]
        assert tokenizer.encode("a~b") == [0, 1]

    @pytest.mark.parametrize(
        ("name", "digits"), [("gpt-2", ["123"]), ("llama-bpe", ["123"]), ("qwen2", [*"123"]), ("smollm", [*"123"])]
    )
    def test_words_by_name_of_the_rule(self, name: str, digits: list[str]) -> None:
        tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "123", "'l", "'ll", "ĠĠ", "ĠĠĠ"]
        merges = ["1 2", "12 3", "' l", "'l l", "Ġ Ġ", "ĠĠ Ġ"]
        fields = {"tokens": tokens, "merges": merges, "token_type": None, "bos_token_id": 0, "eos_token_id": None}
        tokenizer = gguf_tokenizer.build_tokenizer(byte_level(pre=name, **fields))
        assert pieces(tokenizer, tokenizer.encode("123'll   x", False)) == [*digits, "'ll", "ĠĠ", "Ġ", "x"]


class TestSentencePiece:
    def test_best_score_first_and_leading_space(self) -> None:
        tokenizer = SENTENCEPIECE
        assert pieces(tokenizer, tokenizer.encode("hello hello")) == ["<s>", "▁hello", "▁hello"]
        no_space = gguf_tokenizer.build_tokenizer(sentencepiece(WORDS, add_space_prefix=False, add_bos_token=False))
        assert pieces(no_space, no_space.encode("hello")) == ["h", "el", "lo"]

    def test_space_after_each_special_token(self) -> None:
        tokenizer = SENTENCEPIECE
        assert pieces(tokenizer, tokenizer.encode("h<tag>h", False)) == ["▁h", "<tag>", "▁h"]

    def test_unknown_characters_become_bytes(self) -> None:
        tokenizer = SENTENCEPIECE
        ids = tokenizer.encode("é", add_special_tokens=False)
        assert pieces(tokenizer, ids) == ["▁", "<0xC3>", "<0xA9>"]
        assert [tokenizer.token_bytes(token_id) for token_id in ids] == [b" ", b"\xc3", b"\xa9"]

    @settings(deadline=None)
    @given(st.text(alphabet=st.one_of(st.sampled_from("helo ▁"), st.characters(codec="utf-8"))))
    def test_round_trip(self, text: str) -> None:
        assert SENTENCEPIECE.decode(SENTENCEPIECE.encode(text)) == text.replace("▁", " ")

    @settings(deadline=None)
    @given(
        st.lists(st.text("ab▁", min_size=1, max_size=5), unique=True, max_size=30),
        st.lists(st.integers(-5, 0), min_size=33, max_size=33),
        st.text("ab ", max_size=40),
    )
    def test_same_as_exhaustive_search(self, extra: list[str], scores: list[int], text: str) -> None:
        """Cutting text into words and the queue change nothing, even for pieces that join words, even on ties."""
        all_pieces = list(dict.fromkeys([*"ab▁", *extra]))
        ids = {piece: token_id for token_id, piece in enumerate(all_pieces)}
        symbols = list(text.replace(" ", "▁"))
        while True:
            pairs = [
                (scores[ids[left + right]], -place)
                for place, (left, right) in enumerate(pairwise(symbols))
                if left + right in ids
            ]
            if not pairs:
                break
            place = -max(pairs)[1]
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        assert SentencePieceBPE(all_pieces, ids, scores, None).encode(text) == [ids[symbol] for symbol in symbols]


class TestSpecialTokenSplitter:
    def test_longest_first_even_when_a_shorter_one_starts_earlier(self) -> None:
        splitter = SpecialTokenSplitter([SpecialToken("ab", 1), SpecialToken("bcd", 2)])
        assert splitter.split("xabcdab") == ["xa", 2, 1]

    def test_runs(self) -> None:
        splitter = SpecialTokenSplitter([SpecialToken("\n", 1), SpecialToken("\n\n", 2)])
        assert splitter.split("\n\n\na") == [2, 1, "a"]
        assert splitter.split("") == []

    def test_blanks_after(self) -> None:
        splitter = SpecialTokenSplitter([SpecialToken("<e>", 1, eats_blanks_after=True)])
        assert splitter.split(" <e> \n\ta<e>  ") == [" ", 1, "a", 1]


class TestRefusals:
    @pytest.mark.parametrize(
        ("metadata", "problem"),
        [
            ({}, "tokenizer.ggml.model"),
            (byte_level(model="rwkv"), "rwkv"),
            (byte_level(pre="nobody"), "nobody"),
            (byte_level(tokens=[]), "tokenizer.ggml.tokens"),
            (byte_level(token_type=[1]), "token_type"),
            (byte_level(merges=["q z"]), "merges"),
            (byte_level(add_bos_token=True), "no bos token"),
            (sentencepiece(WORDS, scores=[1.0]), "scores"),
        ],
    )
    def test_bad_metadata(self, metadata: dict[str, Any], problem: str) -> None:
        with pytest.raises(CheckpointError, match=problem):
            gguf_tokenizer.build_tokenizer(metadata)

    def test_half_a_surrogate_pair(self) -> None:
        with pytest.raises(UserError, match="surrogate"):
            gguf_tokenizer.build_tokenizer(byte_level()).encode("a\ud800")

    def test_a_model_without_one_takes_token_ids(self, tmp_path: Path) -> None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 131, **sizes}))
        tokenizer, template = tokenizer_of(tmp_path, "auto")
        assert (tokenizer.vocab_size, tokenizer.reads_text, template) == (131, False, None)
        assert tokenizer.decode([3, 130]) == "<3><130>"
        with pytest.raises(UserError, match=f"{tmp_path.name} has no tokenizer .* give token ids"):
            tokenizer.encode("a text")
        (tmp_path / "tokenizer.model").write_bytes(b"x")  # there is one, but none that can be read
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            tokenizer_of(tmp_path, "auto")

    def test_directories(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.model").write_bytes(b"x")
        with pytest.raises(CheckpointError, match=r"tokenizer\.model"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(CheckpointError, match="not a tokenizer"):
            load_tokenizer(tmp_path)
        with pytest.raises(CheckpointError, match="does not exist"):
            load_tokenizer(tmp_path / "nothing")
        with pytest.raises(CheckpointError, match="not a GGUF"):
            load_tokenizer(tmp_path / "tokenizer.model")


class TestHuggingFaceFiles:
    @pytest.fixture
    def byte_level_directory(self, tmp_path: Path) -> Path:
        vocabulary = {piece: token_id for token_id, piece in enumerate([*pre_tokenizers.ByteLevel.alphabet(), "he"])}
        backend = Backend(models.BPE(vocab=vocabulary, merges=[("h", "e")]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<bos>", "<eos>", "<end>"])
        backend.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", backend.token_to_id("<bos>"))]
        )
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
        return tmp_path

    def test_special_tokens(self, byte_level_directory: Path) -> None:
        tokenizer = load_tokenizer(byte_level_directory)
        assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (257, (258, 259), 260)
        assert tokenizer.special_ids == {257, 258, 259}
        assert tokenizer.encode("he") == [257, 256]
        assert tokenizer.encode("<eos>", False, parse_special=True) == [258]
        assert 258 not in tokenizer.encode("<eos>", False)
        assert tokenizer.decode([257, 256, 258]) == "he"

    def test_configuration_overrules_the_post_processor(self, byte_level_directory: Path) -> None:
        path = byte_level_directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": False, "add_eos_token": True}))
        assert load_tokenizer(byte_level_directory).encode("he") == [256, 258]

    @settings(deadline=None)
    @given(text=st.text())
    def test_round_trip_and_bytes(self, text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        tokenizer = hf_tokenizer.build_tokenizer(_sentencepiece_file(tmp_path_factory), None)
        ids = tokenizer.encode(text, add_special_tokens=False)
        shown = text.replace("▁", " ")
        assert tokenizer.decode(ids) == shown
        assert b"".join(map(tokenizer.token_bytes, ids)) == (b" " + shown.encode() if text else b"")


class TestLeastNumberOfTokens:
    @settings(deadline=None)
    @given(text=st.text() | st.text("▁ helo<tag>\x00é", max_size=300), special=st.booleans())
    def test_is_never_more_than_there_are(
        self, text: str, special: bool, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        for tokenizer in (
            BYTE_LEVEL,
            SENTENCEPIECE,
            INCOMPLETE,
            hf_tokenizer.build_tokenizer(_sentencepiece_file(tmp_path_factory), None),
        ):
            assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, False, parse_special=special))

    def test_grows_with_the_text(self) -> None:
        assert BYTE_LEVEL.min_tokens("") == 0
        assert BYTE_LEVEL.min_tokens("x" * 10_000) >= 1000
        assert SENTENCEPIECE.min_tokens("x" * 10_000) >= 1000

    def test_is_unknown_where_text_is_normalized(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        definition = json.loads(_sentencepiece_file(tmp_path_factory).read_text())
        assert hf_tokenizer.build_tokenizer(_sentencepiece_file(tmp_path_factory), None).min_tokens("x" * 99)
        path = tmp_path_factory.mktemp("composed") / "tokenizer.json"
        path.write_text(json.dumps({**definition, "normalizer": {"type": "NFC"}}))
        assert hf_tokenizer.build_tokenizer(path, None).min_tokens("x" * 99) == 0


def _sentencepiece_file(factory: pytest.TempPathFactory) -> Path:
    path = factory.getbasetemp() / "sentencepiece.json"
    if not path.exists():
        all_pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a"]
        vocabulary = {piece: token_id for token_id, piece in enumerate(all_pieces)}
        backend = Backend(models.BPE(vocab=vocabulary, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens([AddedToken("<unk>", normalized=False)])
        backend.save(str(path))
    return path
