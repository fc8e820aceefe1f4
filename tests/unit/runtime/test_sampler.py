"""The sampler against plain restatements of what each setting means."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tokenmill.runtime.sampling.features import LOGIT_FEATURES
from tokenmill.runtime.sampling.random import uniform
from tokenmill.runtime.sampling.sampler import Sampler
from tokenmill.types import ReasoningBudget, Request, SamplingParams, StructuredSpec

_VOCAB = 400


def _request(seed: int = 0, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), **params: Any) -> Request:
    stop_ids = frozenset(params.pop("stop_ids", ()))
    request = Request("r", list(prompt), SamplingParams(**params), stop_ids=stop_ids, seed=seed)
    request.token_ids += output
    return request


def _logits(scale: float = 2.0) -> torch.Tensor:
    return torch.randn(_VOCAB, generator=torch.Generator().manual_seed(3)) * scale


def _draws(count: int, logits: torch.Tensor, **params: Any) -> list[int]:
    requests = [_request(seed=seed, **params) for seed in range(count)]
    return Sampler().sample(logits.repeat(count, 1), requests)[0]


def _close(draws: list[int], expected: torch.Tensor) -> bool:
    """Total variation distance between the observed and the expected distribution is as small as chance allows."""
    observed = torch.bincount(torch.tensor(draws), minlength=_VOCAB).double() / len(draws)
    noise = (expected * (1 - expected) / len(draws)).sqrt().sum() / 2
    return float((observed - expected).abs().sum() / 2) < 1.5 * float(noise) + 1e-3


def test_greedy_takes_the_argmax() -> None:
    logits = _logits()
    assert _draws(3, logits, temperature=0.0) == [int(logits.argmax())] * 3


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_gives_the_softmax_distribution(temperature: float) -> None:
    logits = _logits()
    draws = _draws(4000, logits, temperature=temperature)
    assert _close(draws, (logits.double() / temperature).softmax(-1))


@pytest.mark.parametrize("k", [1, 5, 300, 1000])
def test_top_k(k: int) -> None:
    logits = _logits()
    probabilities = logits.double().softmax(-1)
    kept = probabilities.topk(min(k, _VOCAB)).indices
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    assert _close(_draws(2000, logits, top_k=k), expected)


@pytest.mark.parametrize(("p", "scale"), [(0.1, 2.0), (0.9, 2.0), (0.99, 0.1)])
def test_top_p_with_few_and_with_many_candidates(p: float, scale: float) -> None:
    logits = _logits(scale)
    values, ids = logits.double().softmax(-1).sort(descending=True)
    size = int((values.cumsum(-1) < p).sum()) + 1
    expected = torch.zeros(_VOCAB, dtype=torch.float64)
    expected[ids[:size]] = values[:size] / values[:size].sum()
    assert (size > 256) == (scale == 0.1)  # the second path: the nucleus is wider than the first cut
    assert _close(_draws(2000, logits, top_p=p), expected)


@pytest.mark.parametrize(("min_p", "scale"), [(0.2, 2.0), (0.6, 0.1)])
def test_min_p(min_p: float, scale: float) -> None:
    logits = _logits(scale)
    probabilities = logits.double().softmax(-1)
    expected = torch.where(probabilities >= min_p * probabilities.max(), probabilities, 0.0)
    assert _close(_draws(2000, logits, min_p=min_p), expected / expected.sum())


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.full((_VOCAB,), -1e9)
    logits[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # After top-k 2 the masses are 4/7 and 3/7, so a nucleus of 0.5 is the first token alone.
    assert set(_draws(200, logits, top_k=2, top_p=0.5)) == {0}


def test_typical_keeps_the_tokens_of_usual_surprise() -> None:
    logits = _logits()
    logprobs = logits.double().log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum()
    order = (-logprobs - entropy).abs().argsort()
    size = int((logprobs.exp()[order].cumsum(-1) < 0.5).sum()) + 1
    assert set(_draws(500, logits, typical_p=0.5)) <= set(order[:size].tolist())


def test_penalties() -> None:
    logits = torch.zeros(_VOCAB)
    logits[[5, 6, 7]] = torch.tensor([4.0, 3.5, 3.0])
    sample = Sampler().sample
    assert sample(logits.repeat(1, 1), [_request(temperature=0.0, output=(5,))])[0] == [5]
    assert sample(logits.repeat(1, 1), [_request(temperature=0.0, output=(5,), presence_penalty=0.6)])[0] == [6]
    assert sample(logits.repeat(1, 1), [_request(temperature=0.0, output=(5, 5), frequency_penalty=0.6)])[0] == [6]
    # Frequency and presence look at the output only, repetition at the prompt as well.
    assert sample(logits.repeat(1, 1), [_request(temperature=0.0, prompt=(5,), presence_penalty=2.0)])[0] == [5]
    assert sample(logits.repeat(1, 1), [_request(temperature=0.0, prompt=(5,), repetition_penalty=1.5)])[0] == [6]
    negative = torch.full((_VOCAB,), -3.0)
    negative[5] = -1.0
    assert sample(negative.repeat(1, 1), [_request(temperature=0.0, prompt=(5,), repetition_penalty=4.0)])[0] != [5]


def test_logit_bias_and_min_tokens() -> None:
    logits = _logits()
    assert _draws(1, logits, temperature=0.0, logit_bias={17: 100.0}) == [17]
    best = int(logits.argmax())
    assert _draws(1, logits, temperature=0.0, logit_bias={best: -100.0}) != [best]
    blocked = _request(temperature=0.0, min_tokens=2, output=(9,), stop_ids=(best,))
    allowed = _request(temperature=0.0, min_tokens=2, output=(9, 9), stop_ids=(best,))
    assert Sampler().sample(logits.repeat(2, 1), [blocked, allowed])[0][0] != best
    assert Sampler().sample(logits.repeat(1, 1), [allowed])[0] == [best]


def test_no_token_but_the_allowed_ones() -> None:
    logits = _logits()
    assert set(_draws(60, torch.zeros(_VOCAB), allowed_token_ids=(3, 7, 11))) == {3, 7, 11}
    assert _draws(1, logits, temperature=0.0, allowed_token_ids=(9,), logit_bias={9: -100.0}) == [9]
    nothing = _request(temperature=0.0, allowed_token_ids=(9,), min_tokens=1, stop_ids=(9,))
    drawn = _request(allowed_token_ids=(9,), min_tokens=1, stop_ids=(9,))
    assert Sampler().sample(logits.repeat(2, 1), [nothing, drawn])[0] == [None, None]


@pytest.mark.parametrize(
    ("output", "drafted", "banned"),
    [
        ((), (), {6}),
        ((5,), (), {6, 4}),
        ((4,), (5,), {6, 4}),
        ((5, 4), (), {6}),
        ((1, 2), (), {6, 3}),
        ((9, 1), (2,), {6, 3}),
        ((2,), (), {6}),  # the prompt ends with 1, but does not count
    ],
)
def test_no_bad_word_is_completed(output: tuple[int, ...], drafted: tuple[int, ...], banned: set[int]) -> None:
    words = ((5, 4), (1, 2, 3), (6,))
    request = _request(prompt=(0, 1), output=output, temperature=0.0, bad_word_ids=words)
    logits = torch.zeros(1, _VOCAB)
    LOGIT_FEATURES.get("bad_words")().edit(logits[0], request, drafted)
    assert set(torch.isinf(logits[0]).nonzero().flatten().tolist()) == banned


@pytest.mark.parametrize(
    ("output", "start_id", "ended"),
    [
        ((7, 1), None, False),  # not spent
        ((7, 1, 2), None, True),
        ((7, 1, 2), 7, True),
        ((1, 2, 3), 7, False),  # the output does not reason
        ((7, 8, 2), None, False),  # it has ended by itself
        ((7, 1, 2, 8), None, False),  # it was ended
    ],
)
def test_a_spent_reasoning_budget_ends_the_reasoning(
    output: tuple[int, ...], start_id: int | None, ended: bool
) -> None:
    logits = _logits()
    request = _request(temperature=0.0, output=output, reasoning=ReasoningBudget(3, 8, start_id))
    assert (Sampler().sample(logits.repeat(1, 1), [request])[0] == [8]) is ended


def test_a_seed_reproduces_whatever_runs_beside_it() -> None:
    logits = _logits(0.5)
    alone = Sampler().sample(logits.repeat(1, 1), [_request(seed=42, top_p=0.95)])[0]
    neighbours = [_request(seed=seed, temperature=1.5) for seed in range(7)]
    others = torch.randn(7, _VOCAB)
    together = Sampler().sample(torch.cat([others, logits.unsqueeze(0)]), [*neighbours, _request(seed=42, top_p=0.95)])
    assert together[0][-1] == alone[0]


def test_uniform_numbers_are_uniform_and_distinct() -> None:
    numbers = [uniform(seed, index, position) for seed in range(20) for index in range(5) for position in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert all(0.0 <= number < 1.0 for number in numbers)
    tenths = torch.bincount((torch.tensor(numbers) * 10).long(), minlength=10).double()
    chi_square = float(((tenths - 1000) ** 2 / 1000).sum())
    assert chi_square < 27.9  # 99.9 % quantile of 9 degrees of freedom
    mean = sum(numbers) / len(numbers)
    assert math.isclose(mean, 0.5, abs_tol=0.01)


def test_logprobs_are_the_models_own() -> None:
    logits = _logits()
    expected = logits.log_softmax(-1)
    ids, records = Sampler().sample(
        logits.repeat(2, 1), [_request(temperature=0.0, logprobs=3, logit_bias={9: 100.0}), _request(temperature=0.0)]
    )
    record = records[0]
    assert record is not None
    assert records[1] is None
    assert ids[0] == record.token_id == 9
    assert record.logprob == pytest.approx(float(expected[9]), abs=1e-6)
    assert record.rank == int((expected > expected[9]).sum()) + 1
    assert [token_id for token_id, _ in record.top] == expected.topk(3).indices.tolist()


_ACTIVE: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.2},
    "logit_bias": {"logit_bias": {3: 1.0}},
    "min_tokens": {"min_tokens": 2},
    "allowed_tokens": {"allowed_token_ids": (3,)},
    "bad_words": {"bad_word_ids": ((3, 4),)},
    "typical": {"typical_p": 0.5},
    "grammar": {"structured": StructuredSpec("json_object")},
    "reasoning_budget": {"reasoning": ReasoningBudget(4, 8)},
}


@pytest.mark.parametrize("name", list(LOGIT_FEATURES))
def test_params_say_that_a_feature_edits_logits(name: str) -> None:
    """`SamplingParams.edits_logits` decides who takes the short way: it must know every registered feature."""
    params = SamplingParams(**_ACTIVE[name])
    assert LOGIT_FEATURES.get(name)().active(params)
    assert params.edits_logits
    assert not LOGIT_FEATURES.get(name)().active(SamplingParams())
    assert not SamplingParams().edits_logits
