"""Drafting with a model: one forward pass per drafted token, for all rows together.

Owns the loop of passes and how a token is taken from logits: the most likely one for greedy requests; for seeded ones
what the request's own random number draws, so that a draft model that agrees with the target draws the same token; for
the rest a draw of its own, with the distribution it came from. Sampling settings and grammars apply to drafts as to the
output, so an impossible token is never drafted. Used by the drafters that are models; knows not where their weights
come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.model.kvstore.base import KVStore
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.runner import CheckingExecutor, DecodingExecutor, Executor
from tokenmill.runtime.sampling.random import uniform
from tokenmill.runtime.sampling.sampler import Sampler, pick
from tokenmill.runtime.speculation.base import Draft
from tokenmill.runtime.speculation.lending import lent
from tokenmill.types import Request, ScheduledTokens, StepPlan

_DRAFTING = 3  # stream of random numbers, beside the sampler's and the verification's
_UNLIKELY = 0.05  # a draft ends where the chance of all its tokens together falls below this


class ChainDrafting:
    def __init__(self, executor: Executor, store: KVStore, sampler: Sampler, vocab_size: int) -> None:
        self._executor = executor
        self._store = store
        self._sampler = sampler
        self._vocab_size = vocab_size  # of the target: ids beyond it are padding
        self._decoder = executor if isinstance(executor, DecodingExecutor) else None

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], starts: Sequence[int], limits: Sequence[int]) -> list[Draft]:
        """`starts[i]`: the first token of row i that the model has not computed yet; all known ones are, afterwards.

        `rows[i].block_tables` are the model's own.
        """
        drafts = [Draft() for _ in rows]
        requests = [row.request for row in rows]
        begins = list(starts)
        distributions: list[list[Tensor]] = [[] for _ in rows]
        chances = [1.0] * len(rows)
        going = [number for number, limit in enumerate(limits) if limit > 0]
        with lent(requests) as lend:
            while going:
                logits = self._forward([self._row(rows[number], begins[number]) for number in going])
                for place, number in enumerate(going):
                    request, draft = requests[number], drafts[number]
                    token_id, chance = self._choose(logits[place], request, distributions[number])
                    if token_id is None:
                        limits = [0 if n == number else limit for n, limit in enumerate(limits)]
                        continue
                    begins[number] = request.num_tokens
                    draft.token_ids.append(token_id)
                    draft.confidences.append(chance)
                    chances[number] *= chance
                    lend(number, token_id)
                    if token_id in request.stop_ids or chances[number] < _UNLIKELY:
                        limits = [0 if n == number else limit for n, limit in enumerate(limits)]
                going = [number for number in going if len(drafts[number].token_ids) < limits[number]]
        for draft, drawn in zip(drafts, distributions, strict=True):
            if drawn:
                draft.distributions = torch.stack(drawn)
        return drafts

    def _row(self, row: ScheduledTokens, begin: int) -> ScheduledTokens:
        return ScheduledTokens(row.request, begin, row.request.num_tokens - begin, row.block_tables, True)

    def _forward(self, rows: list[ScheduledTokens]) -> Tensor:
        """[rows, vocab] float32: of the last token of each."""
        decoder = self._decoder
        if decoder is not None and len(rows) <= decoder.max_decoded and all(row.count == 1 for row in rows):
            if isinstance(decoder, CheckingExecutor):  # keeps the order of rows and queues no step whose logits follow
                decoder.check(rows)
            else:
                decoder.decode(rows)
            return decoder.decoded_logits(0, len(rows))[:, : self._vocab_size]
        batch = build_batch(StepPlan(rows), self._store.layout.page_size, self._store.device)
        hidden = self._executor.forward(batch)
        first = int(batch.logit_rows.shape[0]) - len(rows)  # prompt log-probabilities are not ours to compute
        return self._executor.logits(hidden, batch, first, first + len(rows))[:, : self._vocab_size]

    def _choose(self, logits: Tensor, request: Request, drawn: list[Tensor]) -> tuple[int | None, float]:
        params = request.params
        if params.greedy or params.seed is not None:
            chances = logits.softmax(-1) if params.greedy else None
            (token_id,), _ = self._sampler.sample(logits.clone()[None], [request])
            if token_id is None:
                return None, 0.0
            if chances is None:
                chances = (logits / params.temperature).softmax(-1)
            return token_id, float(chances[token_id])
        distribution = self._sampler.distribution(logits.clone(), request)
        if distribution is None:
            return None, 0.0
        distribution = distribution / distribution.sum()
        token_id = pick(distribution, uniform(request.seed, request.index, request.num_tokens, stream=_DRAFTING))
        drawn.append(distribution)
        return token_id, float(distribution[token_id])
