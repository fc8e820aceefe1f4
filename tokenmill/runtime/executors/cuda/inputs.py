"""What a captured decode step reads and writes: buffers that never move.

A step's inputs are each row's token (or which row of the step before drew it), its position and its page table; the
rest is worked out on the device. Tokens and positions are read, and drawn ids written, by the kernels themselves in
pinned memory; tables and sampling parameters are copied when they changed. Pinned memory has three turns: while one
step computes and the next is queued, a third can be written. Owned by the graph executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels import triton as gpu
from tokenmill.runtime.executors.cuda.checks import Tables
from tokenmill.runtime.executors.cuda.sampling import cutoffs, is_filtered, seed, top_k
from tokenmill.types import Batch, Request, ScheduledTokens

_TURNS = 3
_WORTHWHILE = 16384  # key reads that a shared prefix must save per layer to pay for two more launches


class DecodeInputs:
    def __init__(self, layout: KVLayout, max_rows: int, context: int, device: torch.device) -> None:
        self._page_size, self._device = layout.page_size, device
        width, groups = -(-context // layout.page_size) + 1, len(layout.groups)
        self.capacity = width * layout.page_size  # tokens that a table reaches

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Token ids, positions, sources: the host's, and what a step that guesses has worked out for the next one.
        self._given = _pinned(device, _TURNS, 3, max_rows)
        self._followed = zeros(3, max_rows)
        self._echo = _pinned(device, _TURNS, max_rows)  # drawn ids
        self._counted = zeros(1, dtype=torch.int32)  # the turn of the step that runs
        self._counts = _pinned(device, _TURNS, dtype=torch.int32)
        self._counts.copy_(torch.arange(_TURNS))
        self._tables = [zeros(max_rows, width, dtype=torch.int32) for _ in range(groups)]
        self._floats = zeros(3, max_rows, dtype=torch.float32)  # temperature, top-p, min-p
        self._top_k = zeros(max_rows, dtype=torch.int32)
        self._seeds = zeros(max_rows)
        self._bounds = zeros(3, dtype=torch.int32)
        self._ids, self._positions, self._draws = zeros(max_rows), zeros(max_rows), zeros(max_rows)
        self._seq_lens = zeros(max_rows, dtype=torch.int32)
        self._slots = [zeros(max_rows) for _ in range(groups)]
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.drawn = zeros(max_rows)
        self._given_arrays = self._given.numpy()
        self._turn = 0
        self._turns = [_Turn(self, device) for _ in range(_TURNS)]
        self._known: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in range(groups)]
        self._content = [np.zeros((max_rows, width), dtype=np.int32) for _ in range(groups)]
        self._requests: list[Request] = []
        full = [number for number, group in enumerate(layout.groups) if group.kind != "sliding"]
        self._full_group = full[0] if len(full) == 1 else -1  # whose pages a shared prefix is looked for in
        self.guessed = zeros(0, 0)  # [rows, depth] in steps that also guess; `prepare_drafts` makes room
        self._owners = zeros(0, dtype=torch.int32)
        self.filtered = False
        self.shared_tokens = 0  # in common of the rows in bounds

    @property
    def shapes(self) -> tuple[Tensor, ...]:
        """The buffers that have a twin in pinned memory."""
        return (*self._tables, self._floats, self._top_k, self._seeds, self._bounds)

    def fill(
        self,
        requests: Sequence[Request],
        tables: Sequence[Tables],
        ids: list[int],
        positions: list[int],
        sources: list[int],
    ) -> None:
        """Make ready for a step of these rows, run once; a source of -1 takes the token id given here."""
        rows = len(requests)
        turn = self._next_turn(counted=sources[0] >= 0)
        given = self._given_arrays[self._turn]
        given[1] = gpu.PADDING_POSITION
        given[:, :rows] = (ids, positions, sources)
        changed = self._update_tables(tables, rows)
        for group in changed:
            turn.array(self._tables[group])[:rows] = self._content[group][:rows]
            turn.send(self._tables[group], rows)
        same = self._requests == requests
        if not same:
            self._send_parameters(turn, requests)
        if changed or not same:
            self._share(turn, tables, min(positions))

    def longest_first(self, rows: Sequence[ScheduledTokens]) -> list[int]:
        """The order in which rows are best computed: attention takes them one after the other, and long ones at the end
        would leave most of the chip idle. Rows that begin with the same page stay together, for `_share`."""
        firsts = [row.block_tables[self._full_group][0] for row in rows]
        times = Counter(firsts) if self.can_share else {}
        shared = [first if times.get(first, 1) > 1 else -1 for first in firsts]
        return sorted(range(len(rows)), key=lambda number: (shared[number], -rows[number].start))

    @property
    def can_share(self) -> bool:
        return self._full_group >= 0

    def clear(self) -> None:
        """A step without rows, run once: nothing is read but padding, nothing stored."""
        turn = self._next_turn(counted=False)
        self._given_arrays[self._turn][:] = gpu.PADDING_POSITION
        turn.array(self._bounds)[:] = 0
        turn.array(self._floats)[:] = 0.0
        for each in (self._bounds, self._floats):
            turn.send(each)
        self._requests = []

    def _next_turn(self, counted: bool) -> _Turn:
        """`counted`: the step before is known to have run as often as it was made ready, so the device is in step."""
        if not counted:
            self._counted.copy_(self._counts[self._turn : self._turn + 1], non_blocking=True)
        self._turn = (self._turn + 1) % _TURNS
        return self._turns[self._turn]

    def _update_tables(self, tables: Sequence[Tables], rows: int) -> list[int]:
        changed = []
        for group, known in enumerate(self._known):
            content, differs = self._content[group], False
            for row in range(rows):
                table = tables[row][group]
                if known[row] != table:
                    differs = True
                    known[row] = list(table)
                    content[row, : len(table)] = table
            if differs:
                changed.append(group)
        return changed

    def _send_parameters(self, turn: _Turn, requests: Sequence[Request]) -> None:
        rows = len(requests)
        self._requests = list(requests)
        turn.array(self._floats)[:, :rows] = np.array([cutoffs(request) for request in requests], dtype=np.float32).T
        turn.array(self._top_k)[:rows] = [top_k(request) for request in requests]
        turn.array(self._seeds)[:rows] = [seed(request) for request in requests]
        for each in (self._floats, self._top_k, self._seeds):
            turn.send(each)
        self.filtered = any(is_filtered(request) for request in requests)

    def _share(self, turn: _Turn, tables: Sequence[Tables], first: int) -> None:
        """The longest run of rows with the same first page, and how many leading pages they have in common. Pages from
        position `first` on are written in this step, by several rows of one sequence perhaps: they are not shared."""
        self.shared_tokens = 0
        if self._full_group < 0 or len(tables) < 2:
            return
        own = [table[self._full_group] for table in tables]
        runs = [[row for row, _ in run] for _, run in groupby(enumerate(own), key=lambda pair: pair[1][0])]
        rows = max(runs, key=len)
        low, high = (pick(own[row] for row in rows) for pick in (min, max))
        common = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
        tokens = min(common, first // self._page_size) * self._page_size
        if (len(rows) - 1) * tokens < _WORTHWHILE:
            return
        self.shared_tokens = tokens
        turn.array(self._bounds)[:] = (rows[0], rows[-1] + 1, tokens)
        turn.send(self._bounds)

    # --- drafts that are guessed by the step itself ---

    def prepare_drafts(self, depth: int) -> None:
        rows = self.drawn.shape[0]
        self.guessed = torch.zeros(rows, depth, dtype=torch.int64, device=self._device)
        self._owners = torch.zeros(rows, dtype=torch.int32, device=self._device)
        for turn in self._turns:
            turn.add(self.guessed)
            turn.add(self._owners)

    @property
    def known_tables(self) -> list[list[list[int]]]:
        """By group and row: what the device has."""
        return self._known

    def own(self, owners: list[int]) -> None:
        """After `fill`: the first row of each row's sequence; -1 where it has not a row for every draft."""
        turn = self._turns[self._turn]
        array = turn.array(self._owners)
        array[:] = -1
        array[: len(owners)] = owners
        turn.send(self._owners)

    def fill_from_device(self, tables: Sequence[Tables]) -> None:
        """Instead of `fill`, where the step before has worked out ids and positions of the same rows (`follow`)."""
        turn = self._next_turn(counted=True)
        self._given_arrays[self._turn][1] = gpu.POSITION_ON_DEVICE
        for group in self._update_tables(tables, len(tables)):
            turn.array(self._tables[group])[: len(tables)] = self._content[group][: len(tables)]
            turn.send(self._tables[group], len(tables))

    def follow(self, rows: int, guessed: Tensor) -> None:
        """The last launch of a step that guesses. Safe to capture."""
        self.guessed[:rows] = guessed
        gpu.follow_drafts(
            self.drawn, self._ids[:rows], self._positions[:rows], self._owners, self.guessed, self._followed[:, :rows]
        )

    # --- what the step itself uses ---

    def begin(self, rows: int) -> Batch:
        """The first launches of a step of `rows` rows, and its batch. Safe to capture."""
        gpu.begin_step(
            self._given,
            self._counted,
            self._followed if self.guessed.numel() else None,
            self.drawn,
            self._tables,
            self._page_size,
            self._ids[:rows],
            self._positions[:rows],
            self._draws[:rows],
            self._seq_lens[:rows],
            self._slots,
        )
        return Batch(
            token_ids=self._ids[:rows],
            positions=self._positions[:rows],
            query_starts=self._starts[: rows + 1],
            seq_lens=self._seq_lens[:rows],
            slots=tuple(slots[:rows] for slots in self._slots),
            block_tables=tuple(table[:rows] for table in self._tables),
            logit_rows=self._starts[:0],
            max_query=1,
            max_seq=self.capacity,
        )

    def shared(self, any_shared: bool) -> gpu.SharedPrefix | None:
        return gpu.SharedPrefix(self._bounds, self.capacity) if any_shared else None

    def sampling(self, rows: int, filtered: bool) -> gpu.SamplingTensors:
        floats = self._floats[:, :rows]
        return gpu.SamplingTensors(
            floats[0], self._top_k[:rows], floats[1], floats[2], self._seeds[:rows], self._draws[:rows], filtered
        )

    @property
    def echo(self) -> gpu.TokenRing:
        """Where the step writes the drawn ids besides."""
        return gpu.TokenRing(self._echo, self._counted)

    def receive(self, guesses: bool = False) -> tuple[Tensor, Tensor | None, torch.cuda.Event | None]:
        """The drawn ids, and a copy of what was guessed, for the host: to be read once the event has happened."""
        turn = self._turns[self._turn]
        guessed = turn.fetch(self.guessed) if guesses else None
        return self._echo[self._turn], guessed, turn.mark()


def _pinned(device: torch.device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Memory of the host that the device can read and write."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class _Turn:
    """One set of pinned twins of the input buffers."""

    def __init__(self, inputs: DecodeInputs, device: torch.device) -> None:
        self._device = device
        self._twins = {id(each): _pinned(device, *each.shape, dtype=each.dtype) for each in inputs.shapes}
        self._arrays = {number: twin.numpy() for number, twin in self._twins.items()}
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def array(self, buffer: Tensor) -> np.ndarray:
        return self._arrays[id(buffer)]

    def send(self, buffer: Tensor, rows: int | None = None) -> None:
        buffer[:rows].copy_(self._twins[id(buffer)][:rows], non_blocking=True)

    def add(self, buffer: Tensor) -> None:
        twin = _pinned(self._device, *buffer.shape, dtype=buffer.dtype)
        self._twins[id(buffer)], self._arrays[id(buffer)] = twin, twin.numpy()

    def fetch(self, buffer: Tensor) -> Tensor:
        twin = self._twins[id(buffer)]
        twin.copy_(buffer, non_blocking=True)
        return twin

    def mark(self) -> torch.cuda.Event | None:
        if self._event is not None:
            self._event.record()
        return self._event
