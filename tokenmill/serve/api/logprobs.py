"""Log-probabilities in the two shapes of the OpenAI API: lists in parallel (completions) and a list of records (chat).

Tokens are shown by their text; incomplete characters become U+FFFD there, and are exact in `bytes`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.outputs import PositionLogprobs, RequestOutput
from tokenmill.serve.errors import ApiError

_MIN_LOGPROB = -9999.0  # JSON has no infinity
_PIECE = 256  # positions that are encoded before the event loop gets its turn
_encode = msgspec.json.Encoder().encode


class LogprobBudget:
    """Bounds the log-probabilities of prompts in one answer: they are as many as all tokens, times `num_top` and the
    token itself, times the choices that repeat them."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._num_entries = 0

    def spend(self, num_tokens: int, num_top: int | None, num_choices: int | None) -> None:
        """One prompt; None for `num_top`: without log-probabilities. Raises ApiError beyond the limit."""
        if num_top is None:
            return
        self._num_entries += num_tokens * (max(num_top, 0) + 1) * max(num_choices or 1, 1)
        if self._num_entries > self._max_entries:
            raise ApiError(
                400,
                f"prompt_logprobs would have more than {self._max_entries} entries: ask for fewer per token, fewer "
                "prompts or fewer choices, or serve with a larger --max-logprob-entries",
                param="prompt_logprobs",
            )


async def prompt_scores(output: RequestOutput) -> msgspec.Raw:
    """The log-probabilities of a prompt as vLLM returns them, already as JSON: without an object for each entry, and
    with turns for the event loop in between."""
    positions = output.prompt_logprobs or []
    pieces = []
    for start in range(0, len(positions), _PIECE):
        pieces.append(_encode(positions[start : start + _PIECE]))
        await asyncio.sleep(0)
    return _joined(pieces)


def _joined(lists: Sequence[bytes]) -> msgspec.Raw:
    """Lists in JSON, none of them empty -> one list."""
    return msgspec.Raw(b"[" + b",".join(each[1:-1] for each in lists) + b"]")


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int
) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _MIN_LOGPROB), "bytes": list(data)}

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [entry(each, position[each].logprob) for each in list(position)[:num_top]]
        content.append(entry(token_id, position[token_id].logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


async def long_chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int
) -> dict[str, Any]:
    """The same of a complete answer, already as JSON, with turns for the event loop in between."""
    pieces = []
    for start in range(0, len(token_ids), _PIECE):
        end = start + _PIECE
        piece = chat_logprobs(tokenizer, token_ids[start:end], positions[start:end], num_top)
        pieces.append(_encode(piece["content"]))
        await asyncio.sleep(0)
    return {"content": _joined(pieces), "refusal": None}


class CompletionLogprobs:
    """Builds the parallel lists, and keeps the length of the text so far, from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset

    def skip(self, token_ids: Sequence[int]) -> None:
        """Tokens of the answer that the client has already."""
        self._offset += sum(len(self._text(token_id)) for token_id in token_ids)

    async def take(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """The lists, already as JSON if they are long; the event loop then gets turns in between. `None` stands for a
        first prompt token, which nothing predicts."""
        if len(token_ids) <= _PIECE:
            return self._take(token_ids, positions)
        pieces: dict[str, list[bytes]] = {}
        for start in range(0, len(token_ids), _PIECE):
            end = start + _PIECE
            for name, values in self._take(token_ids[start:end], positions[start:end]).items():
                pieces.setdefault(name, []).append(_encode(values))
            await asyncio.sleep(0)
        return {name: _joined(lists) for name, lists in pieces.items()}

    def _take(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, list[Any]]:
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, position in zip(token_ids, positions, strict=True):
            text = self._text(token_id)
            shown["tokens"].append(text)
            shown["text_offset"].append(self._offset)
            shown["token_logprobs"].append(None if position is None else max(position[token_id].logprob, _MIN_LOGPROB))
            shown["top_logprobs"].append(None if position is None else self._top(position, token_id))
            self._offset += len(text)
        return shown

    def _top(self, position: PositionLogprobs, token_id: int) -> dict[str, float]:
        chosen = [*list(position)[: self._num_top], token_id]
        top: dict[str, float] = {}
        for each in chosen:
            top.setdefault(self._text(each), max(position[each].logprob, _MIN_LOGPROB))
        return top

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")
