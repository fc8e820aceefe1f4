"""Text to token ids and back, whatever file the vocabulary came from.

Owns the one `Tokenizer` class and how a path becomes one; gguf_tokenizer.py and hf_tokenizer.py fill it. Plain text
never turns into control tokens unless the caller asks with `parse_special`. Knows nothing about models or templates;
imports no torch. Called by the engine, the server and the evaluators.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokenmill.errors import CheckpointError, UserError

if TYPE_CHECKING:
    from tokenmill.checkpoint.chat_template import ChatTemplate

GGUF_MAGIC = b"GGUF"


class TextEncoder(Protocol):
    def encode(self, text: str, parse_special: bool) -> list[int]:
        """Ids of the text alone, without the tokens that start or end a sequence."""
        ...


class Vocabulary(Protocol):
    size: int

    def piece(self, token_id: int) -> str:
        """The token as the vocabulary writes it; "" for an id it does not have."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text; b"" for an id without text."""
        ...


class Tokenizer:
    """One vocabulary with its rules. Safe to share between threads."""

    def __init__(
        self,
        encoder: TextEncoder,
        vocabulary: Vocabulary,
        *,
        bos_id: int | None,
        eos_ids: Iterable[int],
        special_ids: Iterable[int],
        prefix_ids: tuple[int, ...] = (),
        suffix_ids: tuple[int, ...] = (),
        adds_leading_space: bool = False,
    ) -> None:
        self._encoder = encoder
        self._vocabulary = vocabulary
        self._prefix_ids = prefix_ids
        self._suffix_ids = suffix_ids
        self.bos_id = bos_id
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.special_ids = frozenset(special_ids)  # hidden by skip_special_tokens
        self.adds_leading_space = adds_leading_space  # encoding puts a space before the text, decoding takes it away
        self.vocab_size = vocabulary.size

    @classmethod
    def from_file(cls, tokenizer_json: Path, tokenizer_config: Path | None = None) -> Tokenizer:
        """From Hugging Face files."""
        from tokenmill.checkpoint.hf_tokenizer import build_tokenizer

        return build_tokenizer(tokenizer_json, tokenizer_config)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        from tokenmill.checkpoint.gguf_tokenizer import build_tokenizer

        return build_tokenizer(metadata)

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        `add_special_tokens`: with the tokens that start (and end) a sequence of this model. `parse_special`: control
        tokens written out in the text become those tokens; only for text from a chat template, never for a user's.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the text has half a surrogate pair at character {error.start}", "send valid Unicode text"
            ) from None
        ids = self._encoder.encode(text, parse_special)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        hidden = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token_id) for token_id in ids if token_id not in hidden)
        if self.adds_leading_space and data.startswith(b" "):
            data = data[1:]
        return data.decode("utf-8", errors="replace")

    def id_to_piece(self, token_id: int) -> str:
        return self._vocabulary.piece(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes this token adds to the text (of a control token: its name)."""
        return self._vocabulary.token_bytes(token_id)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face directory."""
    path = Path(path)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        config = path / "tokenizer_config.json"
        return Tokenizer.from_file(path / "tokenizer.json", config if config.is_file() else None)
    return Tokenizer.from_gguf(gguf_metadata(path))


def load_chat_template(path: Path) -> ChatTemplate | None:
    """The chat template of a GGUF file or of a Hugging Face directory; None where it has none."""
    from tokenmill.checkpoint.chat_template import directory_template, gguf_template

    path = Path(path)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return directory_template(path)
    return gguf_template(gguf_metadata(path))


def gguf_metadata(path: Path) -> Mapping[str, Any]:
    """Metadata of the GGUF file at `path`, or of the only one in that directory; explains what is missing otherwise."""
    from tokenmill.checkpoint.gguf import read_gguf_metadata

    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and is_gguf(file))
        if len(files) == 1:
            return read_gguf_metadata(files[0])
        if (path / "tokenizer.model").is_file():
            raise CheckpointError(
                f"{path} has only a SentencePiece tokenizer.model",
                "add a tokenizer.json (transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...))",
            )
        raise CheckpointError(f"{path} has no tokenizer.json", "download the model's tokenizer files too")
    if not path.exists():
        raise CheckpointError(f"{path} does not exist", "check the path, or give an alias or a Hugging Face id")
    if not is_gguf(path):
        raise CheckpointError(f"{path} is not a GGUF file", "give a .gguf file or a directory with a tokenizer.json")
    return read_gguf_metadata(path)


def is_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
