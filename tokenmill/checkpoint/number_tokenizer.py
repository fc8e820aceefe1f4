"""Stand-in tokenizers for models without one: tokens are written as numbers. Imports no torch.

With made-up weights (benchmarks) any text is as good as another, and its bytes are the tokens. A real model would
answer nonsense to these: its prompts are token ids, and text is refused.
"""

from __future__ import annotations

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError


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


class _OnlyNumbers(_Numbers):
    """The same, but text is refused."""

    def __init__(self, size: int, model: str) -> None:
        super().__init__(size)
        self._model = model

    def encode(self, text: str, parse_special: bool) -> list[int]:  # noqa: ARG002
        raise UserError(
            f"{self._model} has no tokenizer to read text with", "give token ids, or add its tokenizer.json"
        )


def numbering_tokenizer(vocab_size: int) -> Tokenizer:
    numbers = _Numbers(vocab_size)
    return Tokenizer(numbers, numbers, bos_id=None, eos_ids=(), special_ids=())


def missing_tokenizer(model: str, vocab_size: int) -> Tokenizer:
    """Of a model that is served without one; `model` names it in errors."""
    numbers = _OnlyNumbers(vocab_size, model)
    return Tokenizer(numbers, numbers, bos_id=None, eos_ids=(), special_ids=(), reads_text=False)
