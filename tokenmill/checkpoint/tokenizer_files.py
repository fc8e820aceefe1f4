"""How a model's path becomes its tokenizer and its chat template: a GGUF file, or a directory of Hugging Face files.

Knows which file to read, not how. Imports no torch. Called by the engine, the server, the quantizer and the evaluators.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint import gguf_tokenizer, hf_config, hf_tokenizer
from tokenmill.checkpoint.gguf_header import is_gguf, read_gguf_metadata
from tokenmill.checkpoint.number_tokenizer import missing_tokenizer, numbering_tokenizer
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    from tokenmill.checkpoint.chat_template import ChatTemplate

# Any of these is a tokenizer; one that we cannot read is refused with the reason.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face directory."""
    path = Path(path)
    if _has_json(path):
        config = path / "tokenizer_config.json"
        return hf_tokenizer.build_tokenizer(path / "tokenizer.json", config if config.is_file() else None)
    return gguf_tokenizer.build_tokenizer(gguf_metadata(path))


def load_chat_template(path: Path, source: str = "") -> ChatTemplate | None:
    """The chat template of a GGUF file or of a Hugging Face directory; None where it has none. `source`: a template to
    use instead, with the special tokens of the model."""
    path = Path(path)
    templates = _templates()
    if _has_json(path):
        return templates.directory_template(path, source)
    return templates.gguf_template(gguf_metadata(path), source)


def tokenizer_of(path: Path, load_format: str, template_source: str = "") -> tuple[Tokenizer, ChatTemplate | None]:
    """The tokenizer and the chat template of a model, or a stated one; numbers for tokens where it has none."""
    path = Path(path)
    stated = _templates().ChatTemplate(template_source) if template_source else None
    if load_format == "dummy" and not (path / "tokenizer.json").is_file():
        return numbering_tokenizer(_vocab_size(path)), stated
    if lacks_tokenizer(path):
        return missing_tokenizer(path.name, _vocab_size(path)), stated
    if _has_json(path):
        return load_tokenizer(path), load_chat_template(path, template_source)
    metadata = gguf_metadata(path)  # once for both
    return gguf_tokenizer.build_tokenizer(metadata), _templates().gguf_template(metadata, template_source)


def _templates() -> Any:
    """Imported when a template is read: the engine does that beside the weights, and Jinja takes as long as they do."""
    from tokenmill.checkpoint import chat_template

    return chat_template


def _has_json(path: Path) -> bool:
    return path.is_dir() and (path / "tokenizer.json").is_file()


def lacks_tokenizer(path: Path) -> bool:
    """Whether this is a directory of weights without any tokenizer: prompts are token ids then."""
    if not (path / "config.json").is_file():
        return False
    files = [file for file in path.iterdir() if file.is_file()]
    return not any(file.name in _TOKENIZER_FILES or is_gguf(file) for file in files)


def _vocab_size(path: Path) -> int:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return hf_config.describe(config, None).vocab_size


def gguf_metadata(path: Path) -> Mapping[str, Any]:
    """Metadata of the GGUF file at `path`, or of the only one in that directory; explains what is missing otherwise."""
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
