"""Executes a StepPlan on a model: page copies, batch, forward pass, sampling -> StepResult.

The engine sees only `execute`; the simulator answers the same call with a cost model. Owns the executor and the
sampler, knows nothing of queues, pages' owners or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tokenmill.model.kvstore.base import KVStore
from tokenmill.runtime.batch import build_batch, prompt_rows
from tokenmill.runtime.sampling.sampler import Sampler, token_logprobs
from tokenmill.runtime.speculation.base import Draft
from tokenmill.runtime.speculation.lending import lent
from tokenmill.runtime.speculation.speculator import Speculator
from tokenmill.runtime.speculation.verify import Verdict, compare, verify
from tokenmill.types import Batch, Request, ScheduledTokens, StepPlan, StepResult, TokenLogprobs

_MAX_LOGIT_VALUES = 1 << 24  # logits computed at a time: 64 MiB, whatever the vocabulary


class Executor(Protocol):
    name: str

    def forward(self, batch: Batch) -> Tensor: ...

    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor: ...


@runtime_checkable
class DecodingExecutor(Protocol):
    """An executor with a short way for the commonest step: one token of each sequence, all of them sampling."""

    max_decoded: int

    def decode(self, rows: Sequence[ScheduledTokens]) -> list[int]: ...

    def decoded_logits(self, begin: int, end: int) -> Tensor: ...

    def decoded_hidden(self, begin: int, end: int) -> Tensor: ...


@runtime_checkable
class EnduringExecutor(DecodingExecutor, Protocol):
    """A decoding executor that can do several such steps in one call, which saves the caller's time between them."""

    def decode_on(self, rows: Sequence[ScheduledTokens], steps: int) -> list[list[int]]: ...


@runtime_checkable
class CheckingExecutor(Protocol):
    """A decoding executor that takes several positions of one sequence as rows: drafts cost no other kind of step."""

    max_decoded: int
    guesses: list[list[int]] | None  # by row of the last `check`, where it guesses by itself what follows

    def check(self, rows: Sequence[ScheduledTokens]) -> list[int]: ...

    def decoded_logits(self, begin: int, end: int) -> Tensor: ...

    def decoded_hidden(self, begin: int, end: int) -> Tensor: ...


@runtime_checkable
class PreparingExecutor(Protocol):
    """An executor that can do beforehand, between requests, what steps of a new kind would wait for."""

    def prepare_next(self) -> bool: ...


class ModelRunner:
    def __init__(
        self,
        executor: Executor,
        store: KVStore,
        sampler: Sampler,
        vocab_size: int,
        final_norm: Callable[[Tensor], Tensor],
        speculator: Speculator | None = None,
    ) -> None:
        self.executor = executor
        self.store = store
        self.final_norm = final_norm  # [R, hidden] -> what the head would read
        self.sampler = sampler
        self.rows_at_once = max(1, _MAX_LOGIT_VALUES // vocab_size)
        self.speculator = speculator
        self._decoder = executor if isinstance(executor, DecodingExecutor) else None
        self._checker = executor if isinstance(executor, CheckingExecutor) else None
        # A drafter that reads hidden states needs those of every token.
        sees_all = speculator is not None and speculator.drafter.needs_hidden
        self.enduring = executor if not sees_all and isinstance(executor, EnduringExecutor) else None
        self.make_observing: Callable[[], ModelRunner] | None = None  # a runner for steps whose attention is watched
        self._observing: ModelRunner | None = None

    def prepare(self) -> bool:
        """Make one kind of step fast before it is asked for; False once there is none left. For idle moments."""
        return isinstance(self.executor, PreparingExecutor) and self.executor.prepare_next()

    def execute(self, plan: StepPlan) -> StepResult:
        if self.make_observing is not None and any(_is_watched(row.request) for row in plan.scheduled):
            self._observing = self._observing or self.make_observing()
            return self._observing.execute(plan)
        if plan.page_copies:
            self.store.copy_pages(plan.page_copies)
        if self.speculator is None:
            return self._execute(plan, {})
        drafts = self.speculator.propose(plan.scheduled)
        result = self._execute(plan, drafts)
        self.speculator.learn(plan.scheduled, drafts, result)
        return result

    def _execute(self, plan: StepPlan, drafts: dict[int, Draft]) -> StepResult:
        if any(draft.parents is not None for draft in drafts.values()):
            return self._check_trees(plan.scheduled, drafts)
        if self._decoder is not None and _is_decode(plan.scheduled, self._decoder.max_decoded):
            if not drafts:
                return self._decode(self._decoder, plan.scheduled, plan.run)
            if self._checker is not None and sum(row.length for row in plan.scheduled) <= self._checker.max_decoded:
                return self._check(self._checker, plan.scheduled, drafts)
        rows = plan.scheduled
        observes = self.speculator is not None and self.speculator.drafter.needs_hidden
        batch = build_batch(plan, self.store.layout.page_size, self.store.device)
        batch.all_hidden = observes or any(row.request.embeds for row in rows)
        hidden = self.executor.forward(batch)
        result = StepResult([None] * len(rows), [None] * len(rows), [None] * len(rows))
        done = 0
        if any(row.request.params.prompt_logprobs is not None for row in rows):
            done = self._prompt_logprobs(hidden, batch, rows, result)
        if drafts:
            self._verified(hidden, batch, rows, drafts, done, result)
        else:
            self._samples(hidden, batch, rows, done, result)
        if observes:
            assert self.speculator is not None
            ends = batch.query_starts[1:].tolist()
            refused = [len(row.draft_ids) - len(result.accepted.get(n, ())) for n, row in enumerate(rows)]
            places = [end - 1 - count for end, count in zip(ends, refused, strict=True)]
            self.speculator.observe(rows, result, hidden[places].clone())
        if any(row.request.embeds for row in rows):
            self._embeddings(hidden, batch, rows, result)
        return result

    def _decode(self, decoder: DecodingExecutor, rows: list[ScheduledTokens], run: int) -> StepResult:
        requests = [row.request for row in rows]
        if self.speculator is not None:
            run = min(run, self.speculator.undrafted)
        slots = min(run - 1, min(row.num_draft_slots for row in rows))
        if slots and self.enduring is not None and self.sampler.is_plain(requests):
            return _in_one(self.enduring.decode_on(rows, slots + 1))
        best: list[int | None] = list(decoder.decode(rows))
        result = StepResult(best, [None] * len(rows), [None] * len(rows))
        if self.speculator is not None and self.speculator.wants_hidden:
            self.speculator.observe(rows, result, decoder.decoded_hidden(0, len(rows)).clone())
        if not self.sampler.is_plain(requests):
            result.token_ids, result.logprobs = self.sampler.sample(decoder.decoded_logits(0, len(rows)), requests)
        return result

    @torch.inference_mode()
    def _prompt_logprobs(self, hidden: Tensor, batch: Batch, rows: list[ScheduledTokens], result: StepResult) -> int:
        """Fill in prompt log-probabilities; returns how many of batch.logit_rows they took."""
        targets: list[tuple[int, Request, int]] = []  # (row of plan, request, position predicted)
        for number, row in enumerate(rows):
            if row.request.params.prompt_logprobs is not None:
                result.prompt_logprobs[number] = []
            targets += [(number, row.request, row.start + offset + 1) for offset in range(prompt_rows(row))]
        for begin in range(0, len(targets), self.rows_at_once):
            chunk = targets[begin : begin + self.rows_at_once]
            logprobs = self.executor.logits(hidden, batch, begin, begin + len(chunk)).log_softmax(-1)
            for values, (number, request, position) in zip(logprobs, chunk, strict=True):
                top = request.params.prompt_logprobs or 0
                found = result.prompt_logprobs[number]
                assert found is not None
                found.append(token_logprobs(values, request.token_ids[position], top))
        return len(targets)

    def _samples(
        self, hidden: Tensor, batch: Batch, rows: list[ScheduledTokens], offset: int, result: StepResult
    ) -> None:
        sampling = [number for number, row in enumerate(rows) if row.samples]
        for begin in range(0, len(sampling), self.rows_at_once):
            chunk = sampling[begin : begin + self.rows_at_once]
            logits = self.executor.logits(hidden, batch, offset + begin, offset + begin + len(chunk))
            requests = [rows[number].request for number in chunk]
            token_ids, logprobs = self.sampler.sample(logits, requests)
            _scatter(result, chunk, token_ids, logprobs)

    def _verified(
        self,
        hidden: Tensor,
        batch: Batch,
        rows: list[ScheduledTokens],
        drafts: dict[int, Draft],
        begin: int,
        result: StepResult,
    ) -> None:
        """As `_samples`, where some rows have drafts: whole sequences at a time, as many as there is room for."""
        sampling = [number for number, row in enumerate(rows) if row.samples]
        while sampling:
            chunk: list[int] = []
            size = 0
            while sampling and (not chunk or size + 1 + len(rows[sampling[0]].draft_ids) <= self.rows_at_once):
                size += 1 + len(rows[sampling[0]].draft_ids)
                chunk.append(sampling.pop(0))
            logits = self.executor.logits(hidden, batch, begin, begin + size)
            begin += size
            requests = [rows[number].request for number in chunk]
            verdicts = verify(self.sampler, logits, requests, [drafts.get(number, Draft()) for number in chunk])
            _enter(result, chunk, verdicts)

    def _check(self, checker: CheckingExecutor, rows: list[ScheduledTokens], drafts: dict[int, Draft]) -> StepResult:
        """A step of decodes, some with drafts, as one of more rows: each position of a draft is a row of its own."""
        requests = [row.request for row in rows]
        own = [drafts.get(number, Draft()) for number in range(len(rows))]
        with lent(requests) as lend:
            spread = []
            for number, row in enumerate(rows):
                for token_id in row.draft_ids:
                    lend(number, token_id)
                spread += [
                    ScheduledTokens(row.request, row.start + depth, 1, row.block_tables, True)
                    for depth in range(row.length)
                ]
            chosen: list[int | None] = list(checker.check(spread))
        if self.sampler.is_plain(requests) and all(draft.distributions is None for draft in own):
            verdicts = compare(chosen, requests, own)
        else:
            verdicts = verify(self.sampler, checker.decoded_logits(0, len(spread)), requests, own)
        result = StepResult([None] * len(rows), [None] * len(rows), [None] * len(rows))
        _enter(result, list(range(len(rows))), verdicts)
        if self.speculator is not None and self.speculator.drafter.needs_hidden:
            starts = accumulate([row.length for row in rows[:-1]], initial=0)
            places = [start + len(verdict.accepted) for start, verdict in zip(starts, verdicts, strict=True)]
            if checker.guesses is not None:
                self.speculator.take(rows, result, [checker.guesses[place] for place in places])
                return result
            self.speculator.observe(rows, result, checker.decoded_hidden(0, len(spread))[places])
        return result

    def _check_trees(self, rows: list[ScheduledTokens], drafts: dict[int, Draft]) -> StepResult:
        """A step of decodes, some with trees of drafts."""
        assert self.speculator is not None
        trees = self.speculator.drafter.trees
        assert trees is not None, "a drafter of trees says who checks them"
        own = [drafts.get(number, Draft()) for number in range(len(rows))]
        verdicts, hidden = trees.run(rows, own, self.sampler)
        result = StepResult([None] * len(rows), [None] * len(rows), [None] * len(rows))
        _enter(result, list(range(len(rows))), verdicts)
        if self.speculator.drafter.needs_hidden:
            self.speculator.observe(rows, result, hidden)
        return result

    @torch.inference_mode()
    def _embeddings(self, hidden: Tensor, batch: Batch, rows: list[ScheduledTokens], result: StepResult) -> None:
        """The final hidden state of the last token, for requests that ask for it."""
        for number, row in enumerate(rows):
            if row.request.embeds and row.samples:
                end = int(batch.query_starts[number + 1])
                result.embeddings[number] = self.final_norm(hidden[end - 1 : end])[0].tolist()


def _in_one(steps: list[list[int]]) -> StepResult:
    """Several steps of decodes as one in which all tokens but the last were guessed right."""
    *before, last = steps
    result = StepResult(list(last), [None] * len(last), [None] * len(last))
    if before:
        result.accepted = {number: list(tokens) for number, tokens in enumerate(zip(*before, strict=True))}
    return result


def _enter(result: StepResult, numbers: list[int], verdicts: list[Verdict]) -> None:
    for number, verdict in zip(numbers, verdicts, strict=True):
        result.token_ids[number] = verdict.token_id
        if verdict.accepted:
            result.accepted[number] = verdict.accepted
        if verdict.logprobs and verdict.logprobs[-1] is not None:
            *before, result.logprobs[number] = verdict.logprobs
            result.accepted_logprobs[number] = [each for each in before if each is not None]


def _is_watched(request: Request) -> bool:
    return request.params.cache is not None and request.params.cache.needs_attention


def _is_decode(rows: list[ScheduledTokens], most: int) -> bool:
    return len(rows) <= most and all(
        row.count == 1
        and row.samples
        and not row.num_dropped
        and not row.request.embeds
        and (row.request.params.prompt_logprobs is None or row.start >= len(row.request.prompt_ids) - 1)
        for row in rows
    )


def _scatter(
    result: StepResult, numbers: list[int], token_ids: list[int | None], logprobs: list[TokenLogprobs | None]
) -> None:
    for number, token_id, logprob in zip(numbers, token_ids, logprobs, strict=True):
        result.token_ids[number] = token_id
        result.logprobs[number] = logprob
