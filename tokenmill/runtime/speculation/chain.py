"""Drafting with a model: one forward pass per drafted token, for all rows together.

Owns the loop of passes and how a token is chosen from logits: the most likely one for greedy requests; for seeded ones
what the request's own random number draws, so that a draft model that agrees with the target draws the same token; for
the rest a separate draw, returned with its distribution. Sampling settings and grammars apply to drafts as to the
output, so an impossible token is never drafted. Used by the drafters that are models; does not know where their weights
come from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.runtime.executors.base import Draft, Executor, StepInput, TokenSampler, num_prompt_logits
from tokenmill.runtime.sampling.random import DRAFTING, uniform
from tokenmill.runtime.sampling.sampler import pick
from tokenmill.types import Request, ScheduledTokens

_MIN_PROBABILITY = 0.05  # a draft ends where the probability of all its tokens together falls below this


class ChainDrafting:
    def __init__(self, executor: Executor[Tensor], sampler: TokenSampler[Tensor], vocab_size: int) -> None:
        """`sampler`: the target's; `vocab_size`: of the target, ids beyond it are padding."""
        self._executor = executor
        self._sampler = sampler
        self._vocab_size = vocab_size

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], starts: Sequence[int], limits: Sequence[int]) -> list[Draft]:
        """`starts[i]`: the first token of row i that the model has not computed yet. Afterwards it has computed all
        known tokens.

        `rows[i].block_tables` are the model's own.
        """
        drafts = [Draft() for _ in rows]
        distributions: list[list[Tensor]] = [[] for _ in rows]
        chances = [1.0] * len(rows)
        unfinished = [number for number, limit in enumerate(limits) if limit > 0]
        while unfinished:
            logits = self._logits([self._row(rows[n], starts[n], drafts[n]) for n in unfinished], unfinished, drafts)
            remaining = []
            best = self._best(logits, [rows[number].request for number in unfinished])
            for logit_row, number in enumerate(unfinished):
                request, draft = rows[number].request, drafts[number]
                values, drawn = logits[logit_row], distributions[number]
                own = best[logit_row] if best is not None else self._choose(values, request, draft.token_ids, drawn)
                token_id, chance = own
                if token_id is None:
                    continue
                draft.token_ids.append(token_id)
                draft.confidences.append(chance)
                chances[number] *= chance
                ends = token_id in request.stop_ids or chances[number] < _MIN_PROBABILITY
                if not ends and len(draft.token_ids) < limits[number]:
                    remaining.append(number)
            unfinished = remaining
        for draft, drawn in zip(drafts, distributions, strict=True):
            if drawn:
                draft.distributions = torch.stack(drawn)
        return drafts

    def _row(self, row: ScheduledTokens, start: int, draft: Draft) -> ScheduledTokens:
        """The known tokens that are not computed yet; after them, the slot of the last drafted token."""
        known = row.request.num_tokens
        if not draft.token_ids:
            return ScheduledTokens(row.request, start, known - start, row.block_tables, True)
        return ScheduledTokens(row.request, known + len(draft.token_ids) - 1, 0, row.block_tables, True)

    def _logits(self, rows: list[ScheduledTokens], numbers: list[int], drafts: list[Draft]) -> Tensor:
        """[rows, vocab] float32: after the last token of each."""
        last = [drafts[number].token_ids[-1:] for number in numbers]
        work = StepInput(rows, {n: Draft(ids) for n, ids in enumerate(last) if ids}, queue_next=False)
        output = self._executor.step(work)
        first = sum(map(num_prompt_logits, rows))  # skips the rows of prompt log-probabilities
        return output.logits(first, first + len(rows))[:, : self._vocab_size]

    def _best(self, logits: Tensor, requests: list[Request]) -> list[tuple[int, float]] | None:
        """What `_choose` would find, of all rows at once; None where one needs more than the largest logit."""
        if not all(request.params.greedy for request in requests) or not self._sampler.is_plain(requests):
            return None
        largest, ids = logits.max(-1)
        chances = (largest - logits.logsumexp(-1)).exp()
        return list(zip(ids.tolist(), chances.tolist(), strict=True))

    def _choose(
        self, logits: Tensor, request: Request, drafted: list[int], drawn: list[Tensor]
    ) -> tuple[int | None, float]:
        params = request.params
        if params.greedy or params.seed is not None:
            chances = logits.softmax(-1) if params.greedy else None
            (token_id,), _ = self._sampler.sample(logits.clone()[None], [request], [drafted])
            if token_id is None:
                return None, 0.0
            if chances is None:
                chances = (logits / params.temperature).softmax(-1)
            return token_id, float(chances[token_id])
        distribution = self._sampler.distribution(logits.clone(), request, drafted)
        if distribution is None:
            return None, 0.0
        distribution = distribution / distribution.sum()
        position = request.num_tokens + len(drafted)
        token_id = pick(distribution, uniform(request.seed, request.index, position, stream=DRAFTING))
        drawn.append(distribution)
        return token_id, float(distribution[token_id])
