"""A model that exists as a config.json only, for benchmarks: its description, no tensors, and a stand-in tokenizer.

The architecture says which weights it needs; model/dummy_reader.py makes them up. Tokens of a directory without a
tokenizer are written as their numbers. Opened by the engine and the server under `--load-format dummy`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tokenmill.checkpoint import hf_config
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.safetensors import read_json
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
from tokenmill.errors import CheckpointError, UserError


class DummyCheckpoint:
    """A Checkpoint without tensors."""

    def __init__(self, path: Path) -> None:
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json", "dummy weights need a directory with one")
        config = read_json(path / "config.json")
        if "quantization_config" in config:
            raise UserError(f"{path} describes quantized weights", "use its plain config.json and --quantization")
        self.path = path
        description = hf_config.describe(config, None)
        self.description = replace(description, name=description.name or path.resolve().name)

    def names(self) -> Iterable[str]:
        return ()

    def __contains__(self, name: str) -> bool:
        return False

    def tensor(self, name: str) -> StoredTensor:
        raise CheckpointError(f"{self.path.name} has no tensor '{name}'", "it is opened for dummy weights")

    def release(self, name: str) -> None:
        pass

    def quantization(self) -> dict[str, object]:
        return {}


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


def tokenizer_of(path: Path, load_format: str) -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of a model; numbers for tokens where it is only a config.json."""
    if load_format == "dummy" and not (path / "tokenizer.json").is_file():
        return numbering_tokenizer(DummyCheckpoint(path).description.vocab_size), None
    return load_tokenizer(path), load_chat_template(path)
