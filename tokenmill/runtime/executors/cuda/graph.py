"""The fast executor on a GPU: a decode step, sampling included, is one CUDA graph per bucket of batch sizes.

Graphs are captured at the second step of their kind, so the first answer waits for none, or in idle moments before
their first (`prepare`). While a step runs, the next one of the same rows is already queued behind it, reading the
drawn tokens on the device; if the scheduler then asks for something else, the queued step is dropped (what it wrote is
written again before anyone reads it: one stream orders all). Drafts are checked as more rows of such a step, one per
position; with a draft head (`attach_drafter`) it also guesses those of the next one, queued likewise (checks.py).
Steps with prompts of few tokens are graphs of their own (prompts.py), longer ones run eagerly. The same tokens as
cuda_eager, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import triton as gpu
from tokenmill.log import get_logger
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.base import StepGuesser, StepInput, StepOutput
from tokenmill.runtime.executors.cuda.checks import Checks, Expected, Position, Tables, spread
from tokenmill.runtime.executors.cuda.eager import CudaEagerExecutor
from tokenmill.runtime.executors.cuda.inputs import DecodeInputs
from tokenmill.runtime.executors.cuda.ops import CudaOps, tensor
from tokenmill.runtime.executors.cuda.prompts import PromptInputs, PromptKind, PromptSteps
from tokenmill.types import Batch, Request, ScheduledTokens

_log = get_logger(__name__)
_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BUCKET_STEP = 32


@dataclass(frozen=True, slots=True)
class _Kind:
    """What fixes the launches of a step. Lengths do not: the kernels read them on the device."""

    rows: int
    shared: bool  # some rows begin with the same pages
    filtered: bool  # some rows sample from a part of the vocabulary
    guesses: bool = False  # a draft head guesses what follows


@dataclass(slots=True, eq=False)
class _Graph:
    graph: torch.cuda.CUDAGraph | None  # None: seen once, run eagerly
    logits: Tensor
    hidden: Tensor | None


@dataclass(slots=True, eq=False)
class _Flight:
    """A step that was launched: whose rows, where each wrote, and where its ids will arrive."""

    places: dict[Request, int]
    positions: list[int]
    pages: list[tuple[int, ...]]  # per row and group: the page its token was written to
    ids: Tensor
    event: torch.cuda.Event | None
    hidden: Tensor | None  # a copy: the next step of this kind overwrites its own
    num_rows: int
    guessed: Tensor | None = None  # [rows, depth], in pinned memory as `ids`
    expected: Expected = field(default_factory=list)  # the rows of a check that was queued

    def tokens(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        found: list[int] = self.ids[: self.num_rows].tolist()
        return found


class CudaGraphExecutor(CudaEagerExecutor):
    name = "cuda_graph"
    lookahead = 1

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        drafts = config.draft_tokens if config.speculate not in ("", "off") else 0
        self._buckets = _buckets(min(config.concurrency * (1 + drafts), max(config.concurrency, _SMALL_BUCKETS[-1])))
        self._context = config.context or model.decoder.description.context_length
        self._inputs = DecodeInputs(store.layout, self._buckets[-1], self._context, model.device)
        self._graphs: dict[_Kind, _Graph] = {}
        self._captures = model.device.type == "cuda"
        self._prompts: PromptSteps | None = None
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(model.device)
            self._prompts = self._prompt_steps()
        self._unprepared = self._kinds()
        self._flight: _Flight | None = None
        self._logits: Tensor = torch.empty(0)
        self._keeps_hidden = False
        self.num_dropped = 0  # steps that were queued and not asked for
        self._guesser: StepGuesser | None = None
        self._checks: Checks | None = None

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        reason = super().declines(model, store)
        if reason is not None:
            return reason
        for name, weight in model.weights.items():
            kernel = None if weight.kernel is None else weight.kernel.run
            if kernel is not None and not isinstance(kernel, (gpu.GpuLinear, gpu.JoinedRows)):
                return f"{name} ({weight.type_name}) has no GPU kernel that can be captured"
        slots = range(store.layout.layers_per_page)
        return next((reason for reason in map(store.gpu_declines, slots) if reason is not None), None)

    def attach_drafter(self, needs_hidden: bool, guesser: StepGuesser | None) -> bool:
        self._keeps_hidden = needs_hidden
        if guesser is None:
            return False
        self._guesser, self._checks = guesser, Checks(guesser.depth, self.store.layout.page_size, self._context)
        self._inputs.prepare_drafts(guesser.depth)
        self.lookahead = 2 * (guesser.depth + 1)
        return True

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self._drop()
        if self._guesser is not None:
            self._guesser.note(batch)
        hidden = None if self._prompts is None else self._prompts.forward(batch)
        return super().forward(batch) if hidden is None else hidden

    @torch.inference_mode()
    def step(self, work: StepInput) -> StepOutput[Tensor]:
        if len(work.rows) <= self._buckets[-1] and work.decodes:
            if not work.drafts and work.queue_next:
                return self._decode(work.rows)
            positions = spread(work)
            if len(positions) <= self._buckets[-1]:
                return self._check(work, positions)
        return super().step(work)

    def _decode(self, rows: Sequence[ScheduledTokens]) -> StepOutput[Tensor]:
        """One token of each row. Queues the step that will probably be asked for next."""
        flight, places = self._flight, self._find(rows)
        self._flight = None
        plain = self.sampler.is_plain([row.request for row in rows])
        order = self._inputs.longest_first(rows) if plain else range(len(rows))
        if flight is None or places is None:
            flight = self._launch_asked([rows[number] for number in order])
            places = [0] * len(rows)
            for place, number in enumerate(order):
                places[number] = place
        if plain:
            self._flight = self._launch_next([rows[number] for number in order], [places[number] for number in order])
        chosen = flight.tokens()
        return self._answer(flight, [chosen[place] for place in places] if plain else None, places)

    def _check(self, work: StepInput, positions: list[Position]) -> StepOutput[Tensor]:
        """Several positions of a sequence, as if they were sequences: every position's key is stored before any of them
        attends, so each sees those before it."""
        requests = [each.request for each in positions]
        if self._checks is not None and work.drafts:
            flight, chosen, guesses = self._check_and_guess(self._checks, positions, requests)
        else:
            self._drop()
            flight, guesses = self._launch_positions(positions), None
            chosen = flight.tokens()
        drawn = any(draft.distributions is not None for draft in work.drafts.values())
        output = self._answer(flight, chosen if not drawn and self.sampler.is_plain(requests) else None)
        output.guesses = guesses
        return output

    def _answer(self, flight: _Flight, tokens: list[int] | None, places: list[int] | None = None) -> StepOutput[Tensor]:
        """`places`: of each row of the step in `flight`; None: in order. Logits may be read where nothing was queued
        behind the step, which is where tokens are not given."""

        def hidden(numbers: Sequence[int]) -> Tensor:
            assert flight.hidden is not None, "hidden states were not asked for before the first step"
            return flight.hidden[[n if places is None else places[n] for n in numbers]]

        return StepOutput(lambda begin, end: self._logits[begin:end].float(), hidden, tokens)

    def _check_and_guess(
        self, checks: Checks, positions: list[Position], requests: list[Request]
    ) -> tuple[_Flight, list[int], list[list[int]]]:
        flight, self._flight = self._flight, None
        if flight is None or not checks.are_expected(positions, flight.expected, self._inputs.known_tables):
            self.num_dropped += flight is not None
            flight = self._launch_positions(positions, checks.owners(positions))
        following = None
        if self.sampler.is_plain(requests) and checks.can_follow(positions):
            self._inputs.fill_from_device([each.tables for each in positions])
            following = self._fly(requests, guesses=True)
        chosen = flight.tokens()
        assert flight.guessed is not None
        guesses: list[list[int]] = flight.guessed[: len(positions)].tolist()
        if following is not None:
            following.expected = checks.expect(positions, chosen, guesses)
        self._flight = following
        return flight, chosen, guesses

    # --- before anyone asks ---

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Compile and capture one kind of step that may come, by running it on rows that are not there."""
        if not self._captures or not self._unprepared:
            return False
        self._drop()
        kind = self._unprepared.pop()
        if isinstance(kind, PromptKind):
            assert self._prompts is not None
            if kind == self._prompts.inputs.long_kind():  # its kernels are not all those of short ones
                super().forward(self._prompts.inputs.example(kind))
            else:
                self._prompts.prepare(kind)
        else:
            if kind not in self._graphs:
                self._inputs.clear()
                self._graphs[kind] = _Graph(None, *self._step(kind))
            if self._graphs[kind].graph is None:
                self._inputs.clear()
                self._graphs[kind] = self._capture(kind)
        torch.cuda.synchronize()  # what was sent to the device is overwritten soon
        return True

    def _kinds(self) -> list[_Kind | PromptKind]:
        """What to prepare, the likeliest last."""
        shared = [False, True] if self._inputs.can_share else [False]
        kinds = [_Kind(rows, s, filtered) for s in shared for filtered in (False, True) for rows in self._buckets]
        decodes = reversed([kind for kind in kinds if kind.rows > 1 or not kind.shared])
        if self._prompts is None:
            return list(decodes)
        long = self._prompts.inputs.long_kind()
        return [*([] if long is None else [long]), *decodes, *self._prompts.inputs.likely_kinds()]

    def _prompt_steps(self) -> PromptSteps:
        config = self.config
        inputs = PromptInputs(
            self.store.layout, config.batch_tokens, config.concurrency, self._context, self.model.device
        )

        def compute(batch: Batch) -> Tensor:
            ops: Any = CudaOps(self.store, self.table, batch)
            return tensor(self.model.decoder.forward(ops))

        return PromptSteps(inputs, compute, self._record if self._captures else None)

    # --- which step ---

    def _find(self, rows: Sequence[ScheduledTokens]) -> list[int] | None:
        """Where the queued step has these rows; None if it lacks one, or wrote its token to another page."""
        flight = self._flight
        if flight is None:
            return None
        size, places = self.store.layout.page_size, []
        for row in rows:
            place = flight.places.get(row.request, -1)
            if place < 0 or flight.positions[place] != row.start:
                break
            if flight.pages[place] != tuple(table[row.start // size] for table in row.block_tables):
                break
            places.append(place)
        else:
            return places
        self._drop()
        return None

    def _drop(self) -> None:
        self.num_dropped += self._flight is not None
        self._flight = None

    def _launch_asked(self, rows: Sequence[ScheduledTokens]) -> _Flight:
        return self._launch(
            [row.request for row in rows],
            [row.block_tables for row in rows],
            [row.request.token_ids[row.start] for row in rows],
            [row.start for row in rows],
            [-1] * len(rows),
        )

    def _launch_positions(self, positions: Sequence[Position], owners: list[int] | None = None) -> _Flight:
        return self._launch(
            [each.request for each in positions],
            [each.tables for each in positions],
            [each.token_id for each in positions],
            [each.position for each in positions],
            [-1] * len(positions),
            owners,
        )

    def _launch_next(self, rows: Sequence[ScheduledTokens], places: list[int]) -> _Flight | None:
        """The step after this one, for the rows that go on; None where there is none or a page is missing."""
        size = self.store.layout.page_size
        going = []
        for row, place in zip(rows, places, strict=True):
            request, position = row.request, row.start + 1
            if request.num_output_tokens + 1 >= request.params.max_tokens or position + 1 >= self._context:
                continue
            if position // size >= len(row.block_tables[0]):
                return None
            if request.params.n > 1 and not request.forked:
                return None  # its siblings join in the next step
            going.append((row, place))
        if not going:
            return None
        return self._launch(
            [row.request for row, _ in going],
            [row.block_tables for row, _ in going],
            [0] * len(going),
            [row.start + 1 for row, _ in going],
            [place for _, place in going],
        )

    # --- how it runs ---

    def _launch(
        self,
        requests: list[Request],
        tables: list[Tables],
        ids: list[int],
        positions: list[int],
        sources: list[int],
        owners: list[int] | None = None,
    ) -> _Flight:
        inputs, size = self._inputs, self.store.layout.page_size
        inputs.fill(requests, tables, ids, positions, sources)
        if owners is not None:
            inputs.own(owners)
        flight = self._fly(requests, guesses=owners is not None)
        flight.places, flight.positions = {request: place for place, request in enumerate(requests)}, positions
        flight.pages = [
            tuple(table[position // size] for table in own) for own, position in zip(tables, positions, strict=True)
        ]
        return flight

    def _fly(self, requests: list[Request], guesses: bool) -> _Flight:
        """Launch a step whose inputs are on their way."""
        inputs = self._inputs
        rows = next(bucket for bucket in self._buckets if bucket >= len(requests))
        hidden = self._run(_Kind(rows, inputs.shared_tokens > 0, inputs.filtered, guesses))
        arriving, guessed, event = inputs.receive(guesses)
        kept = None if hidden is None else hidden[: len(requests)].clone()
        return _Flight({}, [], [], arriving, event, kept, len(requests), guessed)

    def _run(self, kind: _Kind) -> Tensor | None:
        known = self._graphs.get(kind)
        if known is None or not self._captures:
            self._graphs[kind] = _Graph(None, *self._step(kind))
        elif known.graph is None:
            self._graphs[kind] = self._capture(kind)
        else:
            known.graph.replay()
        self._logits = self._graphs[kind].logits
        return self._graphs[kind].hidden

    def _capture(self, kind: _Kind) -> _Graph:
        outputs: list[tuple[Tensor, Tensor | None]] = []
        graph = self._record(lambda: outputs.append(self._step(kind)))
        _log.info("captured a step of %d rows%s", kind.rows, ", a prefix shared" if kind.shared else "")
        return _Graph(graph, *outputs[0])

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what `step` launches, and run it."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            step()
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph.replay()
        return graph

    def _step(self, kind: _Kind) -> tuple[Tensor, Tensor | None]:
        """The whole step: inputs, forward pass, logits, draw. Returns the logits, and the hidden states if kept."""
        inputs, decoder = self._inputs, self.model.decoder
        batch = inputs.begin(kind.rows)
        if self._guesser is not None:
            self._guesser.note(batch)
        ops: Any = CudaOps(self.store, self.table, batch, shared=inputs.shared(kind.shared))
        hidden = decoder.forward(ops)
        kept = tensor(hidden) if self._keeps_hidden and not kind.guesses else None
        logits: Tensor = tensor(decoder.logits(ops, hidden))
        gpu.sample(logits, inputs.sampling(kind.rows, kind.filtered), inputs.drawn[: kind.rows], inputs.echo)
        if kind.guesses and self._guesser is not None:
            inputs.follow(kind.rows, self._guesser.guess(tensor(hidden), inputs.drawn[: kind.rows], batch))
        return logits, kept


def _buckets(most: int) -> list[int]:
    large = range(_SMALL_BUCKETS[-1] + _BUCKET_STEP, most + _BUCKET_STEP, _BUCKET_STEP)
    found = [*_SMALL_BUCKETS, *large]
    return found[: next((n for n, bucket in enumerate(found) if bucket >= most), len(found) - 1) + 1]
