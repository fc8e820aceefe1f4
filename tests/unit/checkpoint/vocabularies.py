"""Small vocabularies in the form of GGUF metadata, for the tokenizer's tests."""

from __future__ import annotations

from typing import Any

from tokenizers import pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def byte_level(**fields: Any) -> dict[str, Any]:
    """All bytes, a few merges, then: control <|im_end|>, user-defined <tag>, unused [PAD0]."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "Ġw"]
    special = {"<|im_end|>": CONTROL, "<tag>": USER_DEFINED, "[PAD0]": UNUSED}
    return _metadata(
        {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": [*pieces, *special],
            "token_type": [NORMAL] * len(pieces) + list(special.values()),
            "merges": ["h e", "l l", "he ll", "Ġ w"],
            "eos_token_id": len(pieces),
        },
        fields,
    )


def sentencepiece(pieces: dict[str, float], **fields: Any) -> dict[str, Any]:
    """<unk>, <s>, </s>, <tag> (user-defined), 256 bytes, then `pieces` with their scores."""
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, "<tag>": USER_DEFINED}
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    return _metadata(
        {
            "model": "llama",
            "tokens": [*special, *byte_pieces, *pieces],
            "scores": [-1000.0] * len(special) + [0.0] * 256 + list(pieces.values()),
            "token_type": [*special.values(), *[BYTE] * 256, *[NORMAL] * len(pieces)],
        },
        fields,
    )


def _metadata(base: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in (base | fields).items() if value is not None}
