"""Log-probabilities in the two shapes of the OpenAI API: lists in parallel (completions) and a list of records (chat).

Tokens are shown by their text; incomplete characters become U+FFFD there, and are exact in `bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.outputs import PositionLogprobs

_MIN_LOGPROB = -9999.0  # JSON has no infinity


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


class CompletionLogprobs:
    """Builds the parallel lists, and keeps the length of the text so far, from chunk to chunk."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._offset = offset

    def take(self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]) -> dict[str, Any]:
        """`None` stands for a first prompt token, which nothing predicts."""
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
