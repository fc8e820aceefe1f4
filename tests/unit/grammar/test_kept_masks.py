"""Masks kept by state: they are those of a fresh matcher, computed once, bounded, and read by all."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.unit.grammar.regexes import EOS, MergedTokens, random_regex
from tokenmill.errors import UserError
from tokenmill.grammar import regular
from tokenmill.grammar.compiler import CompiledGrammar, GrammarCompiler
from tokenmill.grammar.kept_masks import KeptMasks
from tokenmill.grammar.progress import GrammarProgress
from tokenmill.grammar.vocabulary import Bits
from tokenmill.runtime.sampling.features import grammar as feature
from tokenmill.types import Request, SamplingParams, StructuredSpec

_TOKENS = MergedTokens()
_REGEX = "([a-c ]{1,4},)*"


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(_TOKENS, [EOS], seconds=60.0)  # a busy machine is not what is tested


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[GrammarProgress]:
    """Who computed a mask."""
    calls: list[GrammarProgress] = []
    compute: Callable[[GrammarProgress], Bits | None] = GrammarProgress._computed

    def note(progress: GrammarProgress) -> Bits | None:
        calls.append(progress)
        return compute(progress)

    monkeypatch.setattr(GrammarProgress, "_computed", note)
    return calls


def _fresh(grammar: CompiledGrammar, output: list[int]) -> Bits:
    matcher = grammar.matcher()
    for token_id in output:
        matcher.consume_token(token_id)
    return np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)[: -(-_TOKENS.vocab_size // 32)]


def _allowed(bits: Bits) -> list[int]:
    found: list[int] = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
    return found


def _ids(text: str) -> list[int]:
    return [_TOKENS.tokens.index(bytes([byte])) for byte in text.encode()]


def _walk(grammar: CompiledGrammar, choice: random.Random, length: int = 12) -> None:
    """Random tokens; each mask is that of a matcher that has followed the same output."""
    progress, output = GrammarProgress(grammar), list[int]()
    for _ in range(length):
        assert progress.follow(output, ())
        bits = progress.mask()
        assert bits is not None
        assert (bits == _fresh(grammar, output)).all(), output
        candidates = [token_id for token_id in _allowed(bits) if token_id != EOS]
        if not candidates:
            return
        output.append(choice.choice(candidates))


def test_kept_masks_are_those_of_a_fresh_matcher(compiler: GrammarCompiler, computed: list[GrammarProgress]) -> None:
    choice = random.Random(5)
    outside = [r"\p{Greek}+,", "(?i)abc", "(?P<x>a|b)c", r"a$|b"]
    num_walks = num_with_states = 0
    for text in [_REGEX, "(日本|日曜|é,)+x?", *(random_regex(choice) for _ in range(120)), *outside]:
        try:
            grammar = compiler.compile(StructuredSpec("regex", text))
        except UserError:  # as for classes and counts that the library finds too large, or no text at all
            continue
        assert (grammar.masks is None) == (text in outside)
        num_with_states += grammar.masks is not None
        for _ in range(6):
            _walk(grammar, choice)
            num_walks += 1
    assert num_with_states > 90
    assert len(computed) < 6 * num_walks


def test_kept_masks_of_choices_are_those_of_a_fresh_matcher(compiler: GrammarCompiler) -> None:
    choice = random.Random(6)
    for _ in range(20):
        choices = tuple({"".join(choice.choices("abc,é日-", k=choice.randint(1, 7))) for _ in range(8)})
        grammar = compiler.compile(StructuredSpec("choice", choices=choices))
        assert grammar.masks is not None
        for _ in range(8):
            _walk(grammar, choice)


def test_outputs_in_one_state_share_one_computation(compiler: GrammarCompiler, computed: list[GrammarProgress]) -> None:
    grammar = compiler.compile(StructuredSpec("regex", _REGEX))
    found = []
    for text in ("abc,a,b", "c,b", "b"):
        progress = GrammarProgress(grammar)
        progress.follow(_ids(text), ())
        found.append(progress.mask())
    assert len(computed) <= 1
    assert found[0] is found[1] is found[2]
    assert found[0] is not None
    with pytest.raises(ValueError, match="read-only"):
        found[0][0] = 1
    first = GrammarProgress(grammar).mask()  # computed by the compiler
    assert first is not None
    assert first.shape == found[0].shape == (-(-_TOKENS.vocab_size // 32),)
    assert len(computed) <= 1


def test_rows_of_a_step_share_what_threads_compute(
    compiler: GrammarCompiler, computed: list[GrammarProgress], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature, "_THREADS", 3)
    monkeypatch.setattr(feature, "_MIN_SHARED_SECONDS", 0.0)
    spec = StructuredSpec("regex", "([ab ]{1,4}-)*")
    grammar, masks = compiler.compile(spec), feature.Grammar()
    params = SamplingParams(structured=spec, max_tokens=64)
    requests = [Request(str(number), [1], params, grammar=grammar) for number in range(9)]
    for number, request in enumerate(requests):
        request.token_ids += _ids("ab"[: 1 + number % 2])
    masks.prepare(requests, [()] * len(requests))
    first = {id(masks.progress(request).mask()) for request in requests}
    assert len(computed) == len(first) == 2
    assert grammar.num_lanes == 1


def test_rolled_back_drafts_leave_no_trace(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", _REGEX))
    choice, progress, output = random.Random(7), GrammarProgress(grammar), list[int]()
    for _ in range(60):
        drafted: list[int] = []
        while len(drafted) < choice.randint(0, 4):
            assert progress.follow(output, drafted)
            bits = progress.mask()
            assert bits is not None
            drafted.append(choice.choice([each for each in _allowed(bits) if each != EOS]))
        assert progress.follow(output, drafted)
        for number in range(len(drafted) + 1):  # as for rows of one request
            assert progress.follow(output, drafted[:number])
            bits = progress.mask()
            assert bits is not None
            assert (bits == _fresh(grammar, output + drafted[:number])).all()
        if drafted and progress.follow(output, ()):
            assert progress.advance(drafted[0])
            assert progress.lacks() is None
        output += drafted[: choice.randint(0, len(drafted))]
        bits = _fresh(grammar, output)
        output.append(choice.choice([each for each in _allowed(bits) if each != EOS]))


def test_a_rolled_back_end_leaves_no_mask_of_another_state(compiler: GrammarCompiler) -> None:
    """Drafts may run past the end of the output: the library takes back one token too many there."""
    grammar = compiler.compile(StructuredSpec("regex", "a{1,2}b?"))
    progress, start, draft = GrammarProgress(grammar), _ids("a"), [*_ids("b"), EOS]
    for drafted in ((), draft[:1], draft):
        assert progress.follow(start, drafted)
    output = [*start, *_ids("a")]
    if not progress.follow(output, ()):  # as the sampler does
        progress = GrammarProgress(grammar)
        assert progress.follow(output, ())
    bits = progress.mask()
    assert bits is not None
    assert (bits == _fresh(grammar, output)).all()


def test_after_the_end_and_after_a_wrong_token_it_is_as_without_states(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "ab?"))
    for written, wanted in (("a", [EOS, *_ids("b")]), ("ab", [EOS])):
        progress = GrammarProgress(grammar)
        progress.follow(_ids(written), ())
        bits = progress.mask()
        assert bits is not None
        assert sorted(_allowed(bits)) == sorted(wanted)
    ended = GrammarProgress(grammar)
    ended.follow([*_ids("a"), EOS], ())
    bits = ended.mask()
    assert bits is not None
    assert _allowed(bits) == [EOS]
    assert ended.valid(_ids("b")) == 0
    assert not GrammarProgress(grammar).advance(_ids("c")[0])
    for wrong in (_ids("c"), [1], [2], [_TOKENS.vocab_size + 5]):
        broken = GrammarProgress(grammar)
        broken.follow(wrong, ())
        assert broken.mask() is None


def test_a_mask_that_is_kept_takes_no_time(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", _REGEX))
    GrammarProgress(grammar).mask()
    grammar.mask_seconds, progress, output = 1.0, GrammarProgress(grammar), list[int]()
    progress._seconds_left = 0.0
    for letter in _ids("a," * 100):
        progress.follow(output, ())
        assert progress.mask() is not None
        output.append(letter)
    assert grammar.mask_seconds < 0.01
    assert progress.is_cheap
    progress._seconds_left = -1.0
    progress.follow(output, ())
    assert progress.mask() is None  # the request has ended


def test_masks_make_room_for_others(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(StructuredSpec("regex", "[a-c]{30}"))
    kept: Any = compiler._masks
    most, kept._max_bytes = kept._max_bytes, 2000
    for length in [*range(30), *range(30)]:
        progress = GrammarProgress(grammar)
        progress.follow(_ids("a" * length), ())
        bits = progress.mask()
        assert bits is not None
        assert (bits == _fresh(grammar, _ids("a" * length))).all()
        if length:
            assert kept.num_bytes <= 2000
            assert len(kept._masks) <= 2000 // bits.nbytes
    kept._max_bytes = most


def test_what_was_not_used_for_the_longest_time_goes_first(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredSpec("regex", "a"))
    vocabulary: Any = compiler._vocabulary
    kept = KeptMasks(vocabulary, max_bytes=2 * (40 + 400))
    first, other = np.ones(10, dtype=np.int32), np.ones(10, dtype=np.int32)
    assert kept.keep((0,), first) is first
    assert kept.keep((0,), other) is first  # a slower thread takes what is there
    kept.keep((1,), other)
    assert kept.find((0,)) is first
    kept.keep((2,), np.ones(10, dtype=np.int32))
    assert kept.find((1,)) is None
    assert kept.find((0,)) is first


def test_beyond_the_limit_of_states_masks_are_computed(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regular, "_MAX_WORK", 2000)
    grammar = compiler.compile(StructuredSpec("regex", "(a|b)*a(a|b){20}"))
    assert grammar.masks is not None
    choice = random.Random(8)
    for _ in range(4):
        _walk(grammar, choice, length=25)
    progress = GrammarProgress(grammar)
    progress.follow(_ids("ab" * 12), ())
    assert progress.lacks() is progress  # it is no longer followed by states
    assert progress.mask() is not None
