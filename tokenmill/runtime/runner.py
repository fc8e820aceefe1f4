"""Executes a StepPlan on a model: page copies, batch, forward pass, sampling -> StepResult.

The engine sees only `execute`; the simulator answers the same call with a cost model. Owns the executor and the
sampler, knows nothing of queues, pages' owners or text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tokenmill.model.kvstore.base import KVStore
from tokenmill.runtime.batch import build_batch, prompt_rows
from tokenmill.runtime.sampling.sampler import Sampler, token_logprobs
from tokenmill.types import Batch, Request, ScheduledTokens, StepPlan, StepResult, TokenLogprobs

_MAX_LOGIT_VALUES = 1 << 24  # logits computed at a time: 64 MiB, whatever the vocabulary


class Executor(Protocol):
    name: str

    def forward(self, batch: Batch) -> Tensor: ...

    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor: ...


@runtime_checkable
class DecodingExecutor(Protocol):
    """An executor with a short way for the commonest step: one token of each sequence, all of them sampling."""

    most_decoded: int

    def decode(self, rows: Sequence[ScheduledTokens]) -> list[int]: ...

    def decoded_logits(self, begin: int, end: int) -> Tensor: ...


class ModelRunner:
    def __init__(
        self,
        executor: Executor,
        store: KVStore,
        sampler: Sampler,
        vocab_size: int,
        final_norm: Callable[[Tensor], Tensor],
    ) -> None:
        self.executor = executor
        self.store = store
        self.final_norm = final_norm  # [R, hidden] -> what the head would read
        self.sampler = sampler
        self.rows_at_once = max(1, _MAX_LOGIT_VALUES // vocab_size)
        self._decoder = executor if isinstance(executor, DecodingExecutor) else None

    def execute(self, plan: StepPlan) -> StepResult:
        if plan.page_copies:
            self.store.copy_pages(plan.page_copies)
        if self._decoder is not None and _is_decode(plan.scheduled, self._decoder.most_decoded):
            return self._decode(self._decoder, plan.scheduled)
        batch = build_batch(plan, self.store.layout.page_size, self.store.where)
        hidden = self.executor.forward(batch)
        rows = plan.scheduled
        result = StepResult([None] * len(rows), [None] * len(rows), [None] * len(rows))
        done = 0
        if any(row.request.params.prompt_logprobs is not None for row in rows):
            done = self._prompt_logprobs(hidden, batch, rows, result)
        self._samples(hidden, batch, rows, done, result)
        if any(row.request.embeds for row in rows):
            self._embeddings(hidden, batch, rows, result)
        return result

    def _decode(self, decoder: DecodingExecutor, rows: list[ScheduledTokens]) -> StepResult:
        best: list[int | None] = list(decoder.decode(rows))
        requests = [row.request for row in rows]
        if self.sampler.is_plain(requests):
            return StepResult(best, [None] * len(rows), [None] * len(rows))
        token_ids, logprobs = self.sampler.sample(decoder.decoded_logits(0, len(rows)), requests)
        return StepResult(token_ids, logprobs, [None] * len(rows))

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

    @torch.inference_mode()
    def _embeddings(self, hidden: Tensor, batch: Batch, rows: list[ScheduledTokens], result: StepResult) -> None:
        """The final hidden state of the last token, for requests that ask for it."""
        for number, row in enumerate(rows):
            if row.request.embeds and row.samples:
                end = int(batch.query_starts[number + 1])
                result.embeddings[number] = self.final_norm(hidden[end - 1 : end])[0].tolist()


def _is_decode(rows: list[ScheduledTokens], most: int) -> bool:
    return len(rows) <= most and all(
        row.count == 1
        and row.samples
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
