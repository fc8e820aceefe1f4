"""The fast executor on a GPU: a decode step, sampling included, is one CUDA graph per bucket of batch sizes.

Graphs are captured at the second step of their kind, so the first answer waits for none. While a step runs, the next
one of the same rows is already queued behind it, reading the drawn tokens on the device; if the scheduler then asks for
something else, the queued step is dropped (what it wrote is written again before anyone reads it: one stream orders
all). Steps with prompts in them run eagerly. The same tokens as cuda_eager, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import EngineConfig
from tokenmill.kernels import triton as gpu
from tokenmill.log import get_logger
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.cuda_eager import CudaEagerExecutor
from tokenmill.runtime.cuda_inputs import DecodeInputs, Tables
from tokenmill.runtime.cuda_ops import CudaOps, tensor
from tokenmill.runtime.cuda_sampling import CudaSampler
from tokenmill.types import Batch, Request, ScheduledTokens

_log = get_logger(__name__)
_SMALL_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
_BUCKET_STEP = 32
_MANY_ROWS = 64  # from here on the rows alone fill the chip: lengths do not change how keys are shared out


@dataclass(frozen=True, slots=True)
class _Kind:
    """What fixes the launches of a step."""

    rows: int
    longest: int  # upper bounds of a sequence and of a shared prefix, in tokens
    shared: int
    filtered: bool


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

    def tokens(self) -> list[int]:
        if self.event is not None:
            self.event.synchronize()
        found: list[int] = self.ids[: len(self.positions)].tolist()
        return found


class CudaGraphExecutor(CudaEagerExecutor):
    name = "cuda_graph"
    looks_ahead = 1  # tokens for which a page should be there before they are asked for

    def __init__(self, model: LoadedModel, store: KVStore, config: EngineConfig) -> None:
        super().__init__(model, store, config)
        self._buckets = _buckets(config.concurrency)
        self._context = config.context or model.decoder.description.context_length
        self._inputs = DecodeInputs(store.layout, self._buckets[-1], self._context, model.where)
        self._sampler = CudaSampler(model.where, model.kernels)
        self._graphs: dict[_Kind, _Graph] = {}
        self._captures = model.where.type == "cuda"
        if self._captures:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(model.where)
        self._flight: _Flight | None = None
        self._logits: Tensor = torch.empty(0)
        self._hidden: Tensor | None = None  # of the rows last asked for
        self.keeps_hidden = False  # set before the first step by whoever reads `decoded_hidden`
        self.num_dropped = 0  # steps that were queued and not asked for

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        reason = super().declines(model, store)
        if reason is not None:
            return reason
        for name, weight in model.weights.items():
            kernel = None if weight.kernel is None else weight.kernel.run
            if kernel is not None and not isinstance(kernel, (gpu.GpuLinear, gpu.JoinedRows)):
                return f"{name} ({weight.type_name}) has no GPU kernel that can be captured"
        return None

    @property
    def most_decoded(self) -> int:
        """How many rows `decode` takes."""
        return self._buckets[-1]

    def forward(self, batch: Batch) -> Tensor:
        self._drop()
        return super().forward(batch)

    @torch.inference_mode()
    def decode(self, rows: Sequence[ScheduledTokens]) -> list[int]:
        """One token of each row, all sampling: the ids drawn. Queues the step that will probably be asked for next."""
        flight, places = self._flight, self._find(rows)
        self._flight = None
        if flight is None or places is None:
            flight, places = self._launch_asked(rows), list(range(len(rows)))
        requests = [row.request for row in rows]
        if self._sampler.is_plain(requests):
            self._flight = self._launch_next(rows, places)
        drawn = flight.tokens()
        self._hidden = None if flight.hidden is None else flight.hidden[places]
        return [drawn[place] for place in places]

    def decoded_logits(self, begin: int, end: int) -> Tensor:
        """Rows of the logits of the last `decode`, for those that need more than the kernel's draw."""
        return self._logits[begin:end].float()

    def decoded_hidden(self, begin: int, end: int) -> Tensor:
        """Rows of the hidden states of the last `decode` or `check`."""
        assert self._hidden is not None, "hidden states were not asked for"
        return self._hidden[begin:end]

    @torch.inference_mode()
    def check(self, rows: Sequence[ScheduledTokens]) -> list[int]:
        """As `decode`, where several rows may be of one sequence, one position each: a draft is checked like a batch of
        decodes. Every row's key is stored before any row attends, so each sees those before it."""
        self._drop()
        flight = self._launch_asked(rows)
        self._hidden = flight.hidden
        return flight.tokens()

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
        self, requests: list[Request], tables: list[Tables], ids: list[int], positions: list[int], sources: list[int]
    ) -> _Flight:
        inputs, size = self._inputs, self.store.layout.page_size
        inputs.fill(requests, tables, ids, positions, sources)
        rows = next(bucket for bucket in self._buckets if bucket >= len(requests))
        longest = inputs.capacity if rows >= _MANY_ROWS else min(_upper(max(positions) + 1, 4), inputs.capacity)
        kind = _Kind(
            rows,
            longest,
            _upper(inputs.shared_tokens, 2) if inputs.shared_tokens else 0,
            inputs.filtered,
        )
        hidden = self._run(kind)
        arriving, event = inputs.receive()
        pages = [
            tuple(table[position // size] for table in own) for own, position in zip(tables, positions, strict=True)
        ]
        places = {request: place for place, request in enumerate(requests)}
        kept = None if hidden is None else hidden[: len(requests)].clone()
        return _Flight(places, positions, pages, arriving, event, kept)

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
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            outputs = self._step(kind)
            graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph.replay()
        _log.info("captured a step of %d rows, up to %d tokens, %d shared", kind.rows, kind.longest, kind.shared)
        return _Graph(graph, *outputs)

    def _step(self, kind: _Kind) -> tuple[Tensor, Tensor | None]:
        """The whole step: inputs, forward pass, logits, draw. Returns the logits, and the hidden states if kept."""
        inputs, decoder = self._inputs, self.model.decoder
        batch = inputs.begin(kind.rows, kind.longest)
        ops: Any = CudaOps(self.store, self.table, batch, shared=inputs.shared(kind.shared))
        hidden = decoder.forward(ops)
        kept = tensor(hidden) if self.keeps_hidden else None
        logits: Tensor = tensor(decoder.logits(ops, hidden))
        gpu.sample(logits, inputs.sampling(kind.rows, kind.filtered), inputs.drawn[: kind.rows])
        return logits, kept


def _buckets(most: int) -> list[int]:
    large = range(_SMALL_BUCKETS[-1] + _BUCKET_STEP, most + _BUCKET_STEP, _BUCKET_STEP)
    found = [*_SMALL_BUCKETS, *large]
    return found[: next((n for n, bucket in enumerate(found) if bucket >= most), len(found) - 1) + 1]


def _upper(tokens: int, factor: int) -> int:
    """The smallest 1024 * factor^n that is at least `tokens`: few kinds of steps for all lengths."""
    bound = 1024
    while bound < tokens:
        bound *= factor
    return bound
