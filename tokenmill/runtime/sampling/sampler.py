"""Logits -> token ids, where the logits are. Every row is sampled for its own request, independent of its neighbours.

Greedy rows are one argmax. Random rows take one uniform number each (random.py) and walk the cumulative distribution;
the vocabulary is sorted only when a filter cannot decide from the most likely few hundred tokens. Features plug in
through features/; logits are tensors or numpy arrays (torch_math.py, numpy_math.py). Tokens that are drafted but not
accepted yet are passed separately from the request, which is never changed. Owned by an executor; called by the runner
once per chunk of logit rows, by verification and by draft models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.grammar.progress import GrammarProgress
from tokenmill.kernels.base import select
from tokenmill.kernels.host import HOST, Device
from tokenmill.runtime.sampling.features import FILTERS, LOGIT_FEATURES
from tokenmill.runtime.sampling.features.base import Candidates, Filter, LogitFeature
from tokenmill.runtime.sampling.features.grammar import Grammar
from tokenmill.runtime.sampling.random import ACCEPTING, REDRAWING, uniform
from tokenmill.types import Request, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from torch import Tensor

_FIRST_CUT = 256  # candidates tried before the entire vocabulary is sorted


def _math(array: Any) -> Any:
    """The functions for arrays of this kind."""
    if isinstance(array, np.ndarray):
        from tokenmill.runtime.sampling import numpy_math

        return numpy_math
    from tokenmill.runtime.sampling import torch_math

    return torch_math


class Sampler:
    def __init__(self, device: Device | None = None, kernels: str = "") -> None:
        self._argmax = select("argmax", device or HOST, kernels).run
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
        with _math(logits).computing():
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

    def prepare_grammars(self, requests: Sequence[Request]) -> None:
        """Compute the masks after the tokens that these have, where threads can share that."""
        for feature in self._logit_features:
            if isinstance(feature, Grammar):
                feature.prepare(requests, [()] * len(requests))

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
        whole: Tensor = _math(logits).scattered(values / values.sum(), ids, len(logits))
        return whole

    def accept_or_redraw(
        self, logits: Tensor, request: Request, drafted: Sequence[int], token_id: int, proposal: Tensor
    ) -> tuple[int | None, TokenLogprobs | None]:
        """Rejection sampling of `token_id`, which was drawn from `proposal` [vocab]: accepted with probability
        min(1, p/q), else replaced by a draw from what p has over q."""
        math = _math(logits)
        with math.computing():
            raw = math.log_softmax(logits) if request.params.logprobs is not None else None
            target = self.distribution(logits, request, drafted)
        if target is None:
            return None, None
        position = (request.seed, request.index, request.num_tokens + len(drafted))
        chosen = token_id
        if uniform(*position, stream=ACCEPTING) * float(proposal[token_id]) >= float(target[token_id]):
            chosen = pick(residual(target, math.beside(proposal, target)), uniform(*position, stream=REDRAWING))
        record = None if raw is None else token_logprobs(raw, chosen, request.params.logprobs or 0)
        return chosen, record

    def prompt_logprobs(self, logits: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
        """By row of logits: the record of the token that followed."""
        math = _math(logits)
        with math.computing():
            return records_of(math.log_softmax(logits), token_ids, tops)

    def _sample(
        self, logits: Tensor, requests: Sequence[Request], drafted: Sequence[Sequence[int]]
    ) -> tuple[list[int | None], list[TokenLogprobs | None]]:
        wanted = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
        # Reported log-probabilities are those of the model, before any penalty or filter.
        raw = _math(logits).log_softmax(logits[wanted]) if wanted else None
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
            tops, chosen = [requests[row].params.logprobs or 0 for row in wanted], [token_ids[row] for row in wanted]
            for row, record in zip(wanted, records_of(raw, [each or 0 for each in chosen], tops), strict=True):
                logprobs[row] = None if token_ids[row] is None else record
        return token_ids, logprobs

    def _draw(self, logits: Tensor, request: Request, num_drafted: int) -> int:
        point = uniform(request.seed, request.index, request.num_tokens + num_drafted)
        values, ids = self._candidates(logits, request.params)
        index = pick(values, point)
        return index if ids is None else int(ids[index])

    def _candidates(self, logits: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor | None]:
        """(probabilities, up to a factor; the tokens they are of, or None: all of the vocabulary in order)."""
        math = _math(logits)
        probabilities = math.softmax(logits, params.temperature)
        filters = [candidate for candidate in self._filters if candidate.active(params)]
        if not filters:
            return probabilities, None
        cut = min(_FIRST_CUT, len(probabilities))
        values, ids = math.likeliest(probabilities, logits, cut)
        kept = _narrow(filters, values, cut == len(probabilities), params)
        if kept is None:
            values, ids = math.descending(probabilities)
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
    return len(values)


def pick(probabilities: Tensor, point: float) -> int:
    """The index where the cumulative mass passes `point` of the total; never one of zero probability."""
    index: int = _math(probabilities).pick(probabilities, point)
    return index


def residual(target: Tensor, proposal: Tensor) -> Tensor:
    """The distribution to draw from when a token drawn from `proposal` is rejected; [..., vocab], not normalized."""
    # Where they are equal up to rounding, rejections are rounding errors, and the target itself is right.
    rest: Tensor = _math(target).residual(target, proposal)
    return rest


def token_logprobs(logprobs: Tensor, token_id: int, top: int) -> TokenLogprobs:
    """The record for one position from its log-probabilities [vocab]."""
    return records_of(logprobs[None], [token_id], [top])[0]


def records_of(logprobs: Tensor, token_ids: Sequence[int], tops: Sequence[int]) -> list[TokenLogprobs]:
    """The record of one token for each row of log-probabilities [R, vocab], with so many of the likeliest."""
    math = _math(logprobs)
    own, ranks = math.own_and_rank(logprobs, token_ids)
    best: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if any(tops):
        pairs = zip(*math.best(logprobs, min(max(tops), logprobs.shape[1])), strict=True)
        best = [tuple(zip(i[:top], v[:top], strict=True)) for (i, v), top in zip(pairs, tops, strict=True)]
    rows = zip(token_ids, own, ranks, best, strict=True)
    return [TokenLogprobs(*row) for row in rows]
