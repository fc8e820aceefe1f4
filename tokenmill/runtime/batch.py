"""StepPlan -> Batch: the tensors a forward pass reads. Pure bookkeeping; called once per step by the runner."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.types import Batch, ScheduledTokens, StepPlan


def build_batch(plan: StepPlan, page_size: int, where: torch.device) -> Batch:
    rows = plan.scheduled
    counts = [row.count for row in rows]
    starts = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    token_ids: list[int] = []
    for row in rows:
        token_ids += row.request.token_ids[row.start : row.start + row.count]
    positions = np.concatenate([np.arange(row.start, row.start + row.count) for row in rows])
    seq_lens = np.array([row.start + row.count for row in rows], dtype=np.int32)

    block_tables, slots = [], []
    for group in range(len(rows[0].block_tables)):
        table = _pad([row.block_tables[group] for row in rows])
        pages = table[np.repeat(np.arange(len(rows)), counts), positions // page_size].astype(np.int64)
        slots.append(torch.from_numpy(pages * page_size + positions % page_size).to(where))
        block_tables.append(torch.from_numpy(table).to(where))
    return Batch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=where),
        positions=torch.from_numpy(positions).to(where),
        query_starts=torch.from_numpy(starts).to(where),
        seq_lens=torch.from_numpy(seq_lens).to(where),
        slots=tuple(slots),
        block_tables=tuple(block_tables),
        logit_rows=torch.tensor(_logit_rows(rows, starts), dtype=torch.int64, device=where),
        max_query=max(counts),
        max_seq=int(seq_lens.max()),
    )


def prompt_rows(row: ScheduledTokens) -> int:
    """How many leading tokens of the row need logits because the caller asked for prompt log-probabilities: each
    predicts the prompt token after it, so the last prompt token needs none."""
    if row.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(row.count, len(row.request.prompt_ids) - 1 - row.start))


def _logit_rows(rows: list[ScheduledTokens], starts: np.ndarray) -> list[int]:
    """Prompt rows of all sequences first, then the last row of each that samples."""
    wanted: list[int] = []
    for number, row in enumerate(rows):
        wanted += range(starts[number], starts[number] + prompt_rows(row))
    wanted += [int(starts[number + 1]) - 1 for number, row in enumerate(rows) if row.samples]
    return wanted


def _pad(tables: list[list[int]]) -> np.ndarray:
    """[S, longest] int32, -1 where a table is shorter."""
    width = max(len(table) for table in tables)
    padded = np.full((len(tables), width), -1, dtype=np.int32)
    for number, table in enumerate(tables):
        padded[number, : len(table)] = table
    return padded
