"""Writes a tokenizer as Hugging Face files: tokenizer.json, and tokenizer_config.json with the chat template.

A safetensors checkpoint already has them: they are copied. From a GGUF they are built from the same record as our own
tokenizer, so that both give the same ids; SentencePiece scores are written as the merges that they imply. (One
difference: bytes that a byte-level vocabulary lacks keep their neighbours apart in ours, and do not in theirs.) Called
through hf_export.py.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.chat_template import DEFAULT_NAME, gguf_template
from tokenmill.checkpoint.gguf import GGUFCheckpoint
from tokenmill.checkpoint.gguf_tokenizer import GGUFTokenizer, byte_level_splitter, read_tokenizer
from tokenmill.checkpoint.piece_bytes import SPACE
from tokenmill.errors import CheckpointError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def write_tokenizer(checkpoint: Checkpoint, directory: Path) -> list[Path]:
    """The files of `checkpoint`'s tokenizer, in `directory`."""
    if isinstance(checkpoint, GGUFCheckpoint):
        return _write(checkpoint, directory)
    present = [checkpoint.path / name for name in TOKENIZER_FILES if (checkpoint.path / name).is_file()]
    if not any(path.name == "tokenizer.json" for path in present):
        raise CheckpointError(f"{checkpoint.path} has no tokenizer.json", "download the model's tokenizer files too")
    return [Path(shutil.copyfile(path, directory / path.name)) for path in present]


def _write(checkpoint: GGUFCheckpoint, directory: Path) -> list[Path]:
    parts = read_tokenizer(checkpoint.metadata)
    definition, settings = directory / "tokenizer.json", directory / "tokenizer_config.json"
    build_backend(parts).save(str(definition))
    config = _config(parts, checkpoint)
    settings.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [definition, settings]


def build_backend(parts: GGUFTokenizer) -> tokenizers.Tokenizer:
    """The whole tokenizer as one object of the `tokenizers` library."""
    backend = _byte_level(parts) if parts.pre_tokenizer is not None else _sentencepiece(parts)
    added = [
        AddedToken(parts.pieces[i], **_flags(parts, i)) for i in sorted(parts.control_ids | parts.user_defined_ids)
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])
    if parts.prefix_ids or parts.suffix_ids:
        before = [parts.pieces[i] for i in parts.prefix_ids]
        after = [parts.pieces[i] for i in parts.suffix_ids]
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *(f"{piece}:1" for piece in before), "$B:1", *(f"{p}:1" for p in after)],
            special_tokens=sorted({(parts.pieces[i], i) for i in (*parts.prefix_ids, *parts.suffix_ids)}),
        )
    return backend


def _flags(parts: GGUFTokenizer, token_id: int) -> dict[str, bool]:
    return {
        "special": token_id in parts.hidden_ids,  # gemma's and qwen's </s> closes a tag: not hidden, so not special
        "normalized": False,  # found in the text as it is, before spaces are rewritten
        "rstrip": token_id in parts.blank_eating_ids,
    }


def _byte_level(parts: GGUFTokenizer) -> tokenizers.Tokenizer:
    assert parts.pre_tokenizer is not None
    model = models.BPE(parts.ids, parts.merges, ignore_merges=parts.pre_tokenizer.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = byte_level_splitter(parts.pre_tokenizer)
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(parts: GGUFTokenizer) -> tokenizers.Tokenizer:
    unknown = None if parts.unknown_id is None else parts.pieces[parts.unknown_id]
    model = models.BPE(parts.ids, scored_merges(parts.pieces, parts.ids, parts.scores), unk_token=unknown)
    model.byte_fallback = True
    backend = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", SPACE)
    prepend = [normalizers.Prepend(SPACE)] if parts.adds_leading_space else []
    backend.normalizer = normalizers.Sequence([*prepend, spaces])
    strip = [decoders.Strip(" ", 1, 0)] if parts.adds_leading_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def scored_merges(pieces: Sequence[str], ids: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best: so every way to make a piece, best score first."""
    merges = []
    for token_id, piece in enumerate(pieces):
        if len(piece) < 2 or ids[piece] != token_id:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in ids and right in ids:
                merges.append((-scores[token_id], token_id, cut, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _config(parts: GGUFTokenizer, checkpoint: GGUFCheckpoint) -> dict[str, Any]:
    named = {
        "bos_token": parts.bos_id,
        "eos_token": parts.eos_id,
        "unk_token": parts.unknown_id,
        "pad_token": parts.padding_id,
    }
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(parts.prefix_ids),
        "add_eos_token": bool(parts.suffix_ids),
        **{name: parts.pieces[token_id] for name, token_id in named.items() if token_id is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.description.context_length,
    }
    template = gguf_template(checkpoint.metadata)
    if template is not None and template.variants:
        all_named = {DEFAULT_NAME: template.source, **template.variants}
        config["chat_template"] = [{"name": name, "template": source} for name, source in all_named.items()]
    elif template is not None:
        config["chat_template"] = template.source
    return config
