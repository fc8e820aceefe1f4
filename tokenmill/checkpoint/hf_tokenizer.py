"""Builds a Tokenizer from Hugging Face files: tokenizer.json, tokenizer_config.json, generation_config.json.

The `tokenizers` library does the encoding; how a piece turns into bytes is read from the decoder it declares. Called by
tokenizer_files.py.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from tokenmill.checkpoint.fields import shown
from tokenmill.checkpoint.piece_bytes import SPACE, byte_level_bytes, byte_piece_value
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.word_cache import bound_cache
from tokenmill.errors import CheckpointError, UserError

_DOWNLOAD = "download the model's tokenizer files again"


class _HFVocabulary:
    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, continuation: str = "") -> None:
        """`continuation`: what WordPiece writes before a piece that goes on with a word."""
        self._backend = backend
        self._byte_level = byte_level
        self._continuation = continuation
        self.added = backend.get_added_tokens_decoder()
        self.size = max(backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in self.added), 0)

    def piece(self, token_id: int) -> str:
        return (self._backend.id_to_token(token_id) or "") if 0 <= token_id < self.size else ""

    def token_bytes(self, token_id: int) -> bytes:
        piece = self.piece(token_id)
        if self._byte_level:
            return piece.encode() if token_id in self.added else byte_level_bytes(piece)
        if self._continuation:
            is_start = not piece.startswith(self._continuation) and token_id not in self.added
            return f" {piece}".encode() if is_start else piece.removeprefix(self._continuation).encode()
        return byte_piece_value(piece) or piece.replace(SPACE, " ").encode()


class _HFEncoder:
    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._lock = Lock()  # whether special tokens are recognised is a switch of the shared backend

    def encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock, _library_errors("the tokenizer"):
            self._backend.encode_special_tokens = not parse_special
            return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        with self._lock, _library_errors("the tokenizer"):
            self._backend.encode_special_tokens = True
            return [each.ids for each in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]


def build_tokenizer(tokenizer_json: Path, tokenizer_config: Path | None) -> Tokenizer:
    config = read_json(tokenizer_config) if tokenizer_config else {}
    definition = read_json(tokenizer_json)
    with _library_errors(str(tokenizer_json)):
        backend = tokenizers.Tokenizer.from_file(str(tokenizer_json))
        backend.no_truncation()
        backend.no_padding()
        bound_cache(backend)
        _add_missing_tokens(backend, config)
        prefix, suffix = _edges(backend)

    decoder_steps = list(_steps(definition.get("decoder")))
    byte_level = any(step["type"] == "ByteLevel" for step in decoder_steps)
    continuation = next((str(step.get("prefix", "##")) for step in decoder_steps if step["type"] == "WordPiece"), "")
    if not byte_level and not continuation and not any(s["type"] in ("Metaspace", "Replace") for s in decoder_steps):
        raise CheckpointError(
            f"{tokenizer_json} has a kind of vocabulary that is not supported",
            "use a byte-level, SentencePiece or WordPiece model",
        )
    vocabulary = _HFVocabulary(backend, byte_level, continuation)
    bos_id, eos_id = _named_id(backend, config, "bos_token"), _named_id(backend, config, "eos_token")
    generation = tokenizer_json.with_name("generation_config.json")
    eos_ids = _as_ids(read_json(generation).get("eos_token_id")) if generation.is_file() else []
    if eos_id is not None:
        eos_ids.append(eos_id)
    return Tokenizer(
        _HFEncoder(backend),
        vocabulary,
        bos_id=bos_id,
        eos_ids=eos_ids,
        special_ids={*eos_ids, *(token_id for token_id, token in vocabulary.added.items() if token.special)},
        prefix_ids=_explicit(config, "add_bos_token", bos_id, prefix),
        suffix_ids=_explicit(config, "add_eos_token", eos_id, suffix),
        pair_middle=_pair_middle(backend, prefix, suffix),
        adds_leading_space=bool(continuation) or any(map(_strips_leading_space, decoder_steps)),
        dropped_bytes=b"" if _keeps_text(definition, backend) else None,
    )


@contextlib.contextmanager
def _library_errors(label: str) -> Iterator[None]:
    """The library raises plain Exceptions, and panics (a BaseException) where it relied on what a file says."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{label} is not a tokenizer that works ({reason})", _DOWNLOAD) from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply", _DOWNLOAD) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path} ({error})", _DOWNLOAD) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object", _DOWNLOAD)
    return value


def token_text(config: dict[str, Any], name: str) -> str | None:
    """A token in tokenizer_config.json is a string, or an object with its flags."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _named_id(backend: tokenizers.Tokenizer, config: dict[str, Any], name: str) -> int | None:
    text = token_text(config, name)
    return backend.token_to_id(text) if text is not None else None


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Tokens that only tokenizer_config.json knows. Ids must come out as written there."""
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for token_id, text, flags in _declared_tokens(config.get("added_tokens_decoder")):
        if backend.token_to_id(text) is not None:
            continue
        options = {name: bool(flags[name]) for name in names if name in flags}
        backend.add_tokens([tokenizers.AddedToken(text, **options)])
        if backend.token_to_id(text) != token_id:
            raise CheckpointError(f"tokenizer_config.json puts {shown(text)} at a wrong id {token_id}", _DOWNLOAD)


def _declared_tokens(declared: object) -> list[tuple[int, str, dict[str, Any]]]:
    """(id, text, flags) of `added_tokens_decoder`, in the order of ids."""
    if declared is None:
        return []
    if not isinstance(declared, dict):
        raise CheckpointError("tokenizer_config.json: 'added_tokens_decoder' is not an object", _DOWNLOAD)
    tokens = []
    for key, flags in declared.items():
        text = flags.get("content") if isinstance(flags, dict) else None
        if not isinstance(text, str) or not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise CheckpointError(f"tokenizer_config.json: added token {shown(key)} is {shown(flags)}", _DOWNLOAD)
        tokens.append((int(key), text, flags))
    return sorted(tokens, key=lambda token: token[0])


def _steps(component: object) -> Iterator[dict[str, Any]]:
    """The steps of a component, whether alone or in a sequence."""
    if not isinstance(component, dict):
        return
    if component.get("type") == "Sequence":
        for name in ("decoders", "normalizers", "pretokenizers"):
            for step in component.get(name) or []:
                yield from _steps(step)
    elif "type" in component:
        yield component


def _strips_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step.get("prepend_scheme", "always") != "never" and step.get("add_prefix_space", True)
    return step["type"] == "Strip" and step.get("content") == " " and step.get("start", 0) > 0


def _keeps_text(definition: dict[str, Any], backend: tokenizers.Tokenizer) -> bool:
    """Whether all bytes of a text are part of its tokens: no step composes, removes or strips any. A step that is
    unknown here is taken to do so."""
    normalizers = _steps(definition.get("normalizer"))
    same_length = all(
        step["type"] == "Prepend" or (step["type"] == "Replace" and step.get("pattern") == {"String": " "})
        for step in normalizers
    )
    splits = all(
        step["type"] in ("ByteLevel", "Metaspace", "Digits")
        or (step["type"] == "Split" and step.get("behavior") != "Removed")
        for step in _steps(definition.get("pre_tokenizer"))
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if definition.get("model", {}).get("byte_fallback"):
        alphabet = [f"<0x{value:02X}>" for value in range(256)]
    complete = all(backend.token_to_id(each) is not None for each in alphabet)
    strips = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    return same_length and splits and complete and not strips


def _edges(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor puts before and after a sequence."""
    plain = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(ids) - len(plain) + 1):
        if ids[start : start + len(plain)] == plain:
            return tuple(ids[:start]), tuple(ids[start + len(plain) :])
    return (), ()


def _pair_middle(
    backend: tokenizers.Tokenizer, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> tuple[int, ...] | None:
    """What the post-processor puts between two texts; None if it does nothing with pairs."""
    plain = backend.encode("a", add_special_tokens=False).ids
    ids = backend.encode("a", "a", add_special_tokens=True).ids
    begin, end = len(prefix) + len(plain), len(ids) - len(suffix) - len(plain)
    whole = [*prefix, *plain, *ids[begin:end], *plain, *suffix]
    return tuple(ids[begin:end]) if prefix and begin <= end and ids == whole else None


def _explicit(config: dict[str, Any], name: str, token_id: int | None, default: tuple[int, ...]) -> tuple[int, ...]:
    """tokenizer_config.json overrules the post-processor where it says something."""
    if not isinstance(config.get(name), bool) or token_id is None:
        return default
    return (token_id,) if config[name] else ()
