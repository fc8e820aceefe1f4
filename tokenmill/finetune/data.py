"""Training text -> rows of equal length: several documents to a row, none of which sees another.

A plain text is one stream, cut every `length` tokens. Lines of a .jsonl are documents: texts, chats (through the
model's template) or prompts with completions, of which only the completion is learned. Short documents share rows;
positions begin anew in each, and attention stays inside (ops.py). Knows nothing of models beyond the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.quantize.calibration_text import read_text

IGNORED = -100  # a target that is not learned
_NONE = -1  # the document number of padding
_MAX_HELD_OUT_ROWS = 64
_HELD_OUT_SHARE = 0.1
_LINE = 'write one object per line: {"text": "..."}, {"messages": [...]} or {"prompt": "...", "completion": "..."}'


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens from `first` on are learned (`first` >= 1: the first token of a text has nothing before it)."""

    token_ids: list[int]
    first: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Packed documents, each tensor [rows, length]."""

    ids: Tensor  # int64
    targets: Tensor  # int64: the token that follows, or IGNORED
    documents: Tensor  # int64: which document of its row a token is of; _NONE for padding
    positions: Tensor  # int64, within the document

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORED).sum())

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(self.ids.numpy().tobytes())
        digest.update(self.targets.numpy().tobytes())
        return digest.hexdigest()

    def take(self, rows: Sequence[int] | Tensor | slice, device: torch.device | None = None) -> Rows:
        parts = (self.ids, self.targets, self.documents, self.positions)
        return Rows(*((part[rows] if device is None else part[rows].to(device)) for part in parts))


def read_rows(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, length: int) -> Rows:
    """Every document of a file, packed."""
    documents = read_documents(path, tokenizer, template, length)
    if not documents:
        raise UserError(f"'{path}' has no text to learn from", "give a text of more than a few words")
    return pack(documents, length)


def read_documents(path: Path, tokenizer: Tokenizer, template: ChatTemplate | None, length: int) -> list[Document]:
    text = read_text(path)
    if path.suffix not in (".jsonl", ".ndjson"):
        return _stream(tokenizer.encode(text), _bos(tokenizer), length)
    documents: list[Document] = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            documents += _cut(_document(line, number, tokenizer, template), length)
    return documents


def hold_out(rows: Rows, wanted: int = 0) -> tuple[Rows, Rows]:
    """(for training, held out): the last tenth of the rows, or the last `wanted`."""
    count = wanted or min(_MAX_HELD_OUT_ROWS, max(1, round(len(rows) * _HELD_OUT_SHARE)))
    if len(rows) <= count:
        raise UserError(
            f"the text fills {len(rows)} rows, of which {count} are to be held out",
            "give more text, --eval-data with a text of its own, or a lower --length",
        )
    return rows.take(slice(0, len(rows) - count)), rows.take(slice(len(rows) - count, None))


def pack(documents: Sequence[Document], length: int) -> Rows:
    """Each document into the first row that still has room for it, longest first; a row's order is that of the file."""
    order = sorted(range(len(documents)), key=lambda index: -len(documents[index].token_ids))
    rows: list[list[int]] = []
    free: list[int] = []
    open_from = 0  # rows before it are full
    for index in order:
        size = len(documents[index].token_ids)
        place = next((row for row in range(open_from, len(rows)) if free[row] >= size), None)
        if place is None:
            rows.append([])
            free.append(length)
            place = len(rows) - 1
        rows[place].append(index)
        free[place] -= size
        while open_from < len(rows) and free[open_from] < 2:
            open_from += 1
    rows.sort(key=min)
    packed = Rows(*(torch.full((len(rows), length), fill) for fill in (0, IGNORED, _NONE, 0)))
    for row, members in enumerate(rows):
        at = 0
        for number, index in enumerate(sorted(members)):
            document = documents[index]
            ids = torch.tensor(document.token_ids)
            end = at + len(ids)
            packed.ids[row, at:end] = ids
            packed.documents[row, at:end] = number
            packed.positions[row, at:end] = torch.arange(len(ids))
            packed.targets[row, at + document.first - 1 : end - 1] = ids[document.first :]
            at = end
    return packed


def _stream(ids: list[int], bos: int | None, length: int) -> list[Document]:
    """Whole rows of one text, each opened as a text is where the model wants that; a rest is left out."""
    documents = []
    for begin in range(0, len(ids) - length + 1, length):
        piece = ids[begin : begin + length]
        documents.append(Document([bos, *piece[1:]] if bos is not None else piece))
    if not documents and len(ids) >= 2:
        raise UserError(f"the text has {len(ids)} tokens, fewer than a row of {length}", "lower --length, or give more")
    return documents


def _document(line: str, number: int, tokenizer: Tokenizer, template: ChatTemplate | None) -> Document:
    try:
        entry: Any = json.loads(line)
    except ValueError:
        raise UserError(f"line {number} of the data is not JSON", _LINE) from None
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        return Document(_ended(tokenizer.encode(entry["text"]), tokenizer))
    if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
        if template is None:
            raise UserError("the model has no chat template for the chats of the data", "give texts, or prompts")
        chat = template.render(entry["messages"], add_generation_prompt=False)
        return Document(tokenizer.encode(chat, add_special_tokens=False, parse_special=True))
    prompt, completion = (entry.get(key) for key in ("prompt", "completion")) if isinstance(entry, dict) else (0, 0)
    if isinstance(prompt, str) and isinstance(completion, str):
        before = tokenizer.encode(prompt)
        answer = tokenizer.encode(completion, add_special_tokens=False)
        return Document(_ended([*before, *answer], tokenizer), max(1, len(before)))
    raise UserError(f"line {number} of the data has no text, messages, or prompt and completion", _LINE)


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """With the token that ends a text, so that the model learns to stop."""
    if not tokenizer.eos_ids or (ids and ids[-1] in tokenizer.eos_ids):
        return ids
    return [*ids, tokenizer.eos_ids[0]]


def _cut(document: Document, length: int) -> list[Document]:
    """A document longer than a row becomes several; what is too short to learn from is left out."""
    pieces = []
    for begin in range(0, len(document.token_ids), length):
        piece = Document(document.token_ids[begin : begin + length], max(1, document.first - begin))
        if piece.first < len(piece.token_ids):
            pieces.append(piece)
    return pieces


def _bos(tokenizer: Tokenizer) -> int | None:
    begins = tokenizer.encode("")[:1]
    return begins[0] if begins and begins[0] == tokenizer.bos_id else None
