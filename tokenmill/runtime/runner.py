"""Executes a StepPlan: propose drafts, step, choose tokens, learn. The runtime's one loop body.

The engine sees only `execute`; the simulator answers the same call with a cost model. Owns an executor and perhaps a
speculator; knows nothing of queues, owners of pages, text, devices or tensors: arrays pass from the executor to its own
sampler unseen. Plans, rows and requests are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tokenmill.runtime.executors.base import Draft, Executor, StepInput, StepOutput, num_prompt_logits
from tokenmill.runtime.verify import Verdict, compare, verify
from tokenmill.types import ScheduledTokens, StepPlan, StepResult

if TYPE_CHECKING:
    from tokenmill.checkpoint.adapters.adapter import Adapter
    from tokenmill.model.adapters import AdapterBank, PreparedAdapter
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.runtime.speculation.speculator import Speculator

Drafts = dict[int, Draft]  # by row number; rows without one are left out


@dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A step that is being computed."""

    work: StepInput
    drafts: Drafts
    output: StepOutput[Any]


class ModelRunner:
    def __init__(self, executor: Executor[Any], store: KVStore, speculator: Speculator | None = None) -> None:
        self.executor = executor
        self.store = store
        self.speculator = speculator

    def execute(self, plan: StepPlan) -> StepResult:
        return self.finish(self.begin(plan))

    def begin(self, plan: StepPlan) -> Begun:
        """Up to the forward pass, which an executor of several stages may not have ended."""
        rows = plan.scheduled
        self.copy(plan)
        drafts = {} if self.speculator is None else self.speculator.propose(rows)
        work = StepInput(rows, drafts, self._reads_hidden(rows, drafts), self._max_run(plan, drafts))
        return Begun(work, drafts, self.executor.step(work))

    def finish(self, begun: Begun) -> StepResult:
        work, drafts, output = begun.work, begun.drafts, begun.output
        rows = work.rows
        result, verdicts = self._choose(work, output)
        if drafts:
            self.executor.settle_drafts(
                [rows[number].count + len(result.accepted.get(number, ())) for number in sorted(drafts)]
            )
        self._keep_branches(rows, drafts, verdicts)
        self._learn(work, drafts, output, verdicts, result)
        return result

    @property
    def lanes(self) -> int:
        """Steps that may be under way at once."""
        return 1

    def copy(self, plan: StepPlan) -> None:
        """The copies that a plan asks for, before its step."""
        if plan.page_copies:
            self.store.copy_pages(plan.page_copies)
        if plan.state_copies:
            self.store.states.copy(plan.state_copies)

    def move_tokens(self, tables: tuple[list[int], ...], first: int, path: list[int]) -> None:
        """As KVStore.move_tokens."""
        self.store.move_tokens(tables, first, path)

    def prepare(self) -> bool:
        """Compile or capture one kind of step ahead of its use; False once none is left. For idle moments."""
        return self.executor.prepare()

    # --- adapters, in the slots that rows name ---

    def prepare_adapter(self, adapter: Adapter) -> PreparedAdapter:
        """What `load_adapter` would spend its time on: may run in any thread, beside steps."""
        return self._adapters.prepare(adapter)

    def load_adapter(self, slot: int, adapter: Adapter | PreparedAdapter) -> None:
        """Between two steps; no row of a later step names what the slot held before."""
        self._adapters.load(slot, adapter)

    def clear_adapter(self, slot: int) -> None:
        self._adapters.clear(slot)

    @property
    def adapter_bytes(self) -> int:
        """Memory that adapters take on the device now."""
        return 0 if self.executor.adapters is None else self.executor.adapters.nbytes

    @property
    def _adapters(self) -> AdapterBank:
        assert self.executor.adapters is not None, "the runtime was built without slots for adapters"
        return self.executor.adapters

    @property
    def runs_greedily(self) -> bool:
        """Whether `StepPlan.run` is of use: a drafter that reads hidden states needs those of every token."""
        return self.executor.runs_greedily and not self._needs_hidden

    # --- input of the executor ---

    @property
    def _needs_hidden(self) -> bool:
        return self.speculator is not None and self.speculator.drafter.needs_hidden

    def _reads_hidden(self, rows: Sequence[ScheduledTokens], drafts: Drafts) -> bool:
        if any(row.request.embeds for row in rows):
            return True
        if self.speculator is None or not self._needs_hidden:
            return False
        return bool(drafts) or self.speculator.wants_hidden or any(row.count > 1 for row in rows)

    def _max_run(self, plan: StepPlan, drafts: Drafts) -> int:
        """Greedy tokens of each row that one call may bring: never more than there are slots for."""
        if plan.run == 1 or drafts or not self.runs_greedily:
            return 1
        run = plan.run if self.speculator is None else min(plan.run, self.speculator.max_undrafted_run)
        return min(run, 1 + min(row.num_draft_slots for row in plan.scheduled))

    # --- use of its output ---

    def _choose(self, work: StepInput, output: StepOutput[Any]) -> tuple[StepResult, dict[int, Verdict]]:
        """The result, and the verdict on each sampling row."""
        rows = work.rows
        result = StepResult([None] * len(rows), [None] * len(rows), [None] * len(rows))
        result.num_drafted = {number: len(draft.token_ids) for number, draft in work.drafts.items()}
        if output.runs is not None:
            for number, (*before, last) in enumerate(output.runs):
                result.token_ids[number] = last
                result.accepted[number] = before
            return result, {}
        if output.tokens is not None and not work.drafts:
            result.token_ids = list(output.tokens)
            result.logprobs = output.logprobs or result.logprobs
            return result, {}
        done = self._prompt_logprobs(rows, output, result)
        verdicts: dict[int, Verdict] = {}
        sampling = [number for number, row in enumerate(rows) if row.samples]
        while sampling:
            chunk, size = self._chunk(work, sampling)
            requests = [rows[number].request for number in chunk]
            drafts = [work.drafts.get(number, Draft()) for number in chunk]
            if output.tokens is not None:
                verdicts |= zip(chunk, compare(output.tokens[done : done + size], requests, drafts), strict=True)
            elif work.drafts:
                logits = output.logits(done, done + size)
                verdicts |= zip(chunk, verify(self.executor.sampler, logits, requests, drafts), strict=True)
            else:
                token_ids, logprobs = self.executor.sampler.sample(output.logits(done, done + size), requests)
                for number, token_id, record in zip(chunk, token_ids, logprobs, strict=True):
                    result.token_ids[number], result.logprobs[number] = token_id, record
            sampling, done = sampling[len(chunk) :], done + size
        for number, verdict in verdicts.items():
            _enter(result, number, verdict)
        return result, verdicts

    def _chunk(self, work: StepInput, sampling: list[int]) -> tuple[list[int], int]:
        """The first rows whose logits fit together, at least one; and the number of rows of logits."""
        totals = list(accumulate(work.num_logits(number) for number in sampling))
        count = max(1, sum(total <= self.executor.max_logit_rows for total in totals))
        return sampling[:count], totals[count - 1]

    def _prompt_logprobs(self, rows: Sequence[ScheduledTokens], output: StepOutput[Any], result: StepResult) -> int:
        """Fill in prompt log-probabilities; returns how many rows of logits they took."""
        wanted = [(n, offset) for n, row in enumerate(rows) for offset in range(num_prompt_logits(row))]
        for number, row in enumerate(rows):
            if row.request.params.prompt_logprobs is not None:
                result.prompt_logprobs[number] = []
        for begin in range(0, len(wanted), self.executor.max_logit_rows):
            chunk = wanted[begin : begin + self.executor.max_logit_rows]
            following = [rows[n].request.token_ids[rows[n].start + offset + 1] for n, offset in chunk]
            tops = [rows[n].request.params.prompt_logprobs or 0 for n, _ in chunk]
            logits = output.logits(begin, begin + len(chunk))
            records = self.executor.sampler.prompt_logprobs(logits, following, tops)
            for (number, _), record in zip(chunk, records, strict=True):
                row_records = result.prompt_logprobs[number]
                assert row_records is not None
                row_records.append(record)
        return len(wanted)

    def _keep_branches(self, rows: Sequence[ScheduledTokens], drafts: Drafts, verdicts: dict[int, Verdict]) -> None:
        """Move the keys and values of accepted branches of trees to the slots right after the known token."""
        for number, draft in drafts.items():
            if draft.parents is not None:
                row = rows[number]
                self.move_tokens(row.block_tables, row.start + row.count - row.num_dropped, verdicts[number].path)

    def _learn(
        self,
        work: StepInput,
        drafts: Drafts,
        output: StepOutput[Any],
        verdicts: dict[int, Verdict],
        result: StepResult,
    ) -> None:
        """Pass on the other results of the step: embeddings, hidden states and drafts for the drafter, accepted
        tokens."""
        rows = work.rows
        if work.hidden:
            # Of each row: the number of the token whose logits chose its last one.
            starts = accumulate((work.length(number) for number in range(len(rows))), initial=0)
            last_tokens = [
                start + row.count - 1 + (verdicts[number].row if number in verdicts else 0)
                for number, (row, start) in enumerate(zip(rows, starts, strict=False))
            ]
            if self.speculator is not None and self._needs_hidden:
                if self.speculator.drafter.needs_all_states:
                    self.speculator.observe_states(rows, result, output)
                elif drafts and output.guesses is not None:
                    self.speculator.observe_guesses(rows, result, [output.guesses[token] for token in last_tokens])
                else:
                    self.speculator.observe(rows, result, output.hidden(last_tokens))
            for number, row in enumerate(rows):
                if row.request.embeds and row.samples:
                    states = self.executor.final_norm(output.hidden([last_tokens[number]]))
                    if row.request.score_ids:
                        states = self.executor.token_logits(states, row.request.score_ids, row.adapter_slot)
                    (result.embeddings[number],) = states.tolist()
        if self.speculator is not None:
            self.speculator.learn(rows, drafts, result)


def _enter(result: StepResult, number: int, verdict: Verdict) -> None:
    result.token_ids[number] = verdict.token_id
    if verdict.accepted:
        result.accepted[number] = verdict.accepted
    if verdict.logprobs and verdict.logprobs[-1] is not None:
        *before, result.logprobs[number] = verdict.logprobs
        result.accepted_logprobs[number] = [each for each in before if each is not None]
