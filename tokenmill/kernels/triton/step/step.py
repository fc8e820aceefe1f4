"""The first launch of a decode step: what follows from each row's position and page table, worked out on the device.

What the host gives lies in its own memory, where this kernel reads it: a copy between two steps would cost the device
more than the read. There are several turns of it; the device counts them, so that a captured step needs no new
addresses. A row's token is the host's, or the one that the step before drew for row `source` and that no host has seen
yet. So a step can be launched before the last one has ended. Called by the graph executor, inside the graph.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.launch import begin, early, options, power_of_two

NO_ROW = -1  # instead of a position: a row that only fills the bucket
FOLLOWS = -2  # instead of a position: what the step before has worked out for this row

_FOLLOWS = tl.constexpr(FOLLOWS)


@triton.jit
def store_slots(table, slots, rows, position, live, ok, table_stride, PAGE: tl.constexpr):
    page = tl.load(table + rows.to(tl.int64) * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots + rows, tl.where(live & (page >= 0), page * PAGE + position % PAGE, -1), mask=ok)


@triton.jit(do_not_specialize=["count", "given_stride", "followed_stride"])
def _begin(
    given,
    turn,
    followed,
    drawn,
    table,
    ids,
    positions,
    draws,
    seq_lens,
    slots,
    count,
    given_stride,
    followed_stride,
    table_stride,
    TURNS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all rows: it alone knows when all have read `turn`."""
    begin(PDL)
    now = (tl.load(turn) + 1) % TURNS
    rows = tl.arange(0, BLOCK)
    ok = rows < count
    # Volatile: the host may have written since the last read.
    place = given + now * 3 * given_stride + rows
    own = tl.load(place, mask=ok, other=0, volatile=True)
    position = tl.load(place + given_stride, mask=ok, other=-1, volatile=True)
    source = tl.load(place + 2 * given_stride, mask=ok, other=-1, volatile=True)
    if followed is not None:
        follows = ok & (position == _FOLLOWS)
        own = tl.where(follows, tl.load(followed + rows, mask=follows, other=0), own)
        position = tl.where(follows, tl.load(followed + followed_stride + rows, mask=follows, other=-1), position)
        source = tl.where(follows, tl.load(followed + 2 * followed_stride + rows, mask=follows, other=-1), source)
    live = ok & (position >= 0)
    last = tl.load(drawn + source, mask=live & (source >= 0), other=0)
    tl.store(ids + rows, tl.where(live, tl.where(source >= 0, last, own), 0), mask=ok)
    tl.store(positions + rows, tl.maximum(position, 0), mask=ok)
    tl.store(draws + rows, position + 1, mask=ok)
    tl.store(seq_lens + rows, (position + 1).to(tl.int32), mask=ok)
    store_slots(table, slots, rows, position, live, ok, table_stride, PAGE)
    tl.debug_barrier()
    tl.store(turn, now)


@triton.jit(do_not_specialize=["count"])
def _place(seq_lens, table, slots, count, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    rows = tl.arange(0, BLOCK)
    ok = rows < count
    position = tl.load(seq_lens + rows, mask=ok, other=0).to(tl.int64) - 1
    store_slots(table, slots, rows, position, ok & (position >= 0), ok, table_stride, PAGE)


def begin_step(
    given: Tensor,
    turn: Tensor,
    followed: Tensor | None,
    drawn: Tensor,
    tables: list[Tensor],
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    draws: Tensor,
    seq_lens: Tensor,
    slots: list[Tensor],
) -> None:
    """given int64 [turns, 3, most rows], pinned: token ids, positions (or NO_ROW, FOLLOWS), sources (a row of `drawn`,
    or -1); turn int32 [1]: the turn of the step before, and then of this one; followed int64 [3, most rows]: as a turn
    of `given`, on the device; tables int32 [R, pages] and slots [R], of each group. Fills slots, ids, positions, draws
    (position of the token to be drawn) and seq_lens int32, all [R]."""
    count, device = ids.shape[0], ids.device
    launch = {"PAGE": page_size, "BLOCK": power_of_two(count, 128), "PDL": early(device)} | options(device, 4, 1)
    _begin[(1,)](
        given,
        turn,
        followed,
        drawn,
        tables[0],
        ids,
        positions,
        draws,
        seq_lens,
        slots[0],
        count,
        given.stride(1),
        0 if followed is None else followed.stride(0),
        tables[0].stride(0),
        TURNS=given.shape[0],
        **launch,
    )
    for table, own in zip(tables[1:], slots[1:], strict=True):
        _place[(1,)](seq_lens, table, own, count, table.stride(0), **launch)
