"""The fast executor on a GPU: a decode step, sampling included, is one CUDA graph per bucket of batch sizes.

A graph is captured at the second step of its kind, so that no first answer waits, or earlier in idle moments. While a
step runs, the next one of the same rows is already queued behind it and reads the sampled tokens on the device (what
needs the host, as grammars do, is computed meanwhile and drawn with in between). If the scheduler plans something else,
the queued step is dropped: its KV writes are overwritten before they are read, because one stream orders all steps;
recurrent states go to spare places (queued_states.py). Drafts are verified as additional rows of such a step, one per
position (those of recurrent models eagerly); with a draft head (`attach_drafter`) the step also computes the next
drafts, and the next verification is queued in the same way (checks.py). Steps with short prompts are graphs of their
own (prompts.py), longer ones run eagerly. Tokens are those of cuda_eager, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import triton as gpu
from tokenmill.log import get_logger
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import StepGuesser, StepInput, StepOutput
from tokenmill.runtime.executors.cuda.capture import uncaptured
from tokenmill.runtime.executors.cuda.checks import Checks, Position, Tables, spread
from tokenmill.runtime.executors.cuda.decode_records import (
    SMALL_BUCKETS,
    CapturedStep,
    LaunchedStep,
    StepKind,
    buckets,
    continuing,
    decode_kinds,
    record,
)
from tokenmill.runtime.executors.cuda.eager import CudaEagerExecutor
from tokenmill.runtime.executors.cuda.inputs import DecodeInputs
from tokenmill.runtime.executors.cuda.ops import CudaOps
from tokenmill.runtime.executors.cuda.prompts import PromptInputs, PromptKind, PromptSteps
from tokenmill.runtime.executors.cuda.queued_states import QueuedStates
from tokenmill.runtime.executors.cuda.sampling import CudaSampler
from tokenmill.runtime.executors.cuda.step_features import StepFeatures
from tokenmill.runtime.executors.cuda.values import tensor
from tokenmill.types import Batch, Request, ScheduledTokens

_log = get_logger(__name__)
_CALM_STEPS = 4  # without drafts, after which a step whose tokens the sampler draws is followed by a queued one


class CudaGraphExecutor(CudaEagerExecutor):
    name = "cuda_graph"
    lookahead = 1

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        drafts = config.draft_tokens if config.jump_forward or config.speculate not in ("", "off") else 0
        self._buckets = buckets(min(config.concurrency * (1 + drafts), max(config.concurrency, SMALL_BUCKETS[-1])))
        self._context = config.context or model.decoder.description.context_length
        self._inputs = DecodeInputs(store.layout, self._buckets[-1], self._context, model.device)
        assert isinstance(self.sampler, CudaSampler)
        self._draws_in_step, self._draw_rows = self.sampler.draws_in_step, self.sampler.draw_rows
        vocab = model.decoder.description.vocab_size
        self._features = StepFeatures(model.device, self._buckets[-1], vocab, self.sampler.token_counts)
        self._graphs: dict[StepKind, CapturedStep] = {}
        self._captures = model.device.type == "cuda"
        self._prompts: PromptSteps | None = None
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(model.device)
            self._prompts = self._prompt_steps()
        self._unprepared = self._kinds()
        self._queued: LaunchedStep | None = None  # launched ahead; the scheduler may still plan another step
        self._logits: Tensor = torch.empty(0)
        self._keeps_hidden = False
        self._replaced = False  # a row's adapter has whole matrices, which captured steps do not multiply by
        self.num_dropped = 0  # queued steps whose results were discarded
        self._calm_steps = _CALM_STEPS  # since drafts were checked, of those that the sampler draws behind
        self._guesser: StepGuesser | None = None
        self._checks: Checks | None = None
        self._states = QueuedStates(store.states) if store.layout.states else None

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        return super().declines(model, store) or uncaptured(model, store)

    def attach_drafter(self, needs_hidden: bool, guesser: StepGuesser | None) -> bool:
        self._keeps_hidden = needs_hidden
        if guesser is None or self._states is not None:
            return False
        self._guesser, self._checks = guesser, Checks(guesser.depth, self.store.layout.page_size, self._context)
        self._inputs.prepare_drafts(guesser.depth)
        self.lookahead = 2 * (guesser.depth + 1)
        return True

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        super().hold_adapters(num_slots, max_rank)
        adapted = [StepKind(rows, 0, False, adapted=True) for rows in reversed(self._buckets)]
        self._unprepared = [*adapted, *self._unprepared]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self._drop()
        if self._guesser is not None:
            self._guesser.note(batch)
        hidden = None
        if self._prompts is not None and not batch.drafted and not self._replaced:
            self.begin_states(batch.begins)
            hidden = self._prompts.forward(batch)
        return super().forward(batch) if hidden is None else hidden

    def padded(self, num_tokens: int) -> int:
        return next((bucket for bucket in self._buckets if bucket >= num_tokens), num_tokens)

    @torch.inference_mode()
    def step(self, work: StepInput) -> StepOutput[Tensor]:
        bank = self.adapters
        self._replaced = bank is not None and any(bank.replaces(row.adapter_slot) for row in work.rows)
        if not self._replaced and len(work.rows) <= self._buckets[-1] and work.decodes:
            if not work.drafts and (work.queue_next or self._states is not None):
                return self._decode(work.rows, work.queue_next)
            positions = [] if self._states is not None else spread(work)  # a state goes through drafts one by one
            if positions and len(positions) <= self._buckets[-1]:
                return self._check(work, positions)
        return super().step(work)

    def _decode(self, rows: Sequence[ScheduledTokens], queue_next: bool = True) -> StepOutput[Tensor]:
        """One token of each row. Queues the step that will probably be planned next."""
        step, row_numbers = self._queued, self._rows_in_queued(rows)
        self._queued = None
        in_step = self._draws_in_step([row.request for row in rows]) and not (step and row_numbers and step.held)
        order = self._inputs.longest_first(rows)
        if step is None or row_numbers is None:
            step = self._launch_rows([rows[number] for number in order], in_step)
            row_numbers = [0] * len(rows)
            for row, number in enumerate(order):
                row_numbers[number] = row
        if not in_step:
            return self._draw(step, rows, row_numbers, order if queue_next else [])
        if queue_next:
            sources = [row_numbers[number] for number in order]
            self._queued = self._launch_next([rows[number] for number in order], sources)
        sampled = step.tokens()
        output = self._output(step, [sampled[row] for row in row_numbers], row_numbers)
        output.logprobs = None if step.reports is None else step.reports.records(row_numbers)
        return output

    def _draw(
        self, step: LaunchedStep, rows: Sequence[ScheduledTokens], row_numbers: list[int], order: Sequence[int]
    ) -> StepOutput[Tensor]:
        """Draw behind a step that does not have the features of its rows: what they change is found out while the
        device computes it, and the step after is queued behind the draw. `order`: of its rows; none: not queued."""
        self._calm_steps += 1
        draw = self._draw_rows(self._logits, row_numbers, [row.request for row in rows], self.max_logit_rows)
        if order and self._calm_steps >= _CALM_STEPS and not draw.waits:
            self._inputs.sampled[: len(rows)] = draw.ids
            self._queued = self._launch_next([rows[number] for number in order], list(order))
        tokens, logprobs = draw.finish()
        if draw.redrawn:
            self._drop()
        return replace(self._output(step, tokens, row_numbers), logprobs=logprobs)

    def _check(self, work: StepInput, positions: list[Position]) -> StepOutput[Tensor]:
        """Several positions of a sequence as rows of one decode step: the keys of all rows are stored before any row
        attends, so each position sees those before it."""
        requests = [position.request for position in positions]
        self._calm_steps = 0
        if self._checks is not None and work.drafts:
            step, sampled, guesses = self._check_and_guess(self._checks, positions, requests)
        else:
            self._drop()
            step, guesses = self._launch_positions(positions), None
            sampled = step.tokens()
        random_drafts = any(draft.distributions is not None for draft in work.drafts.values())
        output = self._output(step, sampled if not random_drafts and self.sampler.is_plain(requests) else None)
        output.guesses = guesses
        return output

    def _output(
        self, step: LaunchedStep, tokens: Sequence[int | None] | None, row_numbers: list[int] | None = None
    ) -> StepOutput[Tensor]:
        """`row_numbers`: the row in `step` of each planned row; None: the same order. Logits are valid only if no step
        was queued behind this one, which is the case where `tokens` is None."""

        def hidden(numbers: Sequence[int]) -> Tensor:
            assert step.hidden is not None, "hidden states were not requested before the first step"
            return step.hidden[[n if row_numbers is None else row_numbers[n] for n in numbers]]

        return StepOutput(lambda begin, end: self._logits[begin:end].float(), hidden, tokens)

    def _check_and_guess(
        self, checks: Checks, positions: list[Position], requests: list[Request]
    ) -> tuple[LaunchedStep, list[int], list[list[int]]]:
        step, self._queued = self._queued, None
        if step is None or not checks.are_expected(positions, step.expected, self._inputs.device_tables):
            self.num_dropped += step is not None
            step = self._launch_positions(positions, checks.owners(positions))
        following = None
        if self.sampler.is_plain(requests) and checks.can_follow(positions):
            self._inputs.fill_from_device([position.tables for position in positions])
            following = self._launch(requests, guesses=True)
        sampled = step.tokens()
        assert step.drafts is not None
        guesses: list[list[int]] = step.drafts[: len(positions)].tolist()
        if following is not None:
            following.expected = checks.expect(positions, sampled, guesses)
        self._queued = following
        return step, sampled, guesses

    # --- capture ahead of use ---

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Compile and capture one kind of step before it is needed, by running it with padding rows only."""
        if not (self._captures and self._unprepared):
            return False
        self._drop()
        self._features.begin([], [])
        kind = self._unprepared.pop()
        if isinstance(kind, PromptKind) and self._prompts is not None:
            if kind == self._prompts.inputs.long_kind():  # compiles the kernels that only long prompts use
                super().forward(self._prompts.inputs.example(kind))
            else:
                self._prompts.prepare(kind)
        elif isinstance(kind, StepKind):
            if kind not in self._graphs:
                self._inputs.clear()
                self._graphs[kind] = CapturedStep(None, *self._step(kind))
            if self._graphs[kind].graph is None:
                self._inputs.clear()
                self._graphs[kind] = self._capture(kind)
        torch.cuda.synchronize()  # the pinned buffers are about to be overwritten
        return True

    def _kinds(self) -> list[StepKind | PromptKind]:
        """Kinds to prepare, the likeliest last."""
        decodes = decode_kinds(self._buckets, self._inputs.can_share)
        prompts = None if self._prompts is None else self._prompts.inputs
        return [*decodes] if prompts is None else [*prompts.rare_kinds(), *decodes, *prompts.likely_kinds()]

    def _prompt_steps(self) -> PromptSteps:
        config, layout = self.config, self.store.layout
        inputs = PromptInputs(layout, config.batch_tokens, config.concurrency, self._context, self.model.device)

        def compute(batch: Batch) -> Tensor:
            ops: Any = CudaOps(self.store, self.table, batch, adapters=self.adapters, replaces=False)
            return tensor(self.model.decoder.forward(ops))

        return PromptSteps(inputs, compute, self._record if self._captures else None)

    # --- choice of the step ---

    def _rows_in_queued(self, rows: Sequence[ScheduledTokens]) -> list[int] | None:
        """The row in the queued step of each planned row; None (and the step is dropped) if it is not that step."""
        page_size, states = self.store.layout.page_size, self._states
        row_numbers = None if self._queued is None else self._queued.find(rows, page_size)
        if row_numbers is not None and (states is None or all(states.is_queued(row.state_slot) for row in rows)):
            if states is not None:
                states.settle({row.state_slot for row in rows})
            return row_numbers
        self._drop()
        return None

    def _drop(self) -> None:
        self.num_dropped += self._queued is not None
        self._queued = None
        if self._states is not None:
            self._states.settle()

    def _launch_rows(self, rows: Sequence[ScheduledTokens], in_step: bool) -> LaunchedStep:
        if self._states is not None:
            self.begin_states([row.state_slot for row in rows if row.start == 0])
            self._inputs.set_states(*self._states.advance([row.state_slot for row in rows]))
        return self._fill_and_launch(
            [row.request for row in rows],
            [row.block_tables for row in rows],
            [row.request.token_ids[row.start] for row in rows],
            [row.start for row in rows],
            [-1] * len(rows),
            [row.adapter_slot for row in rows],
            in_step,
        )

    def _launch_positions(self, positions: Sequence[Position], owners: list[int] | None = None) -> LaunchedStep:
        return self._fill_and_launch(
            [position.request for position in positions],
            [position.tables for position in positions],
            [position.token_id for position in positions],
            [position.position for position in positions],
            [-1] * len(positions),
            [position.adapter_slot for position in positions],
            owners=owners,
        )

    def _launch_next(self, rows: Sequence[ScheduledTokens], sources: list[int]) -> LaunchedStep | None:
        """Queue the step after this one for the rows that continue; None if no row does or a page is missing.
        `sources`: where in `DecodeInputs.sampled` each row's token will be."""
        following = continuing(rows, sources, self.store.layout.page_size, self._context)
        if not following:
            return None
        if self._states is not None:
            places = self._states.queue([row.state_slot for row, _ in following])
            if places is None:
                return None
            self._inputs.set_states(*places)
        requests = [row.request for row, _ in following]
        return self._fill_and_launch(
            requests,
            [row.block_tables for row, _ in following],
            [0] * len(following),
            [row.start + 1 for row, _ in following],
            [source for _, source in following],
            [row.adapter_slot for row, _ in following],
            self._draws_in_step(requests),
        )

    # --- launching and capturing ---

    def _fill_and_launch(
        self,
        requests: list[Request],
        tables: list[Tables],
        ids: list[int],
        positions: list[int],
        sources: list[int],
        adapter_slots: list[int],
        in_step: bool = False,
        owners: list[int] | None = None,
    ) -> LaunchedStep:
        """`in_step`: features of the requests are those that the step itself has."""
        inputs, size = self._inputs, self.store.layout.page_size
        self._features.begin(requests if in_step else [], positions)
        inputs.set_adapters(adapter_slots)
        inputs.fill(requests, tables, ids, positions, sources)
        if owners is not None:
            inputs.set_owners(owners)
        step = self._launch(requests, guesses=owners is not None)
        step.row_of, step.positions = {request: row for row, request in enumerate(requests)}, positions
        step.adapter_slots, step.held = adapter_slots, not in_step
        step.pages = [
            tuple(table[position // size] for table in row) for row, position in zip(tables, positions, strict=True)
        ]
        return step

    def _launch(self, requests: list[Request], guesses: bool) -> LaunchedStep:
        """Launch the step whose inputs were filled last; rows and pages are for the caller to enter."""
        inputs = self._inputs
        rows, penalized = self.padded(len(requests)), self._features.penalized
        hidden = self._run(StepKind(rows, inputs.prefixes, inputs.filtered, guesses, inputs.adapted, penalized))
        reports = self._features.report(self._logits, inputs.sampled)
        ids, drafts, event = inputs.receive(guesses)
        kept = None if hidden is None else hidden[: len(requests)].clone()
        return LaunchedStep({}, [], [], ids, event, kept, len(requests), drafts, reports)

    def _run(self, kind: StepKind) -> Tensor | None:
        if kind.penalized and self._features.tables_moved():
            self._graphs = {each: step for each, step in self._graphs.items() if not each.penalized}
        known = self._graphs.get(kind)
        if known is None or not self._captures:
            self._graphs[kind] = CapturedStep(None, *self._step(kind))
        elif known.graph is None:
            self._graphs[kind] = self._capture(kind)
        else:
            known.graph.replay()
        self._logits = self._graphs[kind].logits
        return self._graphs[kind].hidden

    def _capture(self, kind: StepKind) -> CapturedStep:
        outputs: list[tuple[Tensor, Tensor | None]] = []
        graph = self._record(lambda: outputs.append(self._step(kind)))
        _log.info("captured a step of %d rows%s", kind.rows, " with shared prefixes" if kind.prefixes else "")
        return CapturedStep(graph, *outputs[0])

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        return record(step, self._stream, self._pool)

    def _step(self, kind: StepKind) -> tuple[Tensor, Tensor | None]:
        """Inputs, forward pass, logits and sampling. Returns the logits, and the hidden states if they are kept."""
        inputs, decoder = self._inputs, self.model.decoder
        batch = inputs.begin(kind.rows, kind.adapted)
        if self._guesser is not None:
            self._guesser.note(batch)
        moves = self._states is not None and kind.rows <= self._states.num_spares
        shared = inputs.shared(kind.prefixes)
        ops: Any = CudaOps(
            self.store, self.table, batch, shared=shared, moves_states=moves, adapters=self.adapters, replaces=False
        )
        hidden = decoder.forward(ops)
        kept = tensor(hidden) if self._keeps_hidden and not kind.guesses else None
        logits: Tensor = tensor(decoder.logits(ops, hidden))
        drawn = self._features.penalize(logits, batch.token_ids, batch.positions) if kind.penalized else logits
        gpu.sample(drawn, inputs.sampling(kind.rows, kind.filtered), inputs.sampled[: kind.rows], inputs.token_ring)
        if kind.guesses and self._guesser is not None:
            drafts = self._guesser.guess(tensor(hidden), inputs.sampled[: kind.rows], batch)
            inputs.compute_next(kind.rows, drafts)
        return logits, kept
