"""A step in pieces, so that the stages of a pipeline compute at the same time: one the first piece, another the second.

Tokens of a step are cut anywhere, also inside a prompt: a stage computes the pieces in order, and so finds the keys and
values of earlier tokens stored. Steps with trees of drafts stay whole, and those of models with recurrent layers, whose
scans round by how many tokens they see at a time. Small steps do too: reading the weights takes as long for one token
as for some tens, and would be repeated for every piece.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from tokenmill.types import Batch

MIN_TOKENS = 32  # of a piece
PIECES_PER_STAGE = 2  # with m pieces and p stages, (p - 1) / (m + p - 1) of the time is lost


def num_pieces(batch: Batch, stages: int) -> int:
    """In how many pieces a step passes the stages: rank 0 decides and tells the others."""
    whole = batch.drafted or batch.ancestors is not None or batch.state_slots is not None
    return 1 if whole else max(1, min(PIECES_PER_STAGE * stages, batch.token_ids.shape[0] // MIN_TOKENS))


def in_pieces(batch: Batch, count: int) -> list[Batch]:
    """Batches that make up this one, in order. States are cleared for the whole one; logits are read from the whole."""
    if count == 1:
        return [batch]
    tokens = batch.token_ids.shape[0]
    bounds = [tokens * number // count for number in range(count + 1)]
    return [piece(batch, begin, end) for begin, end in pairwise(bounds)]


def piece(batch: Batch, begin: int, end: int) -> Batch:
    """Tokens [begin, end) of a batch."""
    starts = batch.query_starts.tolist()
    lengths = batch.seq_lens.tolist()
    rows = [row for row in range(len(lengths)) if starts[row] < end and starts[row + 1] > begin]
    first, last = rows[0], rows[-1] + 1
    query_starts = [min(max(start, begin), end) - begin for start in starts[first : last + 1]]
    seq_lens = [lengths[row] - max(0, starts[row + 1] - end) for row in rows]
    counts = [b - a for a, b in pairwise(query_starts)]
    return Batch(
        token_ids=batch.token_ids[begin:end],
        positions=batch.positions[begin:end],
        query_starts=torch.tensor(query_starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        slots=tuple(slots[begin:end] for slots in batch.slots),
        block_tables=tuple(table[first:last] for table in batch.block_tables),
        logit_rows=batch.logit_rows[:0],
        max_query=max(counts),
        max_seq=max(seq_lens),
        adapter_slots=None if batch.adapter_slots is None else batch.adapter_slots[begin:end],
        all_hidden=True,
    )
