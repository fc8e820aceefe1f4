"""Builds a Tokenizer from GGUF metadata (`tokenizer.ggml.*`), with the same ids as llama.cpp.

Two kinds of vocabulary: "gpt2" (byte-level BPE with merges, in C++ or on the `tokenizers` library) and "llama"
(SentencePiece BPE by scores). Special tokens are cut out first. Does not read files. Called by tokenizer_files.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, models, pre_tokenizers

from tokenmill.checkpoint.gguf_metadata import Metadata, StringArray
from tokenmill.checkpoint.piece_bytes import SPACE, byte_level_bytes, byte_piece_value
from tokenmill.checkpoint.piece_table import ListedPieces, PieceTable, StoredPieces, stored_strings
from tokenmill.checkpoint.pretokenizers import PreTokenizer, find_pre_tokenizer
from tokenmill.checkpoint.sentencepiece import SentencePieceBPE
from tokenmill.checkpoint.special_tokens import SpecialToken, SpecialTokenSplitter
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.word_cache import bound_cache
from tokenmill.errors import CheckpointError
from tokenmill.kernels import native
from tokenmill.log import get_logger

_LOG = get_logger(__name__)
_PREFIX = "tokenizer.ggml."
_MISSING = "\0missing byte"  # no vocabulary has this piece
_CONVERT = "convert the model to GGUF again"


class TokenKind(IntEnum):
    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Files often name only one end token; a model that writes one of these has finished all the same.
_END_NAMES = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[ <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] "
    "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
)
_FILL_IN_NAMES = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|> "
    "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> "
    "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>"
)


class _Fields:
    """Typed access to the `tokenizer.ggml.*` metadata."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def get(self, name: str, default: Any = None) -> Any:
        return self._metadata.get(_PREFIX + name, default)

    def required(self, name: str) -> Any:
        value = self.get(name)
        if value is None or len(value) == 0:
            raise CheckpointError(f"the file has no {_PREFIX}{name}", _CONVERT)
        return value

    def strings(self, name: str) -> StringArray:
        """As they lie in the file, if they come from one."""
        stored = self._metadata.stored_strings(_PREFIX + name) if isinstance(self._metadata, Metadata) else None
        return stored if stored is not None and len(stored.starts) else stored_strings(self.required(name))

    def column(self, name: str, size: int, default: float) -> Sequence[Any]:
        """One value for each token."""
        values = self.get(name)
        if values is None:
            return [default] * size
        if len(values) != size:
            raise CheckpointError(f"{size} tokens but {len(values)} values in {_PREFIX}{name}", _CONVERT)
        return list(values)

    def token_id(self, name: str, size: int, default: int | None = None) -> int | None:
        value = self.get(f"{name}_token_id", default)
        return int(value) if value is not None and 0 <= value < size else None


class _GGUFVocabulary:
    def __init__(self, table: PieceTable, kinds: Sequence[int], byte_level: bool) -> None:
        self.size = table.size
        self.kinds = kinds
        self.table = table
        self._byte_level = byte_level

    def piece(self, token_id: int) -> str:
        return self.table.piece(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        kind = self.kinds[token_id] if piece else TokenKind.UNUSED
        if kind == TokenKind.UNUSED:
            return b""
        if kind == TokenKind.BYTE:
            return byte_piece_value(piece) or piece.encode()
        if kind in (TokenKind.CONTROL, TokenKind.USER_DEFINED, TokenKind.UNKNOWN):
            return piece.encode()
        return byte_level_bytes(piece) if self._byte_level else piece.replace(SPACE, " ").encode()

    def of_kind(self, *kinds: TokenKind) -> set[int]:
        return set(np.flatnonzero(np.isin(np.asarray(self.kinds), kinds)).tolist())

    def named(self, texts: Iterable[str]) -> set[int]:
        return {found for text in texts if (found := self.table.find(text)) is not None}


class _ByteLevelBPE:
    """By the `tokenizers` library, where the C++ module is missing."""

    def __init__(self, merges: list[tuple[str, str]], table: PieceTable, pre_tokenizer: PreTokenizer) -> None:
        ids, self._missing_id = table.ids, table.size
        if any(character not in ids for character in pre_tokenizers.ByteLevel.alphabet()):
            # A byte that is no token (SmolLM2 lacks a few) must still keep its neighbours apart while merging.
            ids = {**ids, _MISSING: self._missing_id}
        unknown = _MISSING if _MISSING in ids else None
        try:
            model = models.BPE(ids, merges, unk_token=unknown, ignore_merges=pre_tokenizer.ignore_merges)
        except Exception as error:  # the library raises nothing more precise
            raise _bad_merges(error) from None
        self._backend = tokenizers.Tokenizer(model)
        self._backend.pre_tokenizer = byte_level_splitter(pre_tokenizer)
        bound_cache(self._backend)

    def encode(self, text: str) -> list[int]:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return _without(self._missing_id, ids)


class _StoredBPE:
    """By the C++ module, from the strings of the file."""

    def __init__(self, table: StoredPieces, pre_tokenizer: PreTokenizer) -> None:
        self._table = table
        self._splitter = pre_tokenizers.Sequence(_splits(pre_tokenizer))

    def encode(self, text: str) -> list[int]:
        words = [word for word, _ in self._splitter.pre_tokenize_str(text)]
        return _without(self._table.size, self._table.encode(words))


def _without(missing_id: int, ids: list[int]) -> list[int]:
    if missing_id not in ids:
        return ids
    _LOG.warning("the vocabulary has no token for some bytes of the text: they are left out")
    return [token_id for token_id in ids if token_id != missing_id]


def _bad_merges(error: Exception) -> CheckpointError:
    return CheckpointError(f"the merges do not fit the tokens ({error})", _CONVERT)


def byte_level_splitter(pre_tokenizer: PreTokenizer) -> pre_tokenizers.Sequence:
    """The patterns one after another, then GPT-2's alphabet of bytes."""
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*_splits(pre_tokenizer), to_bytes])


def _splits(pre_tokenizer: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.patterns]


class _GGUFEncoder:
    """Cuts out special tokens, hands the rest to the vocabulary's own rule."""

    def __init__(
        self,
        rule: _ByteLevelBPE | _StoredBPE | SentencePieceBPE,
        every_special: SpecialTokenSplitter,
        user_defined: SpecialTokenSplitter,
        adds_leading_space: bool,
    ) -> None:
        self._rule = rule
        self._every_special = every_special
        self._user_defined = user_defined  # matched in plain text too: gemma's runs of blanks, HTML tags
        self._adds_leading_space = adds_leading_space

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids: list[int] = []
        follows_special = True  # so does the start of the text
        for part in (self._every_special if parse_special else self._user_defined).split(text):
            if isinstance(part, int):
                ids.append(part)
                follows_special = True
            else:
                ids.extend(self._rule.encode(" " + part if self._adds_leading_space and follows_special else part))
                follows_special = False
        return ids


@dataclass(frozen=True)
class GGUFTokenizer:
    """All that the metadata says about a tokenizer, once: to encode with (build_tokenizer) or to write out in another
    form (tokenizer_export.py)."""

    metadata: Mapping[str, Any]
    table: PieceTable
    kinds: Sequence[int]
    pre_tokenizer: PreTokenizer | None  # None: SentencePiece, whose joins follow from `scores`
    scores: Sequence[float]
    unknown_id: int | None
    adds_leading_space: bool
    control_ids: set[int]  # never found in plain text
    user_defined_ids: set[int]  # found in plain text too
    blank_eating_ids: set[int]  # swallow the blanks that follow them: phi-3's
    bos_id: int | None
    eos_id: int | None
    padding_id: int | None
    end_ids: set[int]
    hidden_ids: set[int]  # by skip_special_tokens
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]

    @cached_property
    def pieces(self) -> list[str]:
        return self.table.pieces

    @cached_property
    def ids(self) -> dict[str, int]:
        return self.table.ids

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        lines = _Fields(self.metadata).required("merges")
        return [(left, right) for left, _, right in (line.partition(" ") for line in lines)]


def read_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    fields = _Fields(metadata)
    family = fields.required("model")
    if family not in ("gpt2", "llama"):
        raise CheckpointError(f"tokenizer model '{family}' is not supported", "use a model of the gpt2 or llama kind")
    pre_tokenizer: PreTokenizer | None = _pre_tokenizer(fields) if family == "gpt2" else None
    table: PieceTable
    if pre_tokenizer is not None and native.missing() is None:
        table = _stored_pieces(fields, pre_tokenizer)
    else:
        table = ListedPieces(fields.required("tokens"))
    size = table.size
    vocabulary = _GGUFVocabulary(table, fields.column("token_type", size, TokenKind.NORMAL), family == "gpt2")
    if family == "gpt2":
        scores: Sequence[float] = ()
        bos_id, eos_id = fields.token_id("bos", size), fields.token_id("eos", size)
    else:
        scores = fields.column("scores", size, 0.0)
        bos_id, eos_id = fields.token_id("bos", size, 1), fields.token_id("eos", size, 2)
    control, user_defined, eats_blanks = _special_ids(metadata, vocabulary)
    end_ids = _end_ids(fields, vocabulary, eos_id)
    return GGUFTokenizer(
        metadata=metadata,
        table=table,
        kinds=vocabulary.kinds,
        pre_tokenizer=pre_tokenizer,
        scores=scores,
        unknown_id=fields.token_id("unknown", size, 0 if pre_tokenizer is None else None),
        adds_leading_space=pre_tokenizer is None and bool(fields.get("add_space_prefix", True)),
        control_ids=control,
        user_defined_ids=user_defined,
        blank_eating_ids=eats_blanks,
        bos_id=bos_id,
        eos_id=eos_id,
        padding_id=fields.token_id("padding", size),
        end_ids=end_ids,
        hidden_ids=vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN) | end_ids,
        prefix_ids=_edge_token(fields, "bos", pre_tokenizer is None or pre_tokenizer.adds_bos, bos_id),
        suffix_ids=_edge_token(fields, "eos", False, eos_id),
    )


def _stored_pieces(fields: _Fields, pre_tokenizer: PreTokenizer) -> StoredPieces:
    try:
        return StoredPieces(fields.strings("tokens"), fields.strings("merges"), pre_tokenizer.ignore_merges)
    except ValueError as error:
        raise _bad_merges(error) from None


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    parts = read_tokenizer(metadata)
    vocabulary = _GGUFVocabulary(parts.table, parts.kinds, parts.pre_tokenizer is not None)
    rule: _ByteLevelBPE | _StoredBPE | SentencePieceBPE
    if parts.pre_tokenizer is not None and isinstance(parts.table, StoredPieces):
        rule = _StoredBPE(parts.table, parts.pre_tokenizer)
    elif parts.pre_tokenizer is not None:
        rule = _ByteLevelBPE(parts.merges, parts.table, parts.pre_tokenizer)
    else:
        rule = SentencePieceBPE(parts.pieces, parts.ids, parts.scores, parts.unknown_id)

    def splitter(token_ids: set[int]) -> SpecialTokenSplitter:
        return SpecialTokenSplitter(
            [SpecialToken(parts.table.piece(i), i, i in parts.blank_eating_ids) for i in sorted(token_ids)]
        )

    every_special = splitter(parts.control_ids | parts.user_defined_ids)
    return Tokenizer(
        _GGUFEncoder(rule, every_special, splitter(parts.user_defined_ids), parts.adds_leading_space),
        vocabulary,
        bos_id=parts.bos_id,
        eos_ids=parts.end_ids,
        special_ids=parts.hidden_ids,
        prefix_ids=parts.prefix_ids,
        suffix_ids=parts.suffix_ids,
        adds_leading_space=parts.adds_leading_space,
        dropped_bytes=None if parts.blank_eating_ids else _dropped_bytes(parts),
    )


def _dropped_bytes(parts: GGUFTokenizer) -> bytes:
    if parts.pre_tokenizer is None:
        return b""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return b"".join(byte_level_bytes(each) for each in alphabet if parts.table.find(each) is None)


def _pre_tokenizer(fields: _Fields) -> PreTokenizer:
    name = fields.get("pre")
    if not name:
        _LOG.warning("the file does not name its pre-tokenizer: text may be cut into the wrong words")
    return find_pre_tokenizer(name or "default")


def _end_ids(fields: _Fields, vocabulary: _GGUFVocabulary, eos_id: int | None) -> set[int]:
    named = {eos_id, *(fields.token_id(name, vocabulary.size) for name in ("eot", "eom"))}
    ends = vocabulary.named(_END_NAMES.split()) | {token_id for token_id in named if token_id is not None}
    # Where </s> is not a control token (gemma, qwen) it closes an HTML tag and ends nothing.
    return {i for i in ends if i in named or vocabulary.kinds[i] == TokenKind.CONTROL or vocabulary.piece(i) != "</s>"}


def _special_ids(metadata: Mapping[str, Any], vocabulary: _GGUFVocabulary) -> tuple[set[int], set[int], set[int]]:
    """(control, user-defined, those that eat blanks). Names of control tokens count as such in any case."""
    control = vocabulary.of_kind(TokenKind.CONTROL, TokenKind.UNKNOWN)
    control |= vocabulary.named(f"{_END_NAMES} {_FILL_IN_NAMES}".split())
    user_defined = vocabulary.of_kind(TokenKind.USER_DEFINED) - control
    name = str(metadata.get("general.name", "")).lower()
    if "phi-3" not in name and "phi3" not in name:  # the file format has no field for this
        return control, user_defined, set()
    keeps_blanks = vocabulary.named(("<unk>", "<s>", "<|endoftext|>"))
    return control, user_defined, (control | user_defined) - keeps_blanks


def _edge_token(fields: _Fields, name: str, default: bool, token_id: int | None) -> tuple[int, ...]:
    """The token to add before or after a sequence, if the file (or the kind of vocabulary) asks for one."""
    if not fields.get(f"add_{name}_token", default):
        return ()
    if token_id is None:
        raise CheckpointError(f"{_PREFIX}add_{name}_token is set but there is no {name} token", _CONVERT)
    return (token_id,)
