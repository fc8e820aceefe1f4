"""Grammars that are meant to do harm: recognised in one pass, refused or cheap to follow, ended alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.unit.grammar.test_grammar import _EOS, ByteTokens, _logits, _request, _write
from tokenmill.errors import UserError
from tokenmill.grammar import check as check_module
from tokenmill.grammar import progress as grammar_progress
from tokenmill.grammar.check import check_grammar
from tokenmill.grammar.compiler import GrammarCompiler
from tokenmill.grammar.source import check_limits, is_gbnf
from tokenmill.grammar.vocabulary import build_vocabulary
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import StructuredSpec


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokens(), [_EOS], seconds=60.0)  # a busy machine is not what is tested


def test_gbnf_is_recognised_in_one_pass() -> None:
    """With a scan that starts anew at each newline these sizes would take hours."""
    for blank in ("\n", " \n", "\n\t", "a\n", "a \n"):
        assert not is_gbnf(blank * (1 << 18))
    assert is_gbnf("\n" * (1 << 18) + '  some-rule \t::= "a"')
    assert not is_gbnf("a" * (1 << 20) + " ::")


@pytest.mark.parametrize("name", ["T", "t"])
def test_a_long_chain_fits_the_stack_of_the_compiler(compiler: GrammarCompiler, name: str) -> None:
    chain = "".join(f'{name}{n}: "a" {name}{n + 1}\n' for n in range(3500))
    grammar = compiler.compile(StructuredSpec("grammar", f'start: {name}0\n{chain}{name}3500: "b"\n'))
    assert grammar.matcher().try_consume_tokens(list(b"aaa")) == 3


_HOSTILE = [
    StructuredSpec("grammar", "\n" * 16_000 + 'start: "a"'),
    StructuredSpec("grammar", "start: s\ns: s s s | s s | A | B\nA: /[a-z]+/\nB: /[a-z0-9 ]+/\n"),
    StructuredSpec("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    StructuredSpec("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
    StructuredSpec("regex", "((a{1,100}){1,100}){1,100}"),
    StructuredSpec("regex", "((((a|b)*c?)*d?)*e?)*"),
    StructuredSpec("regex", "(a|b)*a(a|b){30}"),
    StructuredSpec("regex", ".*a.{200}b.*"),
    StructuredSpec("regex", "|".join(f".*{chr(97 + n)}.{{{13 * n}}}x.*" for n in range(26))),
    StructuredSpec("regex", "(" * 8000 + "a" + ")" * 8000),
    StructuredSpec("json_schema", '{"properties": {"a": ' * 30 + "{}" + "}}" * 30),
    StructuredSpec("json_schema", '{"items": ' * 63 + "{}" + "}" * 63),
    StructuredSpec("json_schema", json.dumps({"anyOf": [{"const": n} for n in range(2000)]})),
    StructuredSpec("choice", choices=tuple(f"choice number {n}" for n in range(3000))),
]


@pytest.mark.parametrize("number", range(len(_HOSTILE)))
def test_a_hostile_grammar_is_refused_or_cheap_to_follow(compiler: GrammarCompiler, number: int) -> None:
    """The check must end and the engine must survive; which of both happens is the library's business."""
    vocabulary = build_vocabulary(ByteTokens(), [_EOS])
    try:
        check_grammar(_HOSTILE[number], vocabulary)
    except UserError:
        return
    _write(_request(compiler.compile(_HOSTILE[number]), _HOSTILE[number], max_tokens=20))


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_a_text_that_is_too_long_is_refused_before_it_is_read(kind: str) -> None:
    with pytest.raises(UserError, match="at most"):
        check_limits(StructuredSpec(kind, "(" * 200_000))


def test_slow_masks_end_their_request_alone(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = StructuredSpec("grammar", "start: /[a-z]*/")  # as a regex its mask would be computed once
    slow, good = _request(compiler.compile(spec), spec), _request(compiler.compile(spec), spec)
    mask, step, clock = grammar_progress.GrammarProgress.banned, [0.0], [0.0]

    def slow_mask(progress: Any, num_logits: int) -> Any:
        ticking = progress is feature._progress.get(slow)  # type: ignore[attr-defined]
        step[0] = 0.01 if ticking else 0.0
        return mask(progress, num_logits)

    def time_passes() -> float:
        clock[0] += step[0]
        return clock[0]

    sampler = Sampler()
    feature = next(each for each in sampler._logit_features if each.active(slow.params))
    monkeypatch.setattr(grammar_progress.time, "thread_time", time_passes)
    monkeypatch.setattr(grammar_progress.GrammarProgress, "banned", slow_mask)
    ended = None
    for position in range(20):
        token_ids, _ = sampler.sample(torch.stack([_logits(position), _logits(position + 100)]), [slow, good])
        assert token_ids[1] is not None
        good.token_ids.append(ord("a"))
        if token_ids[0] is None:
            ended = position
            break
        slow.token_ids.append(ord("a"))
    assert ended is not None
    assert ended >= 3  # a few slow ones are forgiven


def test_the_check_refuses_what_is_slow_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, vocabulary = StructuredSpec("regex", "[a-z]*"), build_vocabulary(ByteTokens(), [_EOS])
    check_grammar(spec, vocabulary)
    clock = iter(range(1_000_000))
    monkeypatch.setattr(check_module.time, "thread_time", lambda: float(next(clock)))
    with pytest.raises(UserError, match="too long to follow"):
        check_grammar(spec, vocabulary)


def test_half_a_surrogate_pair_in_a_schema_is_refused(compiler: GrammarCompiler) -> None:
    with pytest.raises(UserError, match="surrogate"):
        compiler.compile(StructuredSpec("json_schema", '{"type": "object", "properties": {"a\\ud800": true}}'))


@pytest.mark.parametrize(
    "number", ["-9223372036854775808", "-9223372036854775807", "-9223372036854775808.0", "-9.223372036854775808e18"]
)
def test_the_smallest_integer_is_refused_before_the_library_sees_it(compiler: GrammarCompiler, number: str) -> None:
    with pytest.raises(UserError, match="too small"):
        compiler.compile(StructuredSpec("json_schema", f'{{"const": {number}}}'))
