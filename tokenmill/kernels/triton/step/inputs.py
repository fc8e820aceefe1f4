"""The first launch of a decode step: what follows from each row's position and page table, computed on the device.

The host writes a step's inputs into its own pinned memory, where this kernel reads them: a copy between two steps would
cost the device more than the read. The memory is a ring of several slots, and the device counts the steps, so that a
captured step needs no new addresses. A row's token is the host's, or the one that the step before sampled for row
`source` and that the host has not seen yet; so a step can be launched before the last one has ended. Called by the
graph executor, inside the graph.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

PADDING_POSITION = -1  # instead of a position: a row that only pads the batch
POSITION_ON_DEVICE = -2  # instead of a position: take what the step before left on the device for this row

_POSITION_ON_DEVICE = tl.constexpr(POSITION_ON_DEVICE)


@triton.jit
def store_slots(table, slots, rows, position, live, ok, table_stride, PAGE: tl.constexpr):
    """slots[row] = page * PAGE + offset of each row's position, -1 where it has none: nothing is stored there."""
    page = tl.load(table + rows.to(tl.int64) * table_stride + position // PAGE, mask=live, other=0).to(tl.int64)
    tl.store(slots + rows, tl.where(live & (page >= 0), page * PAGE + position % PAGE, -1), mask=ok)


@triton.jit(do_not_specialize=["count", "host_stride", "device_stride"])
def _begin(
    host_inputs,
    ring_index,
    device_inputs,
    sampled,
    table,
    outputs,
    count,
    host_stride,
    device_stride,
    table_stride,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for all rows: it alone knows when all of them have read `ring_index`."""
    dependent_launch(PDL)
    now = (tl.load(ring_index) + 1) % RING
    rows = tl.arange(0, BLOCK)
    ok = rows < count
    # Volatile: the host may have written since the last read.
    place = host_inputs + now * 3 * host_stride + rows
    own = tl.load(place, mask=ok, other=0, volatile=True)
    position = tl.load(place + host_stride, mask=ok, other=-1, volatile=True)
    source = tl.load(place + 2 * host_stride, mask=ok, other=-1, volatile=True)
    if device_inputs is not None:
        here = ok & (position == _POSITION_ON_DEVICE)
        own = tl.where(here, tl.load(device_inputs + rows, mask=here, other=0), own)
        position = tl.where(here, tl.load(device_inputs + device_stride + rows, mask=here, other=-1), position)
        source = tl.where(here, tl.load(device_inputs + 2 * device_stride + rows, mask=here, other=-1), source)
    live = ok & (position >= 0)
    last = tl.load(sampled + source, mask=live & (source >= 0), other=0)
    tl.store(outputs.ids + rows, tl.where(live, tl.where(source >= 0, last, own), 0), mask=ok)
    tl.store(outputs.positions + rows, tl.maximum(position, 0), mask=ok)
    tl.store(outputs.sample_positions + rows, position + 1, mask=ok)
    tl.store(outputs.seq_lens + rows, (position + 1).to(tl.int32), mask=ok)
    store_slots(table, outputs.slots, rows, position, live, ok, table_stride, PAGE)
    tl.debug_barrier()
    tl.store(ring_index, now)


@triton.jit(do_not_specialize=["count"])
def _place(seq_lens, table, slots, count, table_stride, PAGE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    rows = tl.arange(0, BLOCK)
    ok = rows < count
    position = tl.load(seq_lens + rows, mask=ok, other=0).to(tl.int64) - 1
    store_slots(table, slots, rows, position, ok & (position >= 0), ok, table_stride, PAGE)


class _Outputs(NamedTuple):
    ids: Tensor
    positions: Tensor
    sample_positions: Tensor
    seq_lens: Tensor
    slots: Tensor


def begin_step(
    host_inputs: Tensor,
    ring_index: Tensor,
    device_inputs: Tensor | None,
    sampled: Tensor,
    tables: list[Tensor],
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    sample_positions: Tensor,
    seq_lens: Tensor,
    slots: list[Tensor],
) -> None:
    """host_inputs int64 [ring, 3, max rows], pinned: token ids, positions (or PADDING_POSITION, POSITION_ON_DEVICE),
    sources (a row of `sampled`, or -1); ring_index int32 [1]: the slot of the step before, and then of this one;
    device_inputs int64 [3, max rows]: as a slot of host_inputs, on the device; tables int32 [R, pages] and slots [R],
    of each layer group. Fills slots, ids, positions, sample_positions (of the token to be sampled) and seq_lens int32,
    all [R]."""
    count, device = ids.shape[0], ids.device
    launch = {"PAGE": page_size, "BLOCK": power_of_two(count, 128), "PDL": uses_pdl(device)} | options(device, 4, 1)
    _begin[(1,)](
        host_inputs,
        ring_index,
        device_inputs,
        sampled,
        tables[0],
        _Outputs(ids, positions, sample_positions, seq_lens, slots[0]),
        count,
        host_inputs.stride(1),
        0 if device_inputs is None else device_inputs.stride(0),
        tables[0].stride(0),
        RING=host_inputs.shape[0],
        **launch,
    )
    for table, own in zip(tables[1:], slots[1:], strict=True):
        _place[(1,)](seq_lens, table, own, count, table.stride(0), **launch)
