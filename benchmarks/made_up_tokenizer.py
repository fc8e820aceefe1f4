"""A made-up tokenizer for made-up weights: byte-level BPE of any size, the same on every machine.

Structured output needs to know which text each token is. Half of the tokens are of small letters and blanks, half of
any printable characters, up to eight bytes, so that a grammar's masks are about as full as with a real vocabulary. The
ids that config.json says begin and end a text are special. Standard library only: gpu_vs_vllm.py writes it beside a
config.json, for both engines.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

_LONGEST_PART = 4  # bytes of the tokens that others are joined of
_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def byte_characters() -> list[str]:
    """By byte: the character that byte-level vocabularies write for it (printable ones stand for themselves)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(0x100 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]


def special_ids(config: dict[str, Any]) -> list[int]:
    found = [config.get(name) for name in _SPECIAL]
    ids = {each for ids in found for each in (ids if isinstance(ids, list) else [ids]) if each is not None}
    return sorted(each for each in ids if 0 <= each < config["vocab_size"])


def merged_tokens(count: int) -> tuple[list[str], list[list[str]]]:
    """The 256 bytes and so many more tokens that `count` are reached, and the pairs that those are made of."""
    characters, draw = byte_characters(), random.Random(0)
    tokens = list(characters)
    letters = [characters[byte] for byte in b"abcdefghijklmnopqrstuvwxyz "]
    printable = [characters[byte] for byte in range(0x20, 0x7F)]
    known, merges = set(tokens), []
    while len(tokens) < count:
        pool = (letters, printable)[len(tokens) % 2]
        first, second = draw.choice(pool), draw.choice(pool)
        joined = first + second
        if joined in known:
            continue
        known.add(joined)
        tokens.append(joined)
        merges.append([first, second])
        if len(joined) <= _LONGEST_PART:
            pool.append(joined)
    return tokens[:count], merges


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """tokenizer.json and tokenizer_config.json for a model of this config.json."""
    size, special = config["vocab_size"], special_ids(config)
    tokens, merges = merged_tokens(size - len(special))
    ordinary = iter(tokens)
    vocabulary = {f"<|{each}|>" if each in special else next(ordinary): each for each in range(size)}
    added = [
        {"id": each, "content": f"<|{each}|>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for each in special
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "vocab": vocabulary, "merges": merges, "fuse_unk": False, "byte_fallback": False}
    model |= dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    parts: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    parts |= {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(parts, ensure_ascii=False))
    end = {"eos_token": f"<|{special[-1]}|>"} if special else {}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1 << 20, **end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
