"""Logits -> token ids, where the logits are. Every row is sampled for its own request, independent of its neighbours.

Greedy rows are one argmax. Random rows take one uniform number each (random.py) and walk the cumulative distribution;
the vocabulary is sorted only when a filter cannot decide from the most likely few hundred tokens. Features plug in
through features/. Tokens that are drafted but not accepted yet are passed separately from the request, which is never
changed. Owned by an executor; called by the runner once per chunk of logit rows, by verification and by draft models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.grammar.progress import GrammarProgress
from tokenmill.kernels.base import select
from tokenmill.runtime.sampling.features import FILTERS, LOGIT_FEATURES
from tokenmill.runtime.sampling.features.base import Candidates, Filter, LogitFeature
from tokenmill.runtime.sampling.features.grammar import Grammar
from tokenmill.runtime.sampling.random import ACCEPTING, REDRAWING, uniform
from tokenmill.types import Request, SamplingParams, TokenLogprobs

_FIRST_CUT = 256  # candidates tried before the entire vocabulary is sorted


class Sampler:
    def __init__(self, device: torch.device | None = None, kernels: str = "") -> None:
        self._argmax = select("argmax", device or torch.device("cpu"), kernels).run
        self._logit_features: list[LogitFeature] = [LOGIT_FEATURES.get(name)() for name in LOGIT_FEATURES]
        self._filters: list[Filter] = [FILTERS.get(name)() for name in FILTERS]

    def sample(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        """`logits` [R, vocab] is consumed (edited in place). One token per row, with log-probabilities if requested.

        `drafted[i]`: tokens assumed to follow those of request i. The token is None for a row in which no token is
        possible.
        """
        if self.is_plain(requests):
            return self._argmax(logits).tolist(), [None] * len(requests)
        with torch.inference_mode():
            return self._sample(logits, requests, drafted or [()] * len(requests))

    def is_plain(self, requests: Sequence[Request]) -> bool:
        """Whether every row is a plain argmax."""
        for request in requests:
            params = request.params
            if not params.greedy or params.logprobs is not None or params.edits_logits:
                return False
        return True

    def allowed(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens could follow one after the other: the first that a feature bans ends them."""
        count = len(token_ids)
        for feature in self._logit_features:
            if count and feature.active(request.params):
                count = feature.allowed(request, token_ids[:count])
        return count

    def grammar_progress(self, request: Request) -> GrammarProgress | None:
        """How far its output is in its grammar; None if it has none."""
        features = [each for each in self._logit_features if isinstance(each, Grammar)]
        return features[0].progress(request) if features and request.grammar is not None else None

    def distribution(self, logits: Tensor, request: Request, drafted: Sequence[int] = ()) -> Tensor | None:
        """[vocab] float64: what a random row is drawn from. Edits the row; None where no token is possible."""
        for feature in self._logit_features:
            if feature.active(request.params):
                feature.edit(logits, request, drafted)
        if request.params.bans_tokens and float(logits.max()) == float("-inf"):
            return None
        values, ids = self._candidates(logits, request.params)
        if ids is None:
            return values
        return torch.zeros_like(logits, dtype=torch.float64).scatter_(0, ids, values / values.sum())

    @torch.inference_mode()
    def accept_or_redraw(
        self, logits: Tensor, request: Request, drafted: Sequence[int], token_id: int, proposal: Tensor
    ) -> tuple[int | None, TokenLogprobs | None]:
        """Rejection sampling of `token_id`, which was drawn from `proposal` [vocab]: accepted with probability
        min(1, p/q), else replaced by a draw from what p has over q."""
        raw = logits.log_softmax(-1) if request.params.logprobs is not None else None
        target = self.distribution(logits, request, drafted)
        if target is None:
            return None, None
        position = (request.seed, request.index, request.num_tokens + len(drafted))
        chosen = token_id
        if uniform(*position, stream=ACCEPTING) * float(proposal[token_id]) >= float(target[token_id]):
            chosen = pick(residual(target, proposal.to(target.device)), uniform(*position, stream=REDRAWING))
        record = None if raw is None else token_logprobs(raw, chosen, request.params.logprobs or 0)
        return chosen, record

    @torch.inference_mode()
    def prompt_logprobs(self, logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
        """By row of logits: the record of the token that followed."""
        rows = zip(logits.log_softmax(-1), token_ids, tops, strict=True)
        return [token_logprobs(values, token_id, top) for values, token_id, top in rows]

    def _sample(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        # Reported log-probabilities are those of the model, before any penalty or filter.
        raw = logits[wanted].log_softmax(-1) if wanted else None
        for row, request in enumerate(requests):
            for feature in self._logit_features:
                if feature.active(request.params):
                    feature.edit(logits[row], request, drafted[row])
        token_ids: list[int | None] = self._argmax(logits).tolist()
        for row, request in enumerate(requests):
            if request.params.bans_tokens and float(logits[row, token_ids[row]]) == float("-inf"):
                token_ids[row] = None
            elif not request.params.greedy:
                token_ids[row] = self._draw(logits[row], request, len(drafted[row]))
        logprobs: list[TokenLogprobs | None] = [None] * len(requests)
        if raw is not None:
            for number, row in enumerate(wanted):
                token_id, top = token_ids[row], requests[row].params.logprobs or 0
                logprobs[row] = None if token_id is None else token_logprobs(raw[number], token_id, top)
        return token_ids, logprobs

    def _draw(self, logits: Tensor, request: Request, num_drafted: int) -> int:
        point = uniform(request.seed, request.index, request.num_tokens + num_drafted)
        values, ids = self._candidates(logits, request.params)
        index = pick(values, point)
        return index if ids is None else int(ids[index])

    def _candidates(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
        """(probabilities, up to a factor; the tokens they are of, or None: all of the vocabulary in order)."""
        probabilities = (logits / params.temperature).softmax(-1, dtype=torch.float64)
        filters = [candidate for candidate in self._filters if candidate.active(params)]
        if not filters:
            return probabilities, None
        cut = min(_FIRST_CUT, probabilities.numel())
        values, ids = probabilities.topk(cut)
        kept = _narrow(filters, values, cut == probabilities.numel(), params)
        if kept is None:
            values, ids = probabilities.sort(descending=True)
            kept = _narrow(filters, values, True, params)
        assert kept is not None
        return values[:kept], ids[:kept]


def _narrow(filters: list[Filter], values: Tensor, complete: bool, params: SamplingParams) -> int | None:
    """How many of the sorted candidates survive all filters; None if the cut list cannot tell."""
    for filter_ in filters:
        kept = filter_.keep(Candidates(values, complete), params)
        if kept is None:
            return None
        values = values[:kept]
        values = values / values.sum()
        complete = True  # the rest is excluded now, so the list is the entire distribution
    return values.numel()


def pick(probabilities: Tensor, point: float) -> int:
    """The index where the cumulative mass passes `point` of the total; never one of zero probability."""
    mass = probabilities.cumsum(-1)
    index = int(torch.searchsorted(mass, point * float(mass[-1]), right=True))
    if index >= probabilities.numel():  # rounding at the very end
        index = int(probabilities.nonzero()[-1])
    return index


def residual(target: Tensor, proposal: Tensor) -> Tensor:
    """The distribution to draw from when a token drawn from `proposal` is rejected; [..., vocab], not normalized."""
    rest = (target - proposal).clamp_min(0.0)
    # Equal up to rounding: rejections are rounding errors then, and the target itself is right.
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, target)


def token_logprobs(logprobs: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """The record for one position from its log-probabilities [vocab]."""
    own = logprobs[token_id]
    best: tuple[tuple[int, float], ...] = ()
    if top:
        values, ids = logprobs.topk(top)
        best = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(own), int((logprobs > own).sum()) + 1, best)
