"""Streams as they are passed on: whole tokens only, one head, ids only for those who asked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokenmill.route.stream import DONE, AnswerStream, BrokenStreamError


def _event(choice: dict[str, Any] | None, **fields: Any) -> bytes:
    head = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
    return b"data: " + json.dumps({**head, "choices": choices, **fields}).encode() + b"\n\n"


def _shown(data: bytes) -> list[Any]:
    return [json.loads(line[6:]) for line in data.decode().splitlines() if line.startswith("data: {")]


def test_pieces_wait_for_the_ids_of_their_token() -> None:
    stream = AnswerStream(wants_ids=False, wants_usage=False)
    assert stream.feed(_event({"delta": {"role": "assistant", "content": ""}}, prompt_token_ids=[1, 2])) == b""
    assert stream.feed(_event({"delta": {"reasoning_content": "hm"}, "token_ids": []})) == b""
    shown = _shown(stream.feed(_event({"delta": {"content": "so"}, "token_ids": [7]})))
    assert [chunk["choices"][0]["delta"] for chunk in shown] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "so"},
    ]
    assert stream.output_ids == [7]
    assert not any("token_ids" in json.dumps(chunk) for chunk in shown)


def test_half_of_what_a_token_says_is_dropped_when_the_replica_dies() -> None:
    stream = AnswerStream(wants_ids=True, wants_usage=False)
    stream.feed(_event({"text": "a", "token_ids": [1]}))
    stream.feed(_event({"text": "b", "token_ids": []}) + b'data: {"cho')
    stream.begin_leg()
    shown = _shown(stream.feed(_event({"text": "bc", "token_ids": [2]}, id="another")))
    assert [(chunk["id"], chunk["choices"][0]["text"]) for chunk in shown] == [("a", "bc")]
    assert stream.output_ids == [1, 2]


def test_bytes_may_come_in_any_pieces() -> None:
    data = _event({"text": "a", "token_ids": [1]}) + _event({"text": "b", "token_ids": [2], "finish_reason": "stop"})
    data += _event(None, usage={"total_tokens": 4}) + DONE
    whole = AnswerStream(True, True).feed(data)
    stream = AnswerStream(True, True)
    assert b"".join(stream.feed(data[place : place + 1]) for place in range(len(data))) == whole
    assert stream.done
    assert stream.finished


def test_tokens_without_text_are_not_shown_to_those_who_did_not_ask() -> None:
    stream = AnswerStream(False, False)
    assert stream.feed(_event({"text": "", "logprobs": None, "token_ids": [1]})) == b""
    assert stream.feed(_event({"delta": {}, "logprobs": None, "token_ids": [2]})) == b""
    assert stream.output_ids == [1, 2]
    assert _shown(stream.feed(_event({"delta": {}, "finish_reason": "stop", "token_ids": [3]})))


def test_a_server_without_token_ids_is_passed_on_and_not_resumed() -> None:
    stream = AnswerStream(False, False)
    assert _shown(stream.feed(_event({"text": "a"})))
    assert not stream.resumable


def test_an_engine_that_is_gone_is_no_answer() -> None:
    stream = AnswerStream(False, False)
    with pytest.raises(BrokenStreamError, match="stopped"):
        stream.feed(b'data: {"error":{"code":"engine_unavailable","message":"the engine stopped"}}\n\n')
    assert stream.feed(b'data: {"error":{"code":"deadline","message":"late"}}\n\n')


def test_the_end_of_a_finished_stream_can_be_made_up() -> None:
    stream = AnswerStream(False, True)
    stream.feed(_event({"text": "a", "token_ids": [1], "finish_reason": "length"}, prompt_token_ids=[5, 6, 7]))
    assert _shown(stream.end())[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    assert stream.end().endswith(DONE)
