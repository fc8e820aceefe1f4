"""Verification is exact: guessed drafts leave every token as it is, drawn ones leave the distribution as it is.

The model is a small Markov chain, so that the true distribution of two tokens in a row can be written down.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.sampling.random import uniform
from tokenmill.runtime.sampling.sampler import Sampler, pick, residual
from tokenmill.runtime.verify import Verdict, verify
from tokenmill.types import Request, SamplingParams

_VOCAB = 6
_SAMPLES = 20_000
_generator = torch.Generator().manual_seed(5)
_TARGET = torch.randn(_VOCAB, _VOCAB, generator=_generator) * 1.5  # logits of the next token, by the last one
_PROPOSAL = _TARGET + torch.randn(_VOCAB, _VOCAB, generator=_generator)
# 35 degrees of freedom: a statistic above this comes up once in ten thousand samples of a right sampler.
_LIMIT = 77.0

_SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.95, "min_p": 0.02},
    {"temperature": 1.3, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    {"temperature": 1.0, "logit_bias": {2: 1.5, 4: -3.0}, "typical_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.0},
]


_EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 5,
    "top_p": 0.97,
    "min_p": 0.01,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {2: 1.0, 4: -1.0},
}


class _RememberingSampler(Sampler):
    """The plain sampler, asked once for each history: twenty thousand samples of a small chain have few."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[tuple[int, ...], Tensor | None] = {}

    def distribution(self, logits: Tensor, request: Request, drafted: Sequence[int] = ()) -> Tensor | None:
        history = (*request.token_ids, *drafted)
        if history not in self._known:
            self._known[history] = super().distribution(logits, request, drafted)
        return self._known[history]

    def _choose(self, logits: Tensor, request: Request, drafted: Sequence[int]) -> int:
        distribution = self.distribution(logits, request, drafted)
        assert distribution is not None
        return pick(distribution, uniform(request.seed, request.index, request.num_tokens + len(drafted)))

    def _sample(self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]) -> Any:
        rows = zip(logits, requests, drafted, strict=True)
        return [self._choose(*row) for row in rows], [None] * len(requests)


def _request(seed: int, **params: Any) -> Request:
    return Request("r", [3, 1], SamplingParams(max_tokens=64, **params), seed=seed)


def _verify(sampler: Sampler, requests: list[Request], drafts: list[Draft]) -> list[Verdict]:
    last = [
        token
        for request, draft in zip(requests, drafts, strict=True)
        for token in [request.token_ids[-1], *draft.token_ids]
    ]
    return verify(sampler, _TARGET[last], requests, drafts)


def _generate(
    requests: list[Request], length: int, propose: Callable[[Request], Draft], sampler: Sampler | None = None
) -> None:
    """Grow every request by at least `length` tokens, as the engine would."""
    sampler = sampler or Sampler()
    while short := [request for request in requests if request.num_output_tokens < length]:
        drafts = [propose(request) for request in short]
        for request, verdict in zip(short, _verify(sampler, short, drafts), strict=True):
            assert verdict.token_id is not None
            request.token_ids += [*verdict.accepted, verdict.token_id]


def _nothing(_request: Request) -> Draft:
    return Draft()


def _drawn(request: Request) -> Draft:
    """One or two tokens from the proposal chain, by random numbers of their own."""
    tokens = [request.token_ids[-1]]
    for depth in range(1 + request.seed % 2):
        point = uniform(request.seed, 7, request.num_tokens + depth, stream=9)
        tokens.append(pick(_PROPOSAL_ROWS[tokens[-1]], point))
    return Draft(tokens[1:], distributions=_PROPOSAL_ROWS[tokens[:-1]])


_PROPOSAL_ROWS = _PROPOSAL.softmax(-1, dtype=torch.float64)


def _true_pairs(params: SamplingParams) -> Tensor:
    """[first, second] probabilities, each from the distribution of the plain sampler given the history."""
    sampler, pairs = Sampler(), torch.zeros(_VOCAB, _VOCAB, dtype=torch.float64)
    request = Request("r", [3, 1], params)
    first = sampler.distribution(_TARGET[1].clone(), request)
    assert first is not None
    for token in range(_VOCAB):
        request.token_ids = [3, 1, token]
        second = sampler.distribution(_TARGET[token].clone(), request)
        assert second is not None
        pairs[token] = first[token] / first.sum() * second / second.sum()
    return pairs


def _statistic(requests: list[Request], expected: Tensor) -> float:
    seen = Counter((request.output_ids[0], request.output_ids[1]) for request in requests)
    total = 0.0
    for first in range(_VOCAB):
        for second in range(_VOCAB):
            mean = float(expected[first, second]) * len(requests)
            count = seen[first, second]
            if mean == 0.0:
                assert count == 0, "an impossible token was produced"
            else:
                total += (count - mean) ** 2 / mean
    return total


@pytest.mark.parametrize(
    ("settings", "count"), [({"temperature": 1.0}, _SAMPLES), (_EVERYTHING, _SAMPLES // 4)], ids=["plain", "everything"]
)
def test_drawn_drafts_leave_the_distribution_as_it_is(settings: dict[str, Any], count: int) -> None:
    requests = [_request(seed, **settings) for seed in range(count)]
    _generate(requests, 2, _drawn, _RememberingSampler())
    assert _statistic(requests, _true_pairs(requests[0].params)) < _LIMIT


def test_the_statistic_sees_a_wrong_sampler() -> None:
    """Drafts taken as they are, and refused ones redrawn from the target instead of the residual."""
    expected = _true_pairs(SamplingParams())
    unchecked = [_request(seed) for seed in range(_SAMPLES // 4)]
    for request in unchecked:
        while request.num_output_tokens < 2:
            request.token_ids += _drawn(request).token_ids
    assert _statistic(unchecked, expected) > 5 * _LIMIT
    careless = [_request(seed) for seed in range(_SAMPLES // 4)]
    rows = _TARGET.softmax(-1, dtype=torch.float64)
    for request in careless:
        for _ in range(2):
            last, place = request.token_ids[-1], (request.seed, 0, request.num_tokens)
            token = pick(_PROPOSAL_ROWS[last], uniform(*place, stream=9))
            if uniform(*place, stream=1) * float(_PROPOSAL_ROWS[last, token]) >= float(rows[last, token]):
                token = pick(rows[last], uniform(*place, stream=2))
            request.token_ids.append(token)
    assert _statistic(careless, expected) > 2 * _LIMIT


@pytest.mark.parametrize("settings", _SETTINGS, ids=str)
@pytest.mark.parametrize("quality", [0.0, 0.6, 1.0])
def test_guessed_drafts_leave_every_token_as_it_is(settings: dict[str, Any], quality: float) -> None:
    expected = [_request(seed, **settings) for seed in range(60)]
    _generate(expected, 20, _nothing)
    truth = {request.seed: request.token_ids for request in expected}
    noise = random.Random(1)

    def guess(request: Request) -> Draft:
        length = noise.randrange(6)
        right = truth[request.seed][request.num_tokens :][:length]
        return Draft([token if noise.random() < quality else noise.randrange(_VOCAB) for token in right])

    requests = [_request(seed, **settings) for seed in range(60)]
    _generate(requests, 20, guess)
    for request, other in zip(requests, expected, strict=True):
        assert request.token_ids[:22] == other.token_ids[:22]


def test_all_accepted_brings_one_token_more() -> None:
    request = _request(0, temperature=0.0)
    truth = [_request(0, temperature=0.0)]
    _generate(truth, 4, _nothing)
    (verdict,) = _verify(Sampler(), [request], [Draft(truth[0].output_ids[:3])])
    assert [*verdict.accepted, verdict.token_id] == truth[0].output_ids
    assert request.num_output_tokens == 0, "what was lent is taken back"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_token_ends_the_row_and_is_not_among_the_accepted(temperature: float) -> None:
    truth = [_request(3, temperature=temperature)]
    _generate(truth, 5, _nothing)
    output = truth[0].output_ids
    request = _request(3, temperature=temperature)
    request.stop_ids = frozenset({output[1]} - {output[0]}) or frozenset({output[0]})
    (verdict,) = _verify(Sampler(), [request], [Draft(output[:4])])
    end = next(place for place, token in enumerate(output) if token in request.stop_ids)
    assert verdict.accepted == output[:end]
    assert verdict.token_id == output[end]


def test_log_probabilities_come_for_every_token() -> None:
    truth = [_request(2, temperature=1.0)]
    _generate(truth, 3, _nothing)
    request = _request(2, temperature=1.0, logprobs=2)
    (verdict,) = _verify(Sampler(), [request], [Draft(truth[0].output_ids[:2])])
    tokens = [*verdict.accepted, verdict.token_id]
    assert tokens == truth[0].output_ids[:3]
    raw, last = _TARGET.log_softmax(-1), 1
    for record, token in zip(verdict.logprobs, tokens, strict=True):
        assert record is not None
        assert token is not None
        assert record.token_id == token
        assert record.logprob == pytest.approx(float(raw[last, token]), abs=1e-5)
        last = token


def test_the_residual_is_what_the_target_has_over_the_proposal() -> None:
    target = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.8, 0.0]], dtype=torch.float64)
    proposal = torch.tensor([[0.7, 0.1, 0.2], [0.2, 0.8, 0.0]], dtype=torch.float64)
    assert residual(target, proposal).tolist() == [[0.0, pytest.approx(0.2), 0.0], [0.2, 0.8, 0.0]]
