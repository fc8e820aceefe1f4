"""What a captured decode step reads and writes: buffers that never move.

A step's inputs are the token of each row (or the row of the step before that samples it), its position and its page
table; the rest is computed on the device. Tokens and positions are read, and sampled ids written, by the kernels
themselves in pinned memory; tables and sampling parameters are copied when they changed. Owned by the graph executor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels import triton as gpu
from tokenmill.runtime.executors.cuda.checks import Tables
from tokenmill.runtime.executors.cuda.prefix_runs import MAX_RUNS, find_runs
from tokenmill.runtime.executors.cuda.sampling import cutoffs, is_filtered, seed, top_k
from tokenmill.types import Batch, Request, ScheduledTokens

# Pinned memory is a ring of three slots, one per step. Two steps can be unfinished while the host fills a third: a
# queued step that was dropped may still run, the step that replaced it waits behind it, and the one after that is being
# filled. When a slot comes round again, the host has waited for the step that used it or for a later one. The device
# advances its own index into the ring (`begin_step`), because a captured graph cannot be told which slot is next.
_RING_SLOTS = 3
_BEYOND_ROWS = 1 << 30  # where runs of rows begin that are not there


class DecodeInputs:
    def __init__(self, layout: KVLayout, max_rows: int, context: int, device: torch.device) -> None:
        self._page_size, self._device = layout.page_size, device
        width, groups = -(-context // layout.page_size) + 1, len(layout.groups)
        self.capacity = width * layout.page_size  # tokens that a table reaches

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        # Token ids, positions, sources: from the host, or from the step before if that computes drafts.
        self._host_inputs = _pinned(device, _RING_SLOTS, 3, max_rows)
        self._device_inputs = zeros(3, max_rows)
        self._sampled_ring = _pinned(device, _RING_SLOTS, max_rows)  # sampled ids
        self._ring_index = zeros(1, dtype=torch.int32)  # the slot of the step that runs
        self._slot_numbers = _pinned(device, _RING_SLOTS, dtype=torch.int32)
        self._slot_numbers.copy_(torch.arange(_RING_SLOTS))
        self._tables = [zeros(max_rows, width, dtype=torch.int32) for _ in range(groups)]
        self._floats = zeros(3, max_rows, dtype=torch.float32)  # temperature, top-p, min-p
        self._top_k = zeros(max_rows, dtype=torch.int32)
        self._seeds = zeros(max_rows)
        self._runs = zeros(MAX_RUNS, 3, dtype=torch.int32)  # of rows with a shared prefix: first, past, its tokens
        self._shared_tokens = zeros(max_rows, dtype=torch.int32)  # by row: tokens of the prefix that it shares
        self._ids, self._positions, self._sample_positions = zeros(max_rows), zeros(max_rows), zeros(max_rows)
        self._seq_lens = zeros(max_rows, dtype=torch.int32)
        self._slots = [zeros(max_rows) for _ in range(groups)]
        self._starts = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self.sampled = zeros(max_rows)
        # Of recurrent layers, by row: where states are read and written; -1: a padding row, which has none.
        self._has_states = bool(layout.states)
        self._state_slots = zeros(2, max_rows).fill_(-1)
        self._sent_states = self._next_states = self._padded_states([], [])
        # By row: the slot of its adapter, 0: none.
        self._adapter_slots = zeros(max_rows, dtype=torch.int32)
        self._sent_adapters: list[int] = []
        self._next_adapters: list[int] = []
        self._host_arrays = self._host_inputs.numpy()
        self._slot = 0  # of the step that was filled last
        self._host_buffers = [_HostBuffers(self, device) for _ in range(_RING_SLOTS)]
        # By KV group and row: the page table on the device, as a list and as the padded array it was sent from.
        self.device_tables: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in range(groups)]
        self._table_arrays = [np.zeros((max_rows, width), dtype=np.int32) for _ in range(groups)]
        self._requests: list[Request] = []
        full = [number for number, group in enumerate(layout.groups) if group.kind != "sliding"]
        self._full_group = full[0] if len(full) == 1 else -1  # the KV group in which shared prefixes are found
        self.drafts = zeros(0, 0)  # [rows, depth] of steps that compute drafts; allocated by `prepare_drafts`
        self._owners = zeros(0, dtype=torch.int32)
        self.filtered = False
        self.prefixes = 0  # entries of `_runs` that a step has to look at: none, one or all

    @property
    def copied_buffers(self) -> tuple[Tensor, ...]:
        """Device buffers that are copied from pinned memory."""
        return (
            *self._tables,
            self._floats,
            self._top_k,
            self._seeds,
            self._runs,
            self._shared_tokens,
            self._state_slots,
            self._adapter_slots,
        )

    def fill(
        self,
        requests: Sequence[Request],
        tables: Sequence[Tables],
        ids: list[int],
        positions: list[int],
        sources: list[int],
    ) -> None:
        """Write the inputs of the next step, which must then run exactly once. `sources`: by row, the row of the step
        before that samples its token; -1: the token is in `ids`."""
        rows = len(requests)
        buffers = self._next_slot(device_in_step=sources[0] >= 0)
        host = self._host_arrays[self._slot]
        host[1] = gpu.PADDING_POSITION
        host[:, :rows] = (ids, positions, sources)
        changed = self._update_tables(tables, rows)
        for group in changed:
            buffers.array(self._tables[group])[:rows] = self._table_arrays[group][:rows]
            buffers.send(self._tables[group], rows)
        same_requests = self._requests == requests
        if not same_requests:
            self._send_parameters(buffers, requests)
        if changed or not same_requests:
            self._find_shared_prefixes(buffers, tables, positions)
        self._send_states(buffers)
        self._send_adapters(buffers)

    def set_states(self, slots: list[int], targets: list[int]) -> None:
        """Before `fill`, of a model with recurrent layers: where the state of each row is read and written."""
        self._next_states = self._padded_states(slots, targets)

    def _padded_states(self, slots: list[int], targets: list[int]) -> list[list[int]]:
        padding = [-1] * (self._state_slots.shape[1] - len(slots))
        return [slots + padding, targets + padding]

    def _send_states(self, buffers: _HostBuffers) -> None:
        if self._sent_states != self._next_states:
            buffers.array(self._state_slots)[:] = self._next_states
            buffers.send(self._state_slots)
            self._sent_states = self._next_states

    def set_adapters(self, slots: list[int]) -> None:
        """Before `fill`: the adapter slot of each row; rows after these have none."""
        self._next_adapters = slots if any(slots) else []

    def _send_adapters(self, buffers: _HostBuffers) -> None:
        if self._sent_adapters != self._next_adapters:
            array = buffers.array(self._adapter_slots)
            array[:] = 0
            array[: len(self._next_adapters)] = self._next_adapters
            buffers.send(self._adapter_slots)
            self._sent_adapters = self._next_adapters

    @property
    def adapted(self) -> bool:
        """Whether a row of the step that was filled last has an adapter."""
        return bool(self._sent_adapters)

    def longest_first(self, rows: Sequence[ScheduledTokens]) -> list[int]:
        """The order in which rows are best computed: attention takes them one after the other, and long ones at the end
        would leave most of the GPU idle. Rows with the same first page stay adjacent, for `find_runs`."""
        firsts = [row.block_tables[self._full_group][0] for row in rows]
        counts = Counter(firsts) if self.can_share else {}
        shared = [first if counts.get(first, 1) > 1 else -1 for first in firsts]
        return sorted(range(len(rows)), key=lambda number: (shared[number], -rows[number].start))

    @property
    def can_share(self) -> bool:
        return self._full_group >= 0

    def clear(self) -> None:
        """Inputs of a step of padding rows only, to be run exactly once: it stores no keys or values."""
        buffers = self._next_slot(device_in_step=False)
        self._host_arrays[self._slot][:] = gpu.PADDING_POSITION
        for buffer in (self._runs, self._shared_tokens, self._floats):
            buffers.array(buffer)[:] = 0
            buffers.send(buffer)
        self.set_states([], [])
        self._send_states(buffers)
        self.set_adapters([])
        self._send_adapters(buffers)
        self._requests = []

    def _next_slot(self, device_in_step: bool) -> _HostBuffers:
        """`device_in_step`: the step filled last has run exactly once, so the device's ring index is right already."""
        if not device_in_step:
            self._ring_index.copy_(self._slot_numbers[self._slot : self._slot + 1], non_blocking=True)
        self._slot = (self._slot + 1) % _RING_SLOTS
        return self._host_buffers[self._slot]

    def _update_tables(self, tables: Sequence[Tables], rows: int) -> list[int]:
        """Take over the tables of all rows; returns the KV groups that must be sent to the device."""
        changed = []
        for group, on_device in enumerate(self.device_tables):
            array, differs = self._table_arrays[group], False
            for row in range(rows):
                table = tables[row][group]
                if on_device[row] != table:
                    differs = True
                    on_device[row] = list(table)
                    array[row, : len(table)] = table
            if differs:
                changed.append(group)
        return changed

    def _send_parameters(self, buffers: _HostBuffers, requests: Sequence[Request]) -> None:
        rows = len(requests)
        self._requests = list(requests)
        buffers.array(self._floats)[:, :rows] = np.array([cutoffs(request) for request in requests], dtype=np.float32).T
        buffers.array(self._top_k)[:rows] = [top_k(request) for request in requests]
        buffers.array(self._seeds)[:rows] = [seed(request) for request in requests]
        for buffer in (self._floats, self._top_k, self._seeds):
            buffers.send(buffer)
        self.filtered = any(is_filtered(request) for request in requests)

    def _find_shared_prefixes(self, buffers: _HostBuffers, tables: Sequence[Tables], positions: Sequence[int]) -> None:
        """Send which runs of rows begin with the same pages, and how many tokens that is."""
        runs = []
        if self._full_group >= 0:
            runs = find_runs([table[self._full_group] for table in tables], positions, self._page_size)
        self.prefixes = len(runs) if len(runs) < 2 else MAX_RUNS
        if not runs:
            return
        array, by_row = buffers.array(self._runs), buffers.array(self._shared_tokens)
        array[:], by_row[:] = (_BEYOND_ROWS, 0, 0), 0
        array[: len(runs)] = runs
        for run in runs:
            by_row[run.first : run.past] = run.tokens
        buffers.send(self._runs)
        buffers.send(self._shared_tokens)

    # --- drafts that the step itself computes ---

    def prepare_drafts(self, depth: int) -> None:
        rows = self.sampled.shape[0]
        self.drafts = torch.zeros(rows, depth, dtype=torch.int64, device=self._device)
        self._owners = torch.zeros(rows, dtype=torch.int32, device=self._device)
        for buffers in self._host_buffers:
            buffers.add(self.drafts)
            buffers.add(self._owners)

    def set_owners(self, owners: list[int]) -> None:
        """After `fill`. `owners`: the first row of each row's sequence; -1 if the sequence has fewer than depth + 1
        rows."""
        buffers = self._host_buffers[self._slot]
        array = buffers.array(self._owners)
        array[:] = -1
        array[: len(owners)] = owners
        buffers.send(self._owners)

    def fill_from_device(self, tables: Sequence[Tables]) -> None:
        """Instead of `fill`, where the step before computes ids and positions of the same rows (`compute_next`)."""
        buffers = self._next_slot(device_in_step=True)
        self._host_arrays[self._slot][1] = gpu.POSITION_ON_DEVICE
        for group in self._update_tables(tables, len(tables)):
            buffers.array(self._tables[group])[: len(tables)] = self._table_arrays[group][: len(tables)]
            buffers.send(self._tables[group], len(tables))

    def compute_next(self, rows: int, drafts: Tensor) -> None:
        """Keep the drafts [rows, depth] and compute the inputs of the next step: the last launch of a step with a draft
        head. Safe to capture."""
        self.drafts[:rows] = drafts
        gpu.follow_drafts(
            self.sampled,
            self._ids[:rows],
            self._positions[:rows],
            self._owners,
            self.drafts,
            self._device_inputs[:, :rows],
        )

    # --- used inside the step ---

    def begin(self, rows: int, adapted: bool = False) -> Batch:
        """The first launches of a step of `rows` rows, and its batch. `adapted`: rows may have adapters. Safe to
        capture."""
        gpu.begin_step(
            self._host_inputs,
            self._ring_index,
            self._device_inputs if self.drafts.numel() else None,
            self.sampled,
            self._tables,
            self._page_size,
            self._ids[:rows],
            self._positions[:rows],
            self._sample_positions[:rows],
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
            state_slots=self._state_slots[0, :rows] if self._has_states else None,
            state_targets=self._state_slots[1, :rows] if self._has_states else None,
            adapter_slots=self._adapter_slots[:rows] if adapted else None,
        )

    def shared(self, prefixes: int) -> gpu.SharedPrefixes | None:
        if not prefixes:
            return None
        return gpu.SharedPrefixes(self._runs[:prefixes], self._shared_tokens, self.capacity)

    def sampling(self, rows: int, filtered: bool) -> gpu.SamplingTensors:
        floats = self._floats[:, :rows]
        return gpu.SamplingTensors(
            floats[0],
            self._top_k[:rows],
            floats[1],
            floats[2],
            self._seeds[:rows],
            self._sample_positions[:rows],
            filtered,
        )

    @property
    def token_ring(self) -> gpu.TokenRing:
        """Pinned memory that the step also writes the sampled ids to."""
        return gpu.TokenRing(self._sampled_ring, self._ring_index)

    def receive(self, guesses: bool = False) -> tuple[Tensor, Tensor | None, torch.cuda.Event | None]:
        """The sampled ids [max rows] and the drafts [max rows, depth], both pinned: to be read once the event has
        happened."""
        buffers = self._host_buffers[self._slot]
        drafts = buffers.fetch(self.drafts) if guesses else None
        return self._sampled_ring[self._slot], drafts, buffers.record_event()


def _pinned(device: torch.device, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Host memory that the device can read and write."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


class _HostBuffers:
    """One slot of the ring: a pinned copy of every device buffer that the host writes to or reads from."""

    def __init__(self, inputs: DecodeInputs, device: torch.device) -> None:
        self._device = device
        self._pinned = {
            id(buffer): _pinned(device, *buffer.shape, dtype=buffer.dtype) for buffer in inputs.copied_buffers
        }
        self._arrays = {key: pinned.numpy() for key, pinned in self._pinned.items()}
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def array(self, buffer: Tensor) -> np.ndarray:
        return self._arrays[id(buffer)]

    def send(self, buffer: Tensor, rows: int | None = None) -> None:
        buffer[:rows].copy_(self._pinned[id(buffer)][:rows], non_blocking=True)

    def add(self, buffer: Tensor) -> None:
        pinned = _pinned(self._device, *buffer.shape, dtype=buffer.dtype)
        self._pinned[id(buffer)], self._arrays[id(buffer)] = pinned, pinned.numpy()

    def fetch(self, buffer: Tensor) -> Tensor:
        pinned = self._pinned[id(buffer)]
        pinned.copy_(buffer, non_blocking=True)
        return pinned

    def record_event(self) -> torch.cuda.Event | None:
        if self._event is not None:
            self._event.record()
        return self._event
