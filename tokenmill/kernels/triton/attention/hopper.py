"""Attention of many rows over bf16 pages, for Hopper: prompts, and the single tokens of sequences with a common prefix.

The meaning of dense_kernel.py's modes PREFILL and SHARED_PREFIX, without windows and caps. In Gluon, since plain Triton
makes the tensor cores wait for every softmax. choose.py says when; dense.py calls `attend_many_rows`.

A program is nine warps in three roles. Per tile of KEYS = 128 keys, for heads of D = 64 or 128:

  producer, 1 warp        (`fetch`)   page table -> TMA copies of K [128, D] and V [128, D] into a ring of STAGES tiles
  consumers, 2 x 4 warps  (`attend`)  each ROWS = 64 rows, (token, head) pairs of one KV head's group, over all tiles:
      1. S = Q K^T      wgmma, [64, D] x [D, 128] -> float32 [64, 128], operands in shared memory
      2. O += P V       wgmma of the tile *before*, [64, 128] x [128, D]; P bf16 in registers, V in shared memory
      3. wait for 1, hand K back, then the online softmax of S -> P [64, 128], while 2 still runs
      4. wait for 2, hand V back, rescale O

Step 3 is what costs: exponentials run on other units than products. Within a consumer it overlaps the products of the
tile before; between the two consumers, which nothing synchronizes, one's softmax overlaps the other's products. Two
barriers per ring slot carry it: `ready` (the copies of a tile have landed, one arrival and its bytes) and `free` (both
consumers are done with it, two arrivals). Slot and barrier phase follow from the number of the tile alone.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton.attention.arguments import Batch, Partials
from tokenmill.kernels.triton.attention.choose import HOPPER_ROWS
from tokenmill.kernels.triton.shared.gluon_device import (
    barrier,
    find_sequence,
    launch_dependents,
    wait_for_predecessor,
)
from tokenmill.kernels.triton.shared.launch import gluon_options, uses_pdl

PART = gl.constexpr(64)  # dimensions of a head that lie together in shared memory: 128 bytes, the widest swizzle
ROWS = gl.constexpr(HOPPER_ROWS)  # of a consumer: the M of one wgmma; a program has two consumers
KEYS = gl.constexpr(128)  # of a tile
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in flight or in use
# A thread of a consumer holds S, P and O: the producer gives up registers it does not need.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)
MINUS_INFINITY = gl.constexpr(float("-inf"))
LOG2_E = gl.constexpr(1.4426950408889634)


class Pages(NamedTuple):
    """Where a page lies among the rows [pages * kv_heads * page_size, head_dim] of a descriptor, and the scales. The
    descriptors themselves are arguments of their own: a launch does not look for them inside a tuple."""

    k_scale: Tensor | None  # float32 [kv_heads]
    v_scale: Tensor | None
    page_rows: int
    head_rows: int


class Ring(NamedTuple):
    """STAGES tiles of keys and of values in shared memory, and their barriers."""

    k_tiles: Any
    v_tiles: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any


class Walk(NamedTuple):
    """The key tiles of a program."""

    first: Any  # tile
    tiles: Any
    past_whole: Any  # tiles before this one are seen by every row
    end: Any  # first key that no row sees


class Rows(NamedTuple):
    """The rows of a consumer: up to `num_tokens` tokens from `token` on, times the heads of a group."""

    token: Any
    position: Any  # of the first token; SHARED: of the last common key, for all rows
    num_tokens: Any
    kv_head: Any


class Output(NamedTuple):
    """Where rows are read and written."""

    q: Any
    out: Any
    logs: Any
    q_stride: Any
    out_stride: Any
    scale: Any  # of scores, in units of log2(e)
    value_scale: Any
    sinks: Any  # [heads], or None


@gluon.jit
def fetch_tile(source, room, ready, free, number, table, tile, last_page, page_rows, head_row):
    """Copy one tile of keys or values, page by page and in PARTs: shared memory then holds, for each PART of the
    dimensions, [KEYS, PART] contiguous and swizzled, as wgmma reads it."""
    PAGE: gl.constexpr = source.block_type.shape[0]
    PAGES: gl.constexpr = KEYS // PAGE
    PARTS: gl.constexpr = room.shape[0] // (STAGES * PAGES)
    stage = number % STAGES
    bar = ready.index(stage)
    mbarrier.wait(free.index(stage), ((number // STAGES) & 1) ^ 1)  # the first round finds every slot free
    mbarrier.expect(bar, PARTS * PAGES * source.block_type.nbytes)
    for each in gl.static_range(PAGES):
        # Past the last page the last one is copied again: its keys are masked, and the byte count stays.
        row = gl.load(table + gl.minimum(tile * PAGES + each, last_page)) * page_rows + head_row
        for part in gl.static_range(PARTS):
            place = room.index((stage * PARTS + part) * PAGES + each)
            tma.async_copy_global_to_shared(source, [row, part * PART], bar, place)


@gluon.jit
def fetch(k_source, v_source, ring, table, walk, last_page, page_rows, head_row):
    """The producer: keys, then values, of each tile; STAGES tiles ahead of the slower consumer."""
    for number in range(walk.tiles):
        tile = walk.first + number
        fetch_tile(
            k_source, ring.k_tiles, ring.k_ready, ring.k_free, number, table, tile, last_page, page_rows, head_row
        )
        fetch_tile(
            v_source, ring.v_tiles, ring.v_ready, ring.v_free, number, table, tile, last_page, page_rows, head_row
        )  # fmt: skip


@gluon.jit
def start_scores(queries, keys, ready, number, SCORES: gl.constexpr):
    """Stage 1: issue S = Q K^T [ROWS, KEYS], summed over the PARTs of the head's dimensions."""
    PARTS: gl.constexpr = queries.shape[0]
    stage = number % STAGES
    mbarrier.wait(ready.index(stage), (number // STAGES) & 1)
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(
        queries.index(0), keys.index(stage * PARTS).permute((1, 0)), none, use_acc=False, is_async=True
    )
    for part in gl.static_range(1, PARTS):
        tile = keys.index(stage * PARTS + part).permute((1, 0))
        scores = warpgroup_mma(queries.index(part), tile, scores, is_async=True)
    return scores


@gluon.jit
def online_softmax(scores, row_max, row_sum, scale, tile, past_whole, positions):
    """Stage 3: as online_softmax.py's; only tiles from `past_whole` on need the causal mask. Every row sees a key of
    its first tile, so that no maximum stays at -inf."""
    if tile >= past_whole:
        key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= positions[:, None], scores, MINUS_INFINITY)
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_max[:, None])
    rescale = gl.exp2(row_max - new_max)
    return weights, rescale, new_max, row_sum * rescale + gl.sum(weights, 1)


@gluon.jit
def clear_past_end(values, stage, tile, end, PARTS: gl.constexpr):
    """Values past the last key may be anything, NaN included, and a weight of zero does not undo that."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, FLAT))
    for part in gl.static_range(PARTS):
        room = values.index(stage * PARTS + part)
        room.store(gl.where((key < end)[:, None], room.load(FLAT), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def start_values(p, values, stage, low, high, PARTS: gl.constexpr):
    """Stage 2: issue O += P V, the first PART of the dimensions in `low`, the second, if there is one, in `high`."""
    low = warpgroup_mma(p, values.index(stage * PARTS), low, is_async=True)
    if PARTS == 2:
        high = warpgroup_mma(p, values.index(stage * PARTS + 1), high, is_async=True)
    else:
        high = low
    return low, high


@gluon.jit
def attend(io, ring, queries, walk, rows, HEADS: gl.constexpr, GROUP: gl.constexpr, SHARED: gl.constexpr):
    """A consumer: ROWS rows over all tiles of the walk; the stages are those of the module's head."""
    PARTS: gl.constexpr = queries.shape[0]
    HEAD_DIM: gl.constexpr = PARTS * PART
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    first, tiles, past_whole = walk.first, walk.tiles, walk.past_whole
    # The producer fills pages [PAGE, PART]; consumers read the same memory as tiles [KEYS, PART].
    keys = ring.k_tiles._reinterpret(gl.bfloat16, [STAGES * PARTS, KEYS, PART], ring.k_tiles.type.layout)
    values = ring.v_tiles._reinterpret(gl.bfloat16, [STAGES * PARTS, KEYS, PART], ring.v_tiles.type.layout)
    # Queries, once: global [T, heads * D] -> shared [PARTS, ROWS, PART].
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    column = gl.arange(0, PART, gl.SliceLayout(0, FLAT))
    token = rows.token + row // GROUP
    live = (row // GROUP < rows.num_tokens) & (row < ROWS // GROUP * GROUP)
    inside = (rows.kv_head * GROUP + row % GROUP) * HEAD_DIM
    for part in gl.static_range(PARTS):
        place = io.q + (token.to(gl.int64) * io.q_stride + inside)[:, None] + (part * PART + column)[None, :]
        queries.index(part).store(gl.load(place, mask=live[:, None], other=0.0))
    fence_async_shared()
    barrier()
    positions = gl.zeros([ROWS], gl.int32, OF_ROW) + rows.position
    if not SHARED:
        positions += gl.arange(0, ROWS, OF_ROW) // GROUP
    row_max = gl.full([ROWS], MINUS_INFINITY, gl.float32, OF_ROW)
    row_sum = gl.zeros([ROWS], gl.float32, OF_ROW)
    low = gl.zeros([ROWS, PART], gl.float32, ACC)
    high = gl.zeros([ROWS, PART], gl.float32, ACC)
    # The first tile has no values of a tile before it: stages 1 and 3 only.
    scores = warpgroup_mma_wait(0, deps=[start_scores(queries, keys, ring.k_ready, 0, SCORES)])
    mbarrier.arrive(ring.k_free.index(0), count=1)
    weights, rescale, row_max, row_sum = online_softmax(
        scores, row_max, row_sum, io.scale, first, past_whole, positions
    )  # fmt: skip
    p = gl.convert_layout(weights.to(gl.bfloat16), OPERAND)
    for number in range(1, tiles):
        before = (number - 1) % STAGES
        started = start_scores(queries, keys, ring.k_ready, number, SCORES)
        mbarrier.wait(ring.v_ready.index(before), ((number - 1) // STAGES) & 1)
        adding = start_values(p, values, before, low, high, PARTS)
        # PARTS products may still be pending: those of the values go on through the softmax.
        scores = warpgroup_mma_wait(PARTS, deps=[started])
        mbarrier.arrive(ring.k_free.index(number % STAGES), count=1)
        weights, rescale, row_max, row_sum = online_softmax(
            scores, row_max, row_sum, io.scale, first + number, past_whole, positions
        )  # fmt: skip
        # Stage 4. `p` is among the dependencies: its registers are read until the product is done.
        if PARTS == 2:
            low, high, p = warpgroup_mma_wait(0, deps=[adding[0], adding[1], p])
        else:
            low, p = warpgroup_mma_wait(0, deps=[adding[0], p])
        mbarrier.arrive(ring.v_free.index(before), count=1)
        by = gl.convert_layout(rescale, OF_ACC)[:, None]
        low = low * by
        if PARTS == 2:
            high = high * by
        p = gl.convert_layout(weights.to(gl.bfloat16), OPERAND)
    # The values of the last tile, which may hold keys past the end.
    last = (tiles - 1) % STAGES
    mbarrier.wait(ring.v_ready.index(last), ((tiles - 1) // STAGES) & 1)
    if (first + tiles) * KEYS > walk.end:
        clear_past_end(values, last, first + tiles - 1, walk.end, PARTS)
    adding = start_values(p, values, last, low, high, PARTS)
    if PARTS == 2:
        low, high, p = warpgroup_mma_wait(0, deps=[adding[0], adding[1], p])
    else:
        low, p = warpgroup_mma_wait(0, deps=[adding[0], p])
    if io.sinks is not None:
        sink = gl.load(io.sinks + rows.kv_head * GROUP + gl.arange(0, ROWS, OF_ROW) % GROUP)
        row_sum += gl.exp2(sink * LOG2_E - row_max)
    by = gl.convert_layout(io.value_scale / row_sum, OF_ACC)[:, None]
    out = io.out
    place = out + (token.to(gl.int64) * io.out_stride + inside)[:, None] + column[None, :]
    gl.store(place, gl.convert_layout((low * by).to(out.dtype.element_ty), FLAT), mask=live[:, None])
    if PARTS == 2:
        gl.store(place + PART, gl.convert_layout((high * by).to(out.dtype.element_ty), FLAT), mask=live[:, None])
    if SHARED:
        log = gl.convert_layout(row_max + gl.log2(row_sum), gl.SliceLayout(1, FLAT))
        gl.store(io.logs + token * HEADS + rows.kv_head * GROUP + row % GROUP, log, mask=live)


@gluon.jit
def write_empty(logs, first_token, count, kv_head, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """A split without keys."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, 2 * ROWS, FLAT)
    live = row < gl.minimum(count, 2 * (ROWS // GROUP)) * GROUP
    place = logs + (first_token + row // GROUP) * HEADS + kv_head * GROUP + row % GROUP
    gl.store(place, gl.full([2 * ROWS], MINUS_INFINITY, gl.float32, FLAT), mask=live)


@gluon.jit(do_not_specialize=["num_seqs", "table_stride", "splits", "slot_lines"])
def _many_rows(
    q,
    k_source,
    v_source,
    pages,
    result,
    batch,
    prefix,
    sinks,
    scale,
    num_seqs,
    splits,
    slot_lines,
    q_stride,
    out_stride,
    table_stride,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SHARED: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (blocks of rows, kv_heads, splits). SHARED: `result` holds float32 partial results of `slot_lines` (token,
    head) pairs for each split, and `prefix` [3] the bounds; else result.outputs is the output itself."""
    if PDL:
        launch_dependents()
        wait_for_predecessor()
    EACH: gl.constexpr = ROWS // GROUP  # tokens of a consumer
    PAGE: gl.constexpr = k_source.block_type.shape[0]
    out, logs = result.outputs, result.logs
    kv_head = gl.program_id(1)
    if SHARED:
        seq = gl.load(prefix)
        token = seq + gl.program_id(0) * (2 * EACH)
        count = gl.load(prefix + 1) - token
        end = gl.load(prefix + 2)
        position = end - 1
        share = gl.cdiv(gl.cdiv(end, KEYS), splits)
        first = gl.program_id(2) * share
        tiles = gl.minimum(gl.cdiv(end, KEYS) - first, share)
        past_whole = end // KEYS
        each_further = 0
        out += gl.program_id(2).to(gl.int64) * slot_lines * (PARTS * PART)
        logs += gl.program_id(2) * slot_lines
    else:
        block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest walks first
        seq = find_sequence(batch.query_starts, block, num_seqs, 2 * EACH)
        start = gl.load(batch.query_starts + seq)
        whole = gl.load(batch.query_starts + seq + 1) - start
        length = gl.load(batch.seq_lens + seq)
        ahead = (block - (start // (2 * EACH) + seq)) * (2 * EACH)
        token = start + ahead
        count = gl.where(whole > 1, whole - ahead, 0)  # single tokens belong to the decode launch
        position = length - whole + ahead
        end = gl.minimum(length, position + 2 * EACH)
        first = 0
        tiles = gl.cdiv(end, KEYS)
        past_whole = (position + 1) // KEYS
        each_further = EACH
    if SHARED:  # noqa: SIM102
        if (count > 0) & (tiles <= 0):
            write_empty(logs, token, count, kv_head, HEADS, GROUP)
    if (count > 0) & (tiles > 0):
        value_scale = 1.0
        if pages.k_scale is not None:
            scale = scale * gl.load(pages.k_scale + kv_head)
            value_scale = gl.load(pages.v_scale + kv_head)
        table = batch.block_table + seq.to(gl.int64) * table_stride
        # With D = 128: 2 x 2 tiles of 32 KiB and 2 x 16 KiB of queries, 160 KiB, so one program a processor.
        TILES: gl.constexpr = STAGES * PARTS * (KEYS // PAGE)
        keys = gl.allocate_shared_memory(gl.bfloat16, [TILES, PAGE, PART], k_source.layout)
        values = gl.allocate_shared_memory(gl.bfloat16, [TILES, PAGE, PART], v_source.layout)
        queries0 = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, PART], k_source.layout)
        queries1 = gl.allocate_shared_memory(gl.bfloat16, [PARTS, ROWS, PART], k_source.layout)
        k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for stage in gl.static_range(STAGES):
            mbarrier.init(k_ready.index(stage), count=1)
            mbarrier.init(k_free.index(stage), count=2)
            mbarrier.init(v_ready.index(stage), count=1)
            mbarrier.init(v_free.index(stage), count=2)
        ring = Ring(keys, values, k_ready, k_free, v_ready, v_free)
        walk = Walk(first, tiles, past_whole, end)
        io = Output(q, out, logs, q_stride, out_stride, scale, value_scale, sinks)
        rows0 = Rows(token, position, count, kv_head)
        rows1 = Rows(token + EACH, position + each_further, count - EACH, kv_head)
        last_page = (end - 1) // PAGE
        gl.warp_specialize(
            [
                (attend, (io, ring, queries0, walk, rows0, HEADS, GROUP, SHARED)),
                (attend, (io, ring, queries1, walk, rows1, HEADS, GROUP, SHARED)),
                (fetch, (k_source, v_source, ring, table, walk, last_page, pages.page_rows, kv_head * pages.head_rows)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def tokens_of_block(group: int) -> int:
    """Tokens of a program."""
    return 2 * (ROWS.value // group)


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _descriptor(pages: Tensor) -> TensorDescriptor:
    """Pages as rows of [head_dim], for TMA."""
    page_size, head_dim = pages.shape[2:]
    assert all(stride % head_dim == 0 for stride in pages.stride()[:3]), "rows of a page are not contiguous"
    count = sum((n - 1) * stride for n, stride in zip(pages.shape[:3], pages.stride()[:3], strict=True)) // head_dim + 1
    rows = torch.as_strided(pages, (count, head_dim), (head_dim, 1))
    return TensorDescriptor.from_tensor(rows, [page_size, PART.value], _layout())


def attend_many_rows(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: Batch,
    scale: float,
    scales: tuple[Tensor, Tensor] | None,
    sinks: Tensor | None,
    result: Partials,
    prefix: Tensor | None,
    splits: int,
) -> None:
    """Prompts of the batch -> result.outputs [T, heads * head_dim]. With `prefix` (bounds int32 [3]) instead the single
    tokens of sequences with a common prefix, whose partial results go to `result`, one slot per split. `scale` is in
    units of log2(e); `sinks` float32 [heads] join the softmax of prompts."""
    k_pages, v_pages = pages
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    heads, sequences = q.shape[1] // head_dim, batch.seq_lens.shape[0]
    group = heads // kv_heads
    block, shared = tokens_of_block(group), prefix is not None
    blocks = triton.cdiv(q.shape[0], block) if shared else q.shape[0] // block + sequences
    k_scale, v_scale = scales or (None, None)
    _many_rows[(blocks, kv_heads, splits)](
        q,
        _descriptor(k_pages),
        _descriptor(v_pages),
        Pages(k_scale, v_scale, k_pages.stride(0) // head_dim, k_pages.stride(1) // head_dim),
        result._replace(counters=None),
        batch,
        prefix,
        sinks,
        scale,
        sequences,
        splits,
        q.shape[0] * heads,
        q.stride(0),
        heads * head_dim if shared else result.outputs.stride(0),
        batch.block_table.stride(0),
        HEADS=heads,
        GROUP=group,
        PARTS=head_dim // PART.value,
        SHARED=shared,
        PDL=uses_pdl(q.device),
        **gluon_options(q.device, 4),
    )
