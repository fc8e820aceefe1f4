"""The drafters that look things up, against plain restatements of what they look up."""

from __future__ import annotations

import random

import pytest

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.resolution import resolve
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.automaton import Match, SuffixAutomaton
from tokenmill.runtime.speculation.base import Drafter
from tokenmill.runtime.speculation.ngram import NgramDrafter, continuation
from tokenmill.runtime.speculation.suffix import SuffixDrafter
from tokenmill.types import Request, SamplingParams, ScheduledTokens


def _request(token_ids: list[int]) -> Request:
    return Request("r", token_ids, SamplingParams())


def _draft(drafter: Drafter, request: Request, limit: int = 4) -> Draft:
    row = ScheduledTokens(request, request.num_tokens - 1, 1, ([],), True, limit)
    (draft,) = drafter.draft([row], [limit])
    assert len(draft.token_ids) == len(draft.confidences) <= limit
    return draft


def _longest_repeat(tokens: list[int]) -> int:
    """The length of the longest ending that occurs earlier."""
    best = 0
    for length in range(1, len(tokens)):
        ending = tokens[-length:]
        if any(tokens[begin : begin + length] == ending for begin in range(len(tokens) - length)):
            best = length
    return best


def _longest_known(text: list[int], stream: list[int]) -> int:
    found = [0]
    for length in range(1, len(stream) + 1):
        if any(text[begin : begin + length] == stream[-length:] for begin in range(len(text) - length + 1)):
            found.append(length)
    return max(found)


def test_the_automaton_knows_every_repeat() -> None:
    draw = random.Random(3)
    for _ in range(20):
        automaton, tokens = SuffixAutomaton(), []
        for _ in range(60):
            tokens.append(draw.randrange(3))
            automaton.extend(tokens[-1:])
            end, length = automaton.repeated()
            assert length == _longest_repeat(tokens)
            if length:
                assert end < len(tokens)
                assert tokens[end - length : end] == tokens[-length:]


def test_the_automaton_follows_other_streams() -> None:
    draw = random.Random(4)
    text = [draw.randrange(4) for _ in range(80)]
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match, stream = Match(), []
    for _ in range(200):
        stream.append(draw.randrange(4))
        match = automaton.step(match, stream[-1])
        assert match.length == _longest_known(text, stream[-12:])
        assert text[match.end - match.length : match.end] == stream[len(stream) - match.length :]


def test_a_continuation_goes_round_a_loop() -> None:
    assert continuation([9, 1, 2, 3], 1, 8) == [1, 2, 3, 1, 2, 3, 1, 2]
    assert continuation([5, 6, 7, 8], 1, 2) == [6, 7]


@pytest.mark.parametrize("drafter_class", [NgramDrafter, SuffixDrafter])
def test_what_followed_before_is_drafted(drafter_class: type[Drafter]) -> None:
    drafter = drafter_class()
    request = _request([1, 2, 3, 4, 5, 6, 7, 50, 51, 2, 3, 4])
    assert _draft(drafter, request).token_ids == [5, 6, 7, 50]
    request.token_ids += [5, 99]
    assert _draft(drafter, request).token_ids == []
    request.token_ids += [60, 61, 50, 51]
    assert _draft(drafter, request, 2).token_ids == [2, 3]


@pytest.mark.parametrize("drafter_class", [NgramDrafter, SuffixDrafter])
def test_a_longer_match_is_surer(drafter_class: type[Drafter]) -> None:
    short = _draft(drafter_class(), _request([1, 2, 9, 8, 7, 1, 2]))
    long = _draft(drafter_class(), _request([1, 2, 3, 4, 9, 8, 7, 1, 2, 3, 4]))
    assert long.confidences[0] > short.confidences[0] > 0
    assert short.confidences == sorted(short.confidences)


@pytest.mark.parametrize("drafter_class", [NgramDrafter, SuffixDrafter])
def test_the_latest_occurrence_counts(drafter_class: type[Drafter]) -> None:
    drafter = drafter_class()
    request = _request([1, 2, 10, 11, 12])
    for tokens in ([1, 2], [20, 21, 22], [1, 2]):
        request.token_ids += tokens
        draft = _draft(drafter, request, 3)
    assert draft.token_ids == [20, 21, 22]


def test_the_longest_match_wins_not_the_latest() -> None:
    request = _request([1, 2, 3, 4, 70, 9, 9, 3, 4, 80, 9, 8, 1, 2, 3, 4])
    assert _draft(SuffixDrafter(), request, 1).token_ids == [70]


def test_recent_requests_are_followed_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill.runtime.speculation.suffix._RECENT_TOKENS", 40)
    drafter = SuffixDrafter()

    def run(tokens: list[int]) -> Draft:
        return _draft(drafter, _request(tokens))  # the request is gone then: its text joins the recent ones

    assert run([1, 2, 3, 4, 5, 6]).token_ids == []
    assert run([30, 2, 3]).token_ids == [4, 5, 6]  # and no further than that text goes
    for number in range(100, 130):
        run([number, number + 100, number + 200, number + 300])
    assert run([31, 2, 3]).token_ids == []  # forgotten
    assert sum(len(each) for each in drafter._generations) <= 2 * 40


@pytest.mark.parametrize("name", ["ngrm", "ngram:4", "suffix:x"])
def test_unknown_drafters_and_arguments_are_refused(name: str) -> None:
    from tokenmill.runtime.speculation.base import Target
    from tokenmill.runtime.speculation.speculator import build_speculator

    target = Target(None, None, None, resolve(EngineConfig(speculate=name)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"ngram|suffix"):
        build_speculator(target)
