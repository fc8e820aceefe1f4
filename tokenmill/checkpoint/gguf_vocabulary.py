"""A Hugging Face tokenizer as GGUF metadata (`tokenizer.ggml.*`), for the reader in gguf_tokenizer.py and llama.cpp.

Byte-level vocabularies keep their merges and get the name of the pre-tokenizer that cuts words as theirs does; those of
SentencePiece get the scores that their merges imply. What GGUF cannot express is refused, not approximated. Called
by gguf_export.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from tokenmill.checkpoint.gguf_tokenizer import TokenKind, byte_level_splitter
from tokenmill.checkpoint.gguf_writer import Value
from tokenmill.checkpoint.hf_tokenizer import build_tokenizer, read_json, token_text
from tokenmill.checkpoint.piece_bytes import byte_piece_value
from tokenmill.checkpoint.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_chat_template
from tokenmill.errors import CheckpointError

_PREFIX = "tokenizer.ggml."
_DOWNLOAD = "download the model's tokenizer files too"
_PREFERRED = ("llama-bpe", "smollm", "qwen2", "gpt-2", "gpt-4o", "tekken", "deepseek-v3", "default")
# Where known pre-tokenizers differ: digits, contractions, blanks and line ends, marks, punctuation, other scripts.
_PROBE = (
    "Hello world's 12345 7 I'M we'LL  don't\n\n  x = [1, 22, 333, 4444];\r\n\tdef f(a_b):\n    return 'ok'  \n"
    "naïve café ẞtraße HelloWORLD aB iPhone 你好，世界 12３ こんにちは 안녕 Привет мир! مرحبا हिन्दी 🙂🚀 "
    "... !!! -- /usr/bin\n/\n \n   end "
)
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def vocabulary_values(directory: Path, vocab_size: int) -> dict[str, Value]:
    """`tokenizer.*` metadata of the tokenizer in a Hugging Face directory, for an embedding of `vocab_size` rows."""
    definition_path, config_path = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if not definition_path.is_file():
        raise CheckpointError(f"{directory} has no tokenizer.json", _DOWNLOAD)
    definition = read_json(definition_path)
    config = read_json(config_path) if config_path.is_file() else {}
    model = definition.get("model", {})
    if model.get("type") != "BPE":
        raise CheckpointError(f"a GGUF cannot hold a {model.get('type')} tokenizer", "choose a BPE model")
    ours = build_tokenizer(definition_path, config_path if config_path.is_file() else None)
    added = _added_tokens(definition, config)
    is_byte_level = _is_byte_level(definition)
    if not is_byte_level and not model.get("byte_fallback", False):
        raise CheckpointError("a GGUF cannot hold a vocabulary without bytes", "choose a safetensors format")
    pieces, kinds = _pieces(model["vocab"], added, vocab_size, is_byte_level, token_text(config, "unk_token"))
    merges = [entry if isinstance(entry, str) else " ".join(entry) for entry in model["merges"]]
    values: dict[str, Value] = {}
    if is_byte_level:
        name = _pre_tokenizer_name(definition_path, bool(model.get("ignore_merges", False)))
        values |= {"model": "gpt2", "pre": name, "tokens": pieces, "token_type": kinds, "merges": merges}
    else:
        scores = _scores(merges, pieces, kinds)
        values |= {"model": "llama", "pre": "default", "tokens": pieces, "scores": scores, "token_type": kinds}
    values |= _special_values(ours, config, {piece: token_id for token_id, piece in enumerate(pieces)})
    result = {_PREFIX + key: value for key, value in values.items()}
    template = load_chat_template(directory)
    if template is not None:
        result["tokenizer.chat_template"] = template.source
    return result


def _is_byte_level(definition: Mapping[str, Any]) -> bool:
    """Whether pieces are written in GPT-2's alphabet of bytes: the decoder says so."""
    decoder = definition.get("decoder") or {}
    return any(step.get("type") == "ByteLevel" for step in (decoder, *decoder.get("decoders", [])))


def _added_tokens(definition: Mapping[str, Any], config: Mapping[str, Any]) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special)."""
    added = {int(key): flags for key, flags in (config.get("added_tokens_decoder") or {}).items()}
    added |= {entry["id"]: entry for entry in definition.get("added_tokens", [])}
    return {token_id: (flags["content"], bool(flags.get("special", False))) for token_id, flags in added.items()}


def _pieces(
    vocabulary: Mapping[str, int],
    added: Mapping[int, tuple[str, bool]],
    size: int,
    is_byte_level: bool,
    unknown: str | None,
) -> tuple[list[str], list[int]]:
    """Token texts and kinds by id; rows of the embedding without a token are unused."""
    highest = max([*vocabulary.values(), *added])
    if highest >= size:
        raise CheckpointError(f"the tokenizer has id {highest}, the model {size} rows", "use the files of one model")
    pieces, kinds = [f"[PAD{token_id}]" for token_id in range(size)], [int(TokenKind.UNUSED)] * size
    for piece, token_id in vocabulary.items():
        is_byte = not is_byte_level and byte_piece_value(piece) is not None
        pieces[token_id], kinds[token_id] = piece, int(TokenKind.BYTE if is_byte else TokenKind.NORMAL)
    for token_id, (piece, is_special) in added.items():
        kind = TokenKind.CONTROL if is_special else TokenKind.USER_DEFINED
        if piece == unknown and not is_byte_level:
            kind = TokenKind.UNKNOWN
        pieces[token_id], kinds[token_id] = piece, int(kind)
    return pieces, kinds


def _scores(merges: Iterable[str], pieces: list[str], kinds: list[int]) -> list[float]:
    """SentencePiece joins the pair whose result scores best: the earlier a merge makes a token, the better it scores.

    Single characters are made by no merge and come after all; control and byte tokens have no score.
    """
    order: dict[str, int] = {}
    for merge in merges:
        order.setdefault(merge.replace(" ", "", 1), len(order))
    last = len(order)
    scored = (TokenKind.NORMAL, TokenKind.USER_DEFINED)
    tokens = zip(pieces, kinds, strict=True)
    return [-float(order.get(piece, last)) if kind in scored else 0.0 for piece, kind in tokens]


def _pre_tokenizer_name(definition: Path, ignore_merges: bool) -> str:
    """The name in llama.cpp's table whose words are those of this tokenizer on text chosen to tell them apart."""
    expected = tokenizers.Tokenizer.from_file(str(definition)).pre_tokenizer.pre_tokenize_str(_PROBE)

    def fits(candidate: PreTokenizer) -> bool:
        if candidate.ignore_merges != ignore_merges:
            return False
        return byte_level_splitter(candidate).pre_tokenize_str(_PROBE) == expected

    for name in (*_PREFERRED, *PRE_TOKENIZERS):
        if fits(PRE_TOKENIZERS[name]):
            return name
    raise CheckpointError("GGUF has no name for the pre-tokenizer of tokenizer.json", "choose a safetensors format")


def _special_values(ours: Tokenizer, config: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Value]:
    values: dict[str, Value] = {}
    for name, key in _NAMED.items():
        text = token_text(dict(config), key)
        if text is not None and text in ids:
            values[f"{name}_token_id"] = ids[text]
    if "bos_token_id" not in values and ours.bos_id is not None:
        values["bos_token_id"] = ours.bos_id
    if "eos_token_id" not in values and ours.eos_ids:
        values["eos_token_id"] = ours.eos_ids[0]
    edges = ours.encode("", add_special_tokens=True)
    values["add_bos_token"] = bool(edges) and edges[0] == ours.bos_id
    values["add_eos_token"] = bool(edges) and edges[-1] in ours.eos_ids
    values["add_space_prefix"] = ours.adds_leading_space
    return values
