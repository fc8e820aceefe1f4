"""Requests that wait for their grammar: each goes on or is refused by itself, and can be cancelled while it waits."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.engine.grammar_queue import GrammarQueue
from tokenmill.errors import UserError
from tokenmill.grammar import compiler as compiler_module
from tokenmill.grammar.compiler import CompiledGrammar, GrammarCompiler
from tokenmill.types import Request, SamplingParams, StructuredSpec

_PATIENCE = 20.0


def _request(name: str, regex: str, tenant: str = "") -> Request:
    return Request(name, [1], SamplingParams(structured=StructuredSpec("regex", regex)), tenant=tenant)


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


class _Held:
    """Compiles one grammar at a time, and none before it is let go; keeps the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        self.began, self.let_go = threading.Event(), threading.Event()
        self._compile = compiler_module.compile_grammar
        monkeypatch.setattr(compiler_module, "compile_grammar", self)

    def __call__(self, spec: StructuredSpec, *others: Any) -> CompiledGrammar:
        self.order.append(spec.text)
        self.began.set()
        assert self.let_go.wait(_PATIENCE)
        return self._compile(spec, *others)


def test_what_nobody_waits_for_is_not_compiled(waiting: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(monkeypatch)
    waiting.add(_request("first", "a"))
    assert held.began.wait(_PATIENCE)
    for name, regex in (("gone", "b"), ("shared 1", "c"), ("shared 2", "c")):
        waiting.add(_request(name, regex))
    for name in ("gone", "shared 1"):
        assert waiting.cancel(name)
    held.let_go.set()
    assert set(_outcomes(waiting, 2)) == {"first", "shared 2"}
    assert held.order == ["a", "c"]


def test_a_grammar_that_was_given_up_can_be_asked_for_again(
    waiting: GrammarQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = _Held(monkeypatch)
    waiting.add(_request("first", "a"))
    assert held.began.wait(_PATIENCE)
    waiting.add(_request("gone", "b"))
    waiting.cancel("gone")
    waiting.add(_request("again", "b"))
    held.let_go.set()
    assert isinstance(_outcomes(waiting, 2)["again"], Request)


def test_tenants_take_turns(waiting: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    held = _Held(monkeypatch)
    waiting.add(_request("first", "x", "flood"))
    assert held.began.wait(_PATIENCE)
    for number in range(8):
        waiting.add(_request(f"flood {number}", f"a{number}", "flood"))
    waiting.add(_request("polite", "b", "polite"))
    waiting.add(_request("same", "a7", "other"))  # the last of the flood, wanted by a third tenant too
    held.let_go.set()
    assert len(_outcomes(waiting, 11)) == 11
    assert held.order[1:4] == ["a0", "b", "a7"]
    assert held.order.count("a7") == 1
