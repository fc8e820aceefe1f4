"""What usually follows in a grammar: certain where nothing else is allowed, learned elsewhere, by owner."""

from __future__ import annotations

import pytest

from tests.unit.grammar.test_grammar import ByteTokens
from tokenmill.grammar.compiler import CompiledGrammar, GrammarCompiler
from tokenmill.grammar.guesses import Guesses, State, read_state
from tokenmill.grammar.progress import GrammarProgress
from tokenmill.grammar.repeats import Repeats
from tokenmill.types import StructuredSpec

_EOS = ByteTokens.vocab_size - 1


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokens(), [_EOS], seconds=60.0)


def _state(grammar: CompiledGrammar, text: bytes, owner: bytes = b"") -> State:
    progress = GrammarProgress(grammar)
    assert progress.follow(list(text), ())
    mask = progress.mask()
    assert mask is not None
    return read_state(mask, grammar, owner)


def _schema(compiler: GrammarCompiler, *names: str) -> CompiledGrammar:
    fields = ",".join(f'"{name}":{{"type":"integer"}}' for name in names)
    required = ",".join(f'"{name}"' for name in names)
    return compiler.compile(
        StructuredSpec(
            "json_schema",
            f'{{"type":"object","properties":{{{fields}}},"required":[{required}],"additionalProperties":false}}',
        )
    )


def test_a_token_that_alone_is_allowed_is_certain(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "xyz[0-9]"))
    guess = Guesses().guess(grammar, _state(grammar, b"x"), list(b"x"))
    assert guess is not None
    assert (guess.token_id, guess.confidence) == (ord("y"), 1.0)


def test_forced_bytes_are_guessed_by_their_longest_token(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "[a-z]{8}"))
    name = next(each for each in range(256, _EOS) if grammar.token_bytes(each) == b"name")
    guess = Guesses().guess(grammar, State(1, 2, [ord("n"), name]), [])
    assert guess is not None
    assert guess.token_id == name
    assert guess.confidence < 1.0
    assert Guesses().guess(grammar, State(1, 2, [ord("x"), name]), []) is None


def test_what_came_is_guessed_the_next_time(compiler: GrammarCompiler) -> None:
    grammar, guesses = compiler.compile(StructuredSpec("regex", "[a-z]{8}")), Guesses()
    state, before = _state(grammar, b"ab"), list(b"ab")
    assert guesses.guess(grammar, state, before) is None
    for _ in range(4):
        guesses.learn(grammar, state, before, ord("q"))
    guess = guesses.guess(grammar, state, before)
    assert guess is not None
    assert guess.token_id == ord("q")
    assert guess.confidence > 0.8


def test_what_others_wrote_is_not_guessed(compiler: GrammarCompiler) -> None:
    grammar, guesses = compiler.compile(StructuredSpec("regex", "[a-z]{8}")), Guesses()
    guesses.learn(grammar, _state(grammar, b"abcdef", b"alice"), list(b"abcdef"), ord("q"))
    assert guesses.guess(grammar, _state(grammar, b"abcdef", b"alice"), list(b"abcdef")) is not None
    assert guesses.guess(grammar, _state(grammar, b"abcdef", b"bob"), list(b"abcdef")) is None


def test_what_was_learned_outlives_the_compiled_grammar(compiler: GrammarCompiler) -> None:
    spec, guesses = StructuredSpec("regex", "[a-z]{9}"), Guesses()
    again = GrammarCompiler(ByteTokens(), [_EOS], seconds=60.0).compile(spec)
    first = compiler.compile(spec)
    assert again is not first
    guesses.learn(first, _state(first, b"ab"), list(b"ab"), ord("q"))
    guess = guesses.guess(again, _state(again, b"ab"), list(b"ab"))
    assert guess is not None
    assert guess.token_id == ord("q")


def test_what_stands_in_the_request_is_guessed_if_it_is_allowed(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "[a-z]{8}"))
    repeats = Repeats()
    repeats.extend(list(b"abcx abc"))
    state, before = _state(grammar, b"abc"), list(b"abc")
    guess = Guesses().guess(grammar, state, before, repeats)
    assert guess is not None
    assert guess.token_id == ord("x")
    repeats.extend(list(b"abcx abc1 abc"))  # the latest counts
    assert Guesses().guess(grammar, state, before, repeats) is None


def test_a_source_that_is_wrong_loses_its_say(compiler: GrammarCompiler) -> None:
    grammar, guesses, repeats = compiler.compile(StructuredSpec("regex", "[a-z]{8}")), Guesses(), Repeats()
    repeats.extend(list(b"abcx abc"))
    state, before = _state(grammar, b"abc"), list(b"abc")
    first = guesses.guess(grammar, state, before, repeats)
    assert first is not None
    for number in range(20):  # never the same letter: nothing else becomes likely
        guesses.learn(grammar, state, before, ord("a") + number, first.proposed)
    last = guesses.guess(grammar, state, before, repeats)
    assert last is None or last.confidence < first.confidence / 2


def test_punctuation_is_learned_from_other_grammars(compiler: GrammarCompiler) -> None:
    first, second, guesses = _schema(compiler, "a", "b"), _schema(compiler, "x", "y"), Guesses()
    after_key = ByteTokens.vocab_size - 11 + 2  # `": ` of the words
    assert first.token_bytes(after_key) == b'": '
    for _ in range(3):
        guesses.learn(first, _state(first, b'{"a'), list(b'{"a'), after_key)
    guess = guesses.guess(second, _state(second, b'{"x'), list(b'{"x'))
    assert guess is not None
    assert guess.token_id == after_key


def test_masks_are_kept_for_drafted_tokens(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "[a-z]{8}"))
    progress = GrammarProgress(grammar)
    progress.follow([], ())
    first = progress.mask()
    assert progress.advance(ord("a"))
    second = progress.mask()
    assert progress.follow([], ())
    assert progress.mask() is first
    assert progress.follow([ord("a")], ())
    assert progress.mask() is second
    assert progress.follow([ord("a"), ord("b")], ())
    assert progress.mask() is not second
