"""Calibration sequences: from a text file, a jsonl of chats or texts, or the built-in text, cut to equal lengths.

Holds out a part of the text for the gate, so that quality is not measured on calibration text. Too little text is
refused with the number of tokens needed. Used by the job; knows nothing of what the sequences are for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.runtime.observation.default_text import default_text

DEFAULT_ORIGIN = "built-in text"
_MAX_BYTES = 64 << 20
_HELD_OUT_SHARE, _MAX_HELD_OUT = 0.1, 100_000  # of the text's characters
_HELD_OUT_SEED = 1
_LINE = 'write one object per line: {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationText:
    sequences: Tensor  # int64 [samples, length]
    held_out: str  # text that was not used; the built-in one where the file was too short
    origin: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.sequences.numpy().tobytes()).hexdigest()


def read_calibration(
    path: Path | None, tokenizer: Tokenizer, template: ChatTemplate | None, samples: int, length: int
) -> CalibrationText:
    """`samples` sequences of `length` tokens, evenly spaced over the text."""
    if samples < 1 or length < 8:
        raise UserError(
            f"{samples} sequences of {length} tokens are too few to calibrate on",
            "give --calibration-samples from 1 and --calibration-length from 8",
        )
    needed = samples * length
    if path is None:
        ids: list[int] = []
        size = 5 * needed
        while len(ids) < needed:
            ids = tokenizer.encode(default_text(size))
            size *= 2
        return CalibrationText(_cut(ids, samples, length, tokenizer), built_in_held_out(), DEFAULT_ORIGIN)
    documents, encode = _read_documents(path, tokenizer, template)
    kept, held_out = _hold_out(documents)
    ids = encode(kept)
    if len(ids) < needed and held_out:
        kept, held_out = documents, []
        ids = encode(kept)
    if len(ids) < needed:
        enough = len(ids) // length
        raise UserError(
            f"'{path}' has {len(ids)} tokens; {samples} sequences of {length} need {needed}",
            "give more text"
            + (f", or --calibration-samples {enough}" if enough else ", or a lower --calibration-length"),
        )
    text = "\n\n".join(_plain_text(document) for document in held_out) or built_in_held_out()
    return CalibrationText(_cut(ids, samples, length, tokenizer), text, path.name)


def built_in_held_out() -> str:
    return default_text(60_000, _HELD_OUT_SEED)


def _cut(ids: Sequence[int], samples: int, length: int, tokenizer: Tokenizer) -> Tensor:
    """Evenly spaced windows; each begins with the token that begins a text, where the model has one."""
    stride = (len(ids) - length) / max(1, samples - 1) if samples > 1 else 0.0
    starts = [int(number * stride) for number in range(samples)]
    sequences = torch.tensor([ids[start : start + length] for start in starts])
    begins = tokenizer.encode("")[:1]
    if begins and begins[0] == tokenizer.bos_id:
        sequences[:, 0] = begins[0]
    return sequences


def _read_documents(
    path: Path, tokenizer: Tokenizer, template: ChatTemplate | None
) -> tuple[list[Any], Callable[[Sequence[Any]], list[int]]]:
    """The documents of a file, and how to encode some of them: paragraphs of a text, lines of a jsonl."""
    text = read_text(path)
    if path.suffix not in (".jsonl", ".ndjson"):
        return text.splitlines(keepends=True), lambda lines: tokenizer.encode("".join(lines))
    entries = [_entry(line, number, template) for number, line in enumerate(text.splitlines(), 1) if line.strip()]

    def encode(chosen: Sequence[Any]) -> list[int]:
        ids: list[int] = []
        for entry in chosen:
            if "messages" in entry:
                assert template is not None
                prompt = template.render(entry["messages"], add_generation_prompt=False)
                ids += tokenizer.encode(prompt, add_special_tokens=False, parse_special=True)
            else:
                ids += tokenizer.encode(entry["text"])
        return ids

    return entries, encode


def _entry(line: str, number: int, template: ChatTemplate | None) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        raise UserError(f"line {number} of the calibration file is not JSON", _LINE) from None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return {"text": entry["text"]}
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        if template is None:
            raise UserError("the model has no chat template for the chats of the calibration file", "give plain texts")
        return {"messages": entry["messages"]}
    raise UserError(f"line {number} of the calibration file has neither text nor messages", _LINE)


def _hold_out(documents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """(for calibration, for the gate): the last tenth, by characters."""
    sizes = [len(_plain_text(document)) for document in documents]
    budget = min(_MAX_HELD_OUT, sum(sizes) * _HELD_OUT_SHARE)
    first, taken = len(documents), 0
    while first > 1 and taken + sizes[first - 1] <= budget:
        first -= 1
        taken += sizes[first]
    return list(documents[:first]), list(documents[first:])


def _plain_text(document: Any) -> str:
    if isinstance(document, str):
        return document.rstrip("\n")
    if "text" in document:
        return str(document["text"])
    return "\n".join(str(message.get("content") or "") for message in document["messages"] if isinstance(message, dict))


def read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES)
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "give a text or .jsonl file") from None
    try:
        return data.decode("utf-8", errors="ignore" if len(data) == _MAX_BYTES else "strict")
    except UnicodeDecodeError as error:
        raise UserError(f"'{path}' is not UTF-8 at byte {error.start}", "convert it to UTF-8") from None
