"""Requests that wait for their grammar: each goes on or is refused by itself, and can be cancelled while it waits."""

from __future__ import annotations

import time

import pytest

from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.engine.compiling import Compiling
from tokenmill.engine.messages import Refused, Submit, decode_to_engine, encode
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.types import Request, SamplingParams, StructuredSpec

_PATIENCE = 20.0


def _submit(name: str, regex: str) -> Submit:
    params = SamplingParams(structured=StructuredSpec("regex", regex))
    message = decode_to_engine(encode(Submit.of(Request(name, [1], params))))
    assert isinstance(message, Submit)
    return message


@pytest.fixture
def compiling() -> Compiling:
    return Compiling(GrammarCompiler(ByteTokens(), [ByteTokens.vocab_size - 1], seconds=_PATIENCE))


def _outcomes(compiling: Compiling, count: int) -> dict[str, Request | Refused]:
    found: dict[str, Request | Refused] = {}
    deadline = time.monotonic() + _PATIENCE
    while len(found) < count and time.monotonic() < deadline:
        found |= {each.request_id: each for each in compiling.take()}
    return found


def test_a_good_and_a_bad_one(compiling: Compiling) -> None:
    compiling.add(_submit("good", "a+"))
    compiling.add(_submit("bad", "("))
    assert "good" in compiling
    found = _outcomes(compiling, 2)
    good, bad = found["good"], found["bad"]
    assert isinstance(good, Request)
    assert good.grammar is not None
    assert good.params.structured == StructuredSpec("regex", "a+")
    assert isinstance(bad, Refused)
    assert "unclosed" in bad.message
    assert not len(compiling)


def test_a_cancelled_one_never_comes(compiling: Compiling) -> None:
    compiling.add(_submit("left", "a+"))
    compiling.add(_submit("stays", "b+"))
    compiling.cancel("left")
    assert "left" not in compiling
    assert set(_outcomes(compiling, 1)) == {"stays"}
    assert not len(compiling)
