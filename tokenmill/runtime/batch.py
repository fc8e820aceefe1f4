"""StepPlan -> Batch: the tensors a forward pass reads. Pure bookkeeping; called once per step by the runner."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.types import Batch, ScheduledTokens, StepPlan


def build_batch(plan: StepPlan, page_size: int, device: torch.device) -> Batch:
    rows = plan.scheduled
    decodes = all(row.length == 1 for row in rows)
    arrays = _decode_arrays(rows, page_size) if decodes else _arrays(rows, page_size)
    token_ids, positions, starts, seq_lens, slots, tables, logit_rows = arrays
    return Batch(
        token_ids=_tensor(token_ids, device),
        positions=_tensor(positions, device),
        query_starts=_tensor(starts, device),
        seq_lens=_tensor(seq_lens, device),
        slots=tuple(_tensor(each, device) for each in slots),
        block_tables=tuple(_tensor(each, device) for each in tables),
        logit_rows=_tensor(logit_rows, device),
        max_query=1 if decodes else max(row.length for row in rows),
        max_seq=int(seq_lens.max()),
    )


_Arrays = tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, list[np.ndarray], list[np.ndarray], np.ndarray
]  # token ids, positions, query starts, sequence lengths, slots and tables of each group, logit rows


def _arrays(rows: list[ScheduledTokens], page_size: int) -> _Arrays:
    counts = [row.length for row in rows]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    token_ids: list[int] = []
    for row in rows:
        token_ids += row.request.token_ids[row.start : row.start + row.count]
        token_ids += row.draft_ids
    positions = np.concatenate([np.arange(row.start, row.start + row.length) for row in rows])
    dropped = np.array([row.num_dropped for row in rows], dtype=np.int32)  # keys that attention no longer counts
    seq_lens = np.array([row.start + row.length for row in rows], dtype=np.int32) - dropped
    places = positions - np.repeat(dropped, counts)
    tables, slots = [], []
    for group in range(len(rows[0].block_tables)):
        table = _pad([row.block_tables[group] for row in rows])
        pages = table[np.repeat(np.arange(len(rows)), counts), places // page_size].astype(np.int64)
        slots.append(pages * page_size + places % page_size)
        tables.append(table)
    logit_rows = np.array(_logit_rows(rows, starts), dtype=np.int64)
    return np.array(token_ids, dtype=np.int64), positions, starts, seq_lens, slots, tables, logit_rows


def _decode_arrays(rows: list[ScheduledTokens], page_size: int) -> _Arrays:
    """The same where every row is one token: lists are quicker than array arithmetic, and this is most steps."""
    starts = [row.start for row in rows]
    places = [row.start - row.num_dropped for row in rows]
    token_ids = [row.request.token_ids[row.start] for row in rows]
    slots, tables = [], []
    for group in range(len(rows[0].block_tables)):
        own = [row.block_tables[group] for row in rows]
        slots.append(
            [
                table[place // page_size] * page_size + place % page_size
                for table, place in zip(own, places, strict=True)
            ]
        )
        tables.append(_pad(own))
    wide = np.array([token_ids, starts, *slots], dtype=np.int64)
    query_starts = np.arange(len(rows) + 1, dtype=np.int32)
    if all(row.samples for row in rows) and all(row.request.params.prompt_logprobs is None for row in rows):
        logit_rows = np.arange(len(rows), dtype=np.int64)
    else:
        logit_rows = np.array(_logit_rows(rows, query_starts), dtype=np.int64)
    seq_lens = np.array(places, dtype=np.int32) + 1
    return wide[0], wide[1], query_starts, seq_lens, list(wide[2:]), tables, logit_rows


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # From pinned memory: the host need not wait for what the device still computes.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def prompt_rows(row: ScheduledTokens) -> int:
    """How many leading tokens of the row need logits because the caller asked for prompt log-probabilities: each
    predicts the prompt token after it, so the last prompt token needs none."""
    if row.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(row.count, len(row.request.prompt_ids) - 1 - row.start))


def _logit_rows(rows: list[ScheduledTokens], starts: np.ndarray) -> list[int]:
    """Prompt rows of all sequences first, then of each that samples the last known token and its drafts."""
    wanted: list[int] = []
    for number, row in enumerate(rows):
        wanted += range(starts[number], starts[number] + prompt_rows(row))
    for number, row in enumerate(rows):
        if row.samples:
            end = int(starts[number + 1])
            wanted += range(end - 1 - len(row.draft_ids), end)
    return wanted


def _pad(tables: list[list[int]]) -> np.ndarray:
    """[S, longest] int32, -1 where a table is shorter."""
    width = max(map(len, tables))
    if all(len(table) == width for table in tables):
        return np.array(tables, dtype=np.int32)
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for number, table in enumerate(tables):
        padded[number, : len(table)] = table
    return padded
