"""Log-probabilities of prompts: bounded in number, and the same whether they are built in one piece or in many."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.engine.outputs import Logprob, PositionLogprobs, RequestOutput
from tokenmill.serve.api import logprobs
from tokenmill.serve.api.logprobs import (
    CompletionLogprobs,
    LogprobBudget,
    chat_logprobs,
    long_chat_logprobs,
    prompt_scores,
)
from tokenmill.serve.api.protocol import GenerationBody
from tokenmill.serve.api.sampling import build_params
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError

_tokenizer = cast(Tokenizer, SimpleNamespace(token_bytes=lambda token_id: b"t%d" % token_id))


def _positions(number: int) -> list[PositionLogprobs | None]:
    return [None, *({token: Logprob(-0.5, 1, "a"), token + 1: Logprob(float("-inf"), 2)} for token in range(1, number))]


def test_scores_in_the_shape_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_PIECE", 2)
    output = cast(RequestOutput, SimpleNamespace(prompt_logprobs=_positions(5)))
    shown: Any = msgspec.json.decode(msgspec.json.encode(asyncio.run(prompt_scores(output))))
    assert shown[0] is None
    assert shown[4] == {
        "4": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
        "5": {"logprob": None, "rank": 2, "decoded_token": None},
    }
    assert len(shown) == 5
    none = cast(RequestOutput, SimpleNamespace(prompt_logprobs=None))
    assert bytes(asyncio.run(prompt_scores(none))) == b"[]"


def test_pieces_are_as_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> Any:
        lists = CompletionLogprobs(_tokenizer, 2)
        taken = [asyncio.run(lists.take(range(number), _positions(number))) for number in (5, 1)]
        return msgspec.json.decode(msgspec.json.encode(taken))

    whole = read()
    monkeypatch.setattr(logprobs, "_PIECE", 2)
    assert read() == whole
    assert whole[0]["text_offset"] == [0, 2, 4, 6, 8]
    assert whole[1]["text_offset"] == [10]


def test_a_complete_chat_has_what_its_stream_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "_PIECE", 2)
    positions = [position for position in _positions(6) if position is not None]
    for number in (0, 1, 5):
        ids = range(1, number + 1)
        whole = asyncio.run(long_chat_logprobs(_tokenizer, ids, positions[:number], 2))
        streamed = chat_logprobs(_tokenizer, ids, positions[:number], 2)
        assert msgspec.json.encode(whole) == msgspec.json.encode(streamed)


def test_entries_are_bounded_over_all_prompts_and_choices() -> None:
    budget = LogprobBudget(100)
    budget.spend(1000, None, 16)
    budget.spend(10, 1, 2)
    budget.spend(10, 0, None)
    budget.spend(5, 9, 1)
    with pytest.raises(ApiError, match="more than 100 entries") as caught:
        budget.spend(1, 0, 1)
    assert (caught.value.status, caught.value.param) == (400, "prompt_logprobs")


def test_streams_have_no_prompt_logprobs() -> None:
    with pytest.raises(ApiError, match="not part of streams"):
        build_params(GenerationBody(stream=True, prompt_logprobs=1), ServeConfig(), 4)
