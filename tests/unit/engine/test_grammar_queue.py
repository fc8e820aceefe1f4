"""Requests that wait for their grammar: each goes on or is refused by itself, and can be cancelled while it waits."""

from __future__ import annotations

import time

import pytest

from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.engine.grammar_queue import GrammarQueue
from tokenmill.errors import UserError
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.types import Request, SamplingParams, StructuredSpec

_PATIENCE = 20.0


def _request(name: str, regex: str) -> Request:
    return Request(name, [1], SamplingParams(structured=StructuredSpec("regex", regex)))


@pytest.fixture
def waiting() -> GrammarQueue:
    return GrammarQueue(GrammarCompiler(ByteTokens(), [ByteTokens.vocab_size - 1], seconds=_PATIENCE))


def _outcomes(waiting: GrammarQueue, count: int) -> dict[str, Request | UserError]:
    found: dict[str, Request | UserError] = {}
    deadline = time.monotonic() + _PATIENCE
    while len(found) < count and time.monotonic() < deadline:
        waiting.wait(0.1)
        for each in waiting.take():
            name, outcome = (each.request_id, each) if isinstance(each, Request) else each
            found[name] = outcome
    return found


def test_a_good_and_a_bad_one(waiting: GrammarQueue) -> None:
    waiting.add(_request("good", "a+"))
    waiting.add(_request("bad", "("))
    assert "good" in waiting
    found = _outcomes(waiting, 2)
    good, bad = found["good"], found["bad"]
    assert isinstance(good, Request)
    assert good.grammar is not None
    assert isinstance(bad, UserError)
    assert "unclosed" in str(bad)
    assert not len(waiting)


def test_a_cancelled_one_never_comes(waiting: GrammarQueue) -> None:
    waiting.add(_request("left", "a+"))
    waiting.add(_request("stays", "b+"))
    assert waiting.cancel("left")
    assert not waiting.cancel("left")
    assert "left" not in waiting
    assert set(_outcomes(waiting, 1)) == {"stays"}
    assert not len(waiting)


def test_a_compiler_that_fails_refuses_the_request_and_no_more(
    waiting: GrammarQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("stack overflow")

    monkeypatch.setattr("tokenmill.grammar.compiler.compile_grammar", fail)
    waiting.add(_request("unlucky", "a+"))
    refused = _outcomes(waiting, 1)["unlucky"]
    assert isinstance(refused, UserError)
    assert "stack overflow" in str(refused)
