"""StepInput -> Batch: the tensors a forward pass reads. Pure bookkeeping, called once per step by executors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokenmill.kernels.host import Device, on_host
from tokenmill.runtime.executors.base import Draft, StepInput, num_prompt_logits
from tokenmill.types import Batch, ScheduledTokens


def build_batch(work: StepInput, page_size: int, device: Device, places: Sequence[int] | None = None) -> Batch:
    """`places`: of a model with recurrent layers, where the state of each slot is."""
    rows = work.rows
    decodes = not work.drafts and all(row.count == 1 for row in rows)
    arrays = _decode_arrays(work, page_size) if decodes else _arrays(work, page_size)
    token_ids, positions, starts, seq_lens, slots, tables, logit_rows = arrays
    trees = any(draft.parents is not None for draft in work.drafts.values())
    if trees:
        positions = np.concatenate([_tree_positions(row, work.drafts.get(n)) for n, row in enumerate(rows)])
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        query_starts=_tensor(starts, device),
        seq_lens=_tensor(seq_lens, device),
        slots=tuple(_tensor(each, device) for each in slots),
        block_tables=tuple(_tensor(each, device) for each in tables),
        logit_rows=_tensor(logit_rows, device),
        max_query=1 if decodes else int(np.diff(starts).max()),
        max_seq=int(seq_lens.max()),
        ancestors=_tensor(_ancestors(work), device) if trees else None,
        state_slots=None if places is None else _tensor(_state_places(rows, places), device),
        begins=() if places is None else tuple(row.state_slot for row in rows if row.start == 0),
        drafted=() if places is None else tuple(sorted(work.drafts)),
        all_hidden=work.hidden,
        adapter_slots=_adapter_slots(rows, starts, device),
    )


def _adapter_slots(rows: Sequence[ScheduledTokens], starts: np.ndarray, device: Device) -> Any:
    slots = [row.adapter_slot for row in rows]
    return _tensor(np.repeat(np.array(slots, dtype=np.int32), np.diff(starts)), device) if any(slots) else None


def _state_places(rows: Sequence[ScheduledTokens], places: Sequence[int]) -> np.ndarray:
    return np.array([places[row.state_slot] for row in rows], dtype=np.int64)


_Arrays = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray], np.ndarray
]  # token ids, positions, query starts, sequence lengths, slots and tables of each group, logit rows


def _arrays(work: StepInput, page_size: int) -> _Arrays:
    rows = work.rows
    counts = [work.length(number) for number in range(len(rows))]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    token_ids: list[int] = []
    for number in range(len(rows)):
        token_ids += work.token_ids(number)
    positions = np.concatenate(
        [np.arange(row.start, row.start + count) for row, count in zip(rows, counts, strict=True)]
    )
    dropped = np.array([row.num_dropped for row in rows], dtype=np.int32)  # keys that attention no longer counts
    seq_lens = np.array([row.start for row in rows], dtype=np.int32) + np.diff(starts) - dropped
    indices = positions - np.repeat(dropped, counts)  # in the page tables, in tokens
    tables, slots = [], []
    for group in range(len(rows[0].block_tables)):
        table = _pad([row.block_tables[group] for row in rows])
        pages = table[np.repeat(np.arange(len(rows)), counts), indices // page_size].astype(np.int64)
        slots.append(pages * page_size + indices % page_size)
        tables.append(table)
    logit_rows = np.array(_logit_rows(work, starts), dtype=np.int64)
    return np.array(token_ids, dtype=np.int64), positions, starts, seq_lens, slots, tables, logit_rows


def _decode_arrays(work: StepInput, page_size: int) -> _Arrays:
    """The same for steps of one token per row, the most frequent ones: lists are quicker here than array arithmetic."""
    rows = work.rows
    starts = [row.start for row in rows]
    indices = [row.start - row.num_dropped for row in rows]
    token_ids = [row.request.token_ids[row.start] for row in rows]
    slots, tables = [], []
    for group in range(len(rows[0].block_tables)):
        row_tables = [row.block_tables[group] for row in rows]
        slots.append(
            [
                table[index // page_size] * page_size + index % page_size
                for table, index in zip(row_tables, indices, strict=True)
            ]
        )
        tables.append(_pad(row_tables))
    wide = np.array([token_ids, starts, *slots], dtype=np.int64)
    query_starts = np.arange(len(rows) + 1, dtype=np.int32)
    if work.decodes:
        logit_rows = np.arange(len(rows), dtype=np.int64)
    else:
        logit_rows = np.array(_logit_rows(work, query_starts), dtype=np.int64)
    seq_lens = np.array(indices, dtype=np.int32) + 1
    return wide[0], wide[1], query_starts, seq_lens, list(wide[2:]), tables, logit_rows


def _tensor(array: np.ndarray, device: Device) -> Any:
    if on_host(device):
        return np.ascontiguousarray(array)
    import torch

    tensor = torch.from_numpy(array)
    # From pinned memory: the host need not wait for what the device still computes.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _logit_rows(work: StepInput, starts: np.ndarray) -> list[int]:
    """Tokens of the step whose logits are computed, in the order that StepOutput states."""
    wanted: list[int] = []
    if work.logit_ranges is not None:
        for start, offsets in zip(starts.tolist(), work.logit_ranges, strict=False):
            wanted += [start + offset for offset in offsets]
        return wanted
    for number, row in enumerate(work.rows):
        wanted += range(starts[number], starts[number] + num_prompt_logits(row))
    for number, row in enumerate(work.rows):
        if row.samples:
            end = int(starts[number + 1])
            wanted += range(end - work.num_logits(number), end)
    return wanted


def _tree_positions(row: ScheduledTokens, draft: Draft | None) -> np.ndarray:
    """The position of a node is one after its parent's, whatever its slot."""
    known = np.arange(row.start, row.start + row.count)
    depths = [] if draft is None else draft.depths()
    return np.concatenate([known, row.start + row.count + np.array(depths, dtype=np.int64)])


def _ancestors(work: StepInput) -> np.ndarray:
    """By token of the step: which tokens of its row it sees, as bits. Rows of trees have one known token."""
    masks: list[int] = []
    for number, row in enumerate(work.rows):
        draft = work.drafts.get(number, Draft())
        assert row.count == 1, "trees are verified in steps that only decode"
        own = [1]
        for node in range(len(draft.token_ids)):
            own.append(own[1 + draft.parent(node)] | 1 << (1 + node))
        masks += [mask - (1 << 64) if mask >> 63 else mask for mask in own]  # as int64
    return np.array(masks, dtype=np.int64)


def _pad(tables: list[list[int]]) -> np.ndarray:
    """[S, longest] int32, -1 where a table is shorter."""
    width = max(map(len, tables))
    if all(len(table) == width for table in tables):
        return np.array(tables, dtype=np.int32)
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for number, table in enumerate(tables):
        padded[number, : len(table)] = table
    return padded
