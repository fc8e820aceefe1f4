"""Beam search against all sequences there are, on a language of a few tokens."""

from __future__ import annotations

import hashlib
import math
from itertools import product

import pytest

from tokenmill.engine.beam_search import BeamSearchParams, BeamSequence, beam_search
from tokenmill.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from tokenmill.errors import UserError
from tokenmill.types import SamplingParams

_VOCAB, _EOS = 5, 4


def _logprobs(prefix: tuple[int, ...]) -> list[float]:
    """Of the token after `prefix`: any numbers, always the same."""
    digest = hashlib.sha256(bytes(prefix)).digest()
    weights = [1 + digest[token_id] for token_id in range(_VOCAB)]
    return [math.log(weight / sum(weights)) for weight in weights]


def _generate(prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    assert (params.max_tokens, params.temperature) == (1, 0.0)
    outputs = []
    for number, prompt in enumerate(prompts):
        scores = _logprobs(tuple(prompt))
        best = sorted(range(_VOCAB), key=lambda token_id: -scores[token_id])[: params.logprobs]
        completion = CompletionOutput(0, token_ids=best[:1], logprobs=[{each: Logprob(scores[each]) for each in best}])
        outputs.append(RequestOutput(str(number), None, prompt, [completion], RequestMetrics(0.0)))
    return outputs


def _search(prompts: list[list[int]], **fields: object) -> list[list[BeamSequence]]:
    return beam_search(prompts, BeamSearchParams(**fields), _generate, {_EOS}, _VOCAB)  # type: ignore[arg-type]


def _score(prompt: list[int], ids: tuple[int, ...]) -> float:
    return sum(_logprobs((*prompt, *ids[:place]))[token_id] for place, token_id in enumerate(ids))


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_beam_as_wide_as_the_language_finds_the_best(length_penalty: float, ignore_eos: bool) -> None:
    prompt, length, width = [1, 2], 3, 30
    found = _search([prompt], beam_width=width, max_tokens=length, length_penalty=length_penalty, ignore_eos=ignore_eos)
    every = {
        ids[: ids.index(_EOS) + 1] if _EOS in ids and not ignore_eos else ids
        for ids in product(range(_VOCAB), repeat=length)
    }
    ranked = sorted(every, key=lambda ids: _score(prompt, ids) / len(ids) ** length_penalty, reverse=True)
    assert [tuple(beam.token_ids) for beam in found[0]] == ranked[:width]  # it holds every prefix of two tokens
    for beam in found[0]:
        assert beam.cumulative_logprob == pytest.approx(_score(prompt, tuple(beam.token_ids)))
        ended = beam.token_ids[-1] == _EOS and not ignore_eos
        assert beam.finish_reason == ("stop" if ended else "length")
    assert len(found[0]) == width


def test_one_beam_is_greedy_and_prompts_do_not_mix() -> None:
    prompts = [[3], [1, 1], [2]]
    together = _search(prompts, beam_width=1, max_tokens=4, ignore_eos=True)
    for prompt, beams in zip(prompts, together, strict=True):
        ids = list(prompt)
        for _ in range(4):
            scores = _logprobs(tuple(ids))
            ids.append(scores.index(max(scores)))
        assert [beam.token_ids for beam in beams] == [ids[len(prompt) :]]
    wide = _search(prompts, beam_width=3, max_tokens=4)
    assert wide == [_search([prompt], beam_width=3, max_tokens=4)[0] for prompt in prompts]


@pytest.mark.parametrize("fields", [{"beam_width": 0}, {"beam_width": 33}, {"beam_width": 2, "max_tokens": 0}])
def test_bad_values_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(UserError):
        BeamSearchParams(**{"max_tokens": 4, **fields})
