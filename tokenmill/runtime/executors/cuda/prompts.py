"""Captured steps with short prompts, where launching kernels one by one takes longer than the kernels themselves.

A kind is a bucket of tokens and one of sequences; a step is padded to both (with tokens that belong to no sequence and
are not stored, and with sequences without tokens). Knows neither models nor sampling: the graph executor says what is
computed and how it is captured. Longer steps and steps that only decode run elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Batch

MAX_PROMPT_TOKENS = 2048  # of a captured step: with more, the device takes longer than the launches
# Products are computed in tiles of 128 tokens: finer steps would save little.
_TOKEN_BUCKETS = (16, 32, 64, *range(128, MAX_PROMPT_TOKENS + 1, 128))
# Less than any bucket of tokens: with as many sequences as tokens, attention would treat the step as a decode.
_SEQUENCE_BUCKETS = (3, 15, 63, 127, 255, 511, 1023)
_MAX_GRAPHS = 64  # beyond this the least recently used is discarded
_LIKELY_TOKENS = 1024  # steps of few sequences are prepared up to this size


@dataclass(frozen=True, slots=True)
class PromptKind:
    tokens: int
    sequences: int
    adapted: bool = False  # some tokens have adapters


class PromptInputs:
    """Buffers that never move, and the step in them."""

    def __init__(self, layout: KVLayout, max_tokens: int, max_sequences: int, context: int, device: torch.device):
        """`max_tokens`, `max_sequences`: of any step; `context`: tokens of any sequence."""
        width, groups = -(-context // layout.page_size) + 1, len(layout.groups)
        self._capacity = width * layout.page_size
        max_captured = min(max_tokens, MAX_PROMPT_TOKENS)
        self._has_long = max_captured == MAX_PROMPT_TOKENS
        self._token_buckets = [bucket for bucket in _TOKEN_BUCKETS if bucket < max_captured]
        self._token_buckets.append(_TOKEN_BUCKETS[len(self._token_buckets)])
        self._sequence_buckets = [*(bucket for bucket in _SEQUENCE_BUCKETS if bucket < max_sequences), max_sequences]

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._tokens = zeros(2 + groups, self._token_buckets[-1], dtype=torch.int64)  # ids, positions, slots by group
        self._adapter_slots = zeros(self._token_buckets[-1])
        self._starts, self._seq_lens = zeros(max_sequences + 1), zeros(max_sequences)
        self._tables = [zeros(max_sequences, width) for _ in range(groups)]
        self._state_slots = zeros(max_sequences, dtype=torch.int64) if layout.states else None

    @property
    def max_tokens(self) -> int:
        return self._token_buckets[-1]

    def kind(self, batch: Batch) -> PromptKind | None:
        """What the step is padded to; None if it is not to be captured."""
        tokens, sequences = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        if batch.max_query == 1 or batch.ancestors is not None or tokens >= MAX_PROMPT_TOKENS:
            return None
        if any(table.shape[1] > own.shape[1] for table, own in zip(batch.block_tables, self._tables, strict=True)):
            return None
        padded_sequences = next((bucket for bucket in self._sequence_buckets if bucket >= sequences), 0)
        min_tokens = max(tokens, padded_sequences + 1)
        padded_tokens = next((bucket for bucket in self._token_buckets if bucket >= min_tokens), 0)
        if not padded_sequences or not padded_tokens:
            return None
        return PromptKind(padded_tokens, padded_sequences, batch.adapter_slots is not None)

    def likely_kinds(self) -> list[PromptKind]:
        """Short prompts, few at a time; the largest last, which is prepared first: the others fit in its memory."""
        few = self._sequence_buckets[0]
        return [PromptKind(tokens, few) for tokens in self._token_buckets if few < tokens <= _LIKELY_TOKENS]

    def busy_kinds(self) -> list[PromptKind]:
        """A prompt beside up to 63 running sequences."""
        several = self._sequence_buckets[1:3]
        return [PromptKind(tokens, count) for count in several for tokens in self._token_buckets if tokens > count]

    def rare_kinds(self) -> list[PromptKind]:
        """To prepare after all others."""
        long = self.long_kind()
        return [*([] if long is None else [long]), *self.busy_kinds()]

    def long_kind(self) -> PromptKind | None:
        """The kind of steps too long to be captured; None if no step can be that long."""
        return PromptKind(MAX_PROMPT_TOKENS, self._sequence_buckets[0]) if self._has_long else None

    def example(self, kind: PromptKind) -> Batch:
        """A step with a prompt of two tokens that are not stored; the rest is padding."""
        self.clear(kind)
        self._starts[1 : kind.sequences + 1] = 2
        self._seq_lens[0] = 2
        return self.batch(kind)

    def fill(self, batch: Batch, kind: PromptKind) -> None:
        tokens, sequences = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        self.clear(kind, tokens, sequences)
        for number, values in enumerate((batch.token_ids, batch.positions, *batch.slots)):
            self._tokens[number, :tokens] = values
        if batch.adapter_slots is not None:
            self._adapter_slots[:tokens] = batch.adapter_slots
        self._starts[: sequences + 1] = batch.query_starts
        self._seq_lens[:sequences] = batch.seq_lens
        for own, table in zip(self._tables, batch.block_tables, strict=True):
            own[:sequences, : table.shape[1]] = table
        if self._state_slots is not None:
            assert batch.state_slots is not None
            self._state_slots[:sequences] = batch.state_slots

    def clear(self, kind: PromptKind, tokens: int = 0, sequences: int = 0) -> None:
        """Make padding of all that follows the first `tokens` tokens and `sequences` sequences."""
        self._tokens[:2, tokens : kind.tokens] = 0
        self._tokens[2:, tokens : kind.tokens] = -1
        self._adapter_slots[tokens : kind.tokens] = 0
        self._starts[sequences : kind.sequences + 1] = tokens
        self._seq_lens[sequences : kind.sequences] = 0
        if self._state_slots is not None:
            self._state_slots[sequences : kind.sequences] = -1

    def batch(self, kind: PromptKind) -> Batch:
        """The padded step, with bounds that hold for every step of its kind."""
        ids, positions, *slots = self._tokens[:, : kind.tokens]
        return Batch(
            token_ids=ids,
            positions=positions,
            query_starts=self._starts[: kind.sequences + 1],
            seq_lens=self._seq_lens[: kind.sequences],
            slots=tuple(slots),
            block_tables=tuple(table[: kind.sequences] for table in self._tables),
            logit_rows=self._starts[:0],
            max_query=kind.tokens,
            max_seq=self._capacity,
            state_slots=None if self._state_slots is None else self._state_slots[: kind.sequences],
            adapter_slots=self._adapter_slots[: kind.tokens] if kind.adapted else None,
        )


class PromptSteps:
    """Runs padded steps: the first of a kind eagerly, the second is captured, the following ones are replayed."""

    def __init__(
        self,
        inputs: PromptInputs,
        compute: Callable[[Batch], Tensor],
        capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph] | None,
    ) -> None:
        """`compute`: hidden states of a batch; `capture`: captures a call and replays it once, None: not possible."""
        self.inputs, self._compute, self._capture = inputs, compute, capture
        self._graphs: dict[PromptKind, torch.cuda.CUDAGraph | None] = {}  # most recently used last; None: not captured
        self._hidden: Tensor | None = None  # outside the graphs' memory, one for all of them

    @property
    def num_captured(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def forward(self, batch: Batch) -> Tensor | None:
        """Hidden states [T, hidden], to be read before the next step; None if the step is not to be captured."""
        kind = self.inputs.kind(batch)
        if kind is None:
            return None
        self.inputs.fill(batch, kind)
        self._run(kind)
        assert self._hidden is not None
        return self._hidden[: batch.token_ids.shape[0]]

    def prepare(self, kind: PromptKind) -> None:
        """Capture a kind by steps of padding only: nothing is stored."""
        while self._graphs.get(kind) is None:
            self.inputs.clear(kind)
            self._run(kind)
            if self._capture is None:
                return

    def _run(self, kind: PromptKind) -> None:
        if self._capture is None or kind not in self._graphs:
            self._step(kind)
            self._graphs[kind] = None
            return
        graph = self._graphs.pop(kind)
        if graph is not None:
            graph.replay()
        else:
            self._make_room()
            graph = self._capture(lambda: self._step(kind))
        self._graphs[kind] = graph

    def _step(self, kind: PromptKind) -> None:
        hidden = self._compute(self.inputs.batch(kind))
        if self._hidden is None:
            self._hidden = hidden.new_zeros(self.inputs.max_tokens, hidden.shape[1])
        self._hidden[: kind.tokens] = hidden

    def _make_room(self) -> None:
        captured = [kind for kind, graph in self._graphs.items() if graph is not None]
        if len(captured) >= _MAX_GRAPHS:
            torch.cuda.synchronize()  # the graph may still run
            del self._graphs[captured[0]]  # captured again only if it comes twice again
