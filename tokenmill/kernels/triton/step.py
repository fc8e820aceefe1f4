"""The first launch of a decode step: what follows from each row's position and page table, worked out on the device.

A row's token is the host's, or the one that the step before drew for row `source` and that no host has seen yet. So a
step can be launched before the last one has ended. Called by the graph executor, inside the graph.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.launch import begin, early, options

_ROWS = 128  # of a program


@triton.jit(do_not_specialize=["count"])
def _begin(
    given_ids,
    given_positions,
    sources,
    drawn,
    table,
    ids,
    positions,
    draws,
    seq_lens,
    slots,
    count,
    table_stride,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < count
    position = tl.load(given_positions + rows, mask=ok, other=-1)
    live = ok & (position >= 0)  # -1: a row that only fills the bucket
    source = tl.load(sources + rows, mask=live, other=-1)
    own = tl.load(given_ids + rows, mask=live, other=0)
    last = tl.load(drawn + source, mask=live & (source >= 0), other=0)
    tl.store(ids + rows, tl.where(source >= 0, last, own), mask=ok)
    tl.store(positions + rows, tl.maximum(position, 0), mask=ok)
    tl.store(draws + rows, position + 1, mask=ok)
    tl.store(seq_lens + rows, (position + 1).to(tl.int32), mask=ok)
    page = tl.load(table + rows.to(tl.int64) * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots + rows, tl.where(live & (page >= 0), page * PAGE + position % PAGE, -1), mask=ok)


def begin_step(
    given: Tensor,
    drawn: Tensor,
    table: Tensor,
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    draws: Tensor,
    seq_lens: Tensor,
    slots: Tensor,
) -> None:
    """given int64 [3, R]: token ids, positions (-1: no row), sources (a row of `drawn`, or -1); table int32 [R, pages].
    Fills ids, positions, draws (position of the token to be drawn), seq_lens int32 and slots, all [R]."""
    count = ids.shape[0]
    _begin[(triton.cdiv(count, _ROWS),)](
        given[0],
        given[1],
        given[2],
        drawn,
        table,
        ids,
        positions,
        draws,
        seq_lens,
        slots,
        count,
        table.stride(0),
        PAGE=page_size,
        BLOCK=_ROWS,
        PDL=early(ids.device),
        **options(ids.device, 4, 1),
    )
