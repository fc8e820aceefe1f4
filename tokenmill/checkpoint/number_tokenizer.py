"""A stand-in tokenizer for models without one, for benchmarks: tokens are written as numbers. Imports no torch."""

from __future__ import annotations

from tokenmill.checkpoint.tokenizer import Tokenizer


class _Numbers:
    """Token 17 is written "<17>"; text is read as bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str, parse_special: bool) -> list[int]:  # noqa: ARG002
        return [byte % self.size for byte in text.encode()]

    def piece(self, token_id: int) -> str:
        return f"<{token_id}>" if 0 <= token_id < self.size else ""

    def token_bytes(self, token_id: int) -> bytes:
        return self.piece(token_id).encode()


def numbering_tokenizer(vocab_size: int) -> Tokenizer:
    numbers = _Numbers(vocab_size)
    return Tokenizer(numbers, numbers, bos_id=None, eos_ids=(), special_ids=())
