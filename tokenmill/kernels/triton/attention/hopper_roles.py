"""What the warps of hopper.py's kernel do: the producer's copies (`fetch`), the consumers' tiles (`attend`), and the
records that both are given. hopper.py says how they work together; it alone launches them.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

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

from tokenmill.kernels.triton.attention.choose import HOPPER_ROWS
from tokenmill.kernels.triton.shared.gluon_device import barrier

PART = gl.constexpr(64)  # dimensions of a head that lie together in shared memory: 128 bytes, the widest swizzle
ROWS = gl.constexpr(HOPPER_ROWS)  # of a consumer: the M of one wgmma; a program has two consumers
KEYS = gl.constexpr(128)  # of a tile
STAGES = gl.constexpr(2)  # tiles of keys, and of values, in flight or in use
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
    TYPE: gl.constexpr = ring.k_tiles.dtype  # bf16 or float16
    keys = ring.k_tiles._reinterpret(TYPE, [STAGES * PARTS, KEYS, PART], ring.k_tiles.type.layout)
    values = ring.v_tiles._reinterpret(TYPE, [STAGES * PARTS, KEYS, PART], ring.v_tiles.type.layout)
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
    p = gl.convert_layout(weights.to(TYPE), OPERAND)
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
        p = gl.convert_layout(weights.to(TYPE), OPERAND)
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
