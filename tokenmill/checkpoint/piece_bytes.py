"""How vocabularies write bytes: GPT-2's printable alphabet, SentencePiece's ▁ and <0xXX>.

Pure functions on pieces of text. Called by the two tokenizer builders.
"""

from __future__ import annotations

import re
from functools import cache

SPACE = "▁"  # stands for a space inside SentencePiece pieces
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_piece_value(piece: str) -> bytes | None:
    """The one byte that a piece like <0x0A> stands for; None for any other piece."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else None


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a piece in GPT-2's alphabet; one that has other characters stands for itself."""
    alphabet = _byte_alphabet()
    try:
        return bytes([alphabet[character] for character in piece])
    except KeyError:
        return piece.encode()


@cache
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte. Printable bytes stand for themselves, the others for 256, 257, ... in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    alphabet = {chr(byte): byte for byte in printable}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(unprintable)}
