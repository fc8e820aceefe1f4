"""Masks of many rows in several threads: each lane of a grammar is compiled again, rows spread over them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.grammar import compiler as compiler_module
from tokenmill.grammar.compiler import CompiledGrammar, GrammarCompiler
from tokenmill.grammar.progress import GrammarProgress
from tokenmill.runtime.sampling.features import grammar as feature
from tokenmill.types import Request, SamplingParams, StructuredSpec

_EOS = 256
_SPEC = StructuredSpec("grammar", "start: /([a-z ]{1,8},)*/")  # its masks are not kept by state: all are computed


@pytest.fixture
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokens(), [_EOS], seconds=60.0)


def _with_lanes(compiler: GrammarCompiler, num_lanes: int) -> CompiledGrammar:
    grammar = compiler.compile(_SPEC)
    for number in range(1000):
        if grammar.num_lanes >= num_lanes:
            break
        grammar.want_lane()
        compiler.compile(StructuredSpec("regex", f"a{{{number}}}b"))  # the same thread: another turn of it
    assert grammar.num_lanes >= num_lanes  # one more that was asked for may still come
    return grammar


def _requests(grammar: CompiledGrammar, count: int) -> list[Request]:
    params = SamplingParams(structured=_SPEC, max_tokens=64)
    return [Request(str(number), [1], params, grammar=grammar) for number in range(count)]


def test_rows_spread_over_lanes_and_have_the_same_masks(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "_THREADS", 3)
    monkeypatch.setattr(feature, "_MIN_SHARED_SECONDS", 0.0)
    masks = feature.Grammar()
    requests = _requests(compiler.compile(_SPEC), 9)
    for request in requests:
        assert masks.progress(request).lane == 0
    grammar = _with_lanes(compiler, 3)
    for text in (b"abcd", b",zz", b"y,"):
        for number, request in enumerate(requests):
            request.token_ids.extend(text[: 1 + number % len(text)])
        masks.prepare(requests, [()] * len(requests))
        for request in requests:
            alone = GrammarProgress(grammar)
            alone.follow(request.output_ids, ())
            found, wanted = masks.progress(request).mask(), alone.mask()
            assert found is not None
            assert wanted is not None
            assert (found == wanted).all()
    rows = Counter(masks.progress(request).lane for request in requests)
    assert len(rows) >= 3
    assert max(rows.values()) <= 3


def test_more_lanes_come_only_for_grammars_that_are_kept(compiler: GrammarCompiler) -> None:
    grammar = _with_lanes(compiler, 2)
    for number in range(40):  # more than are cached
        compiler.compile(StructuredSpec("regex", f"c{{{number}}}d"))
    before = grammar.num_lanes
    grammar.want_lane()
    compiler.compile(StructuredSpec("regex", "last"))
    assert grammar.num_lanes == before


def test_a_lane_that_fails_ends_no_compiler(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = compiler.compile(_SPEC)
    real, failed = compiler_module.compile_grammar, threading.Event()

    def fail_once(spec: StructuredSpec, *others: Any) -> CompiledGrammar:
        if spec == _SPEC:
            failed.set()
            raise MemoryError
        return real(spec, *others)

    monkeypatch.setattr(compiler_module, "compile_grammar", fail_once)
    grammar.want_lane()
    assert failed.wait(60)
    assert compiler.compile(StructuredSpec("regex", "after")).num_lanes == 1
    assert grammar.num_lanes == 1


def test_a_grammar_with_all_lanes_wakes_nobody(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "_MAX_LANES", 2)
    grammar = _with_lanes(compiler, 2)
    compiler.compile(StructuredSpec("regex", "what was still asked for has been looked at"))
    grammar.want_lane()
    assert not compiler._lacking


def test_the_time_of_masks_goes_along(compiler: GrammarCompiler) -> None:
    progress = GrammarProgress(_with_lanes(compiler, 2))
    progress._seconds_left = -1.0
    assert progress.moved(1, []).mask() is None
