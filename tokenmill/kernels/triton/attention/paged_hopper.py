"""Attention of many rows over bf16 pages, for Hopper: prompts, and the single tokens of sequences with a common prefix.

paged_kernel.py's meaning (its modes PREFILL and SHARED) without windows and caps. Written in Gluon, since the plain
language makes the tensor cores wait for every softmax. One warp has the copy engine bring pages; two groups of four
warps, each with its own rows, take turns: while one computes weights, the other's products run, and of its own those
of the tile before. paged.py says when.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache
from typing import Any

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

from tokenmill.kernels.triton.launch import early

PART = gl.constexpr(64)  # dimensions of a head that lie together in shared memory: 128 bytes
ROWS = gl.constexpr(64)  # (token, head) pairs of a group of warps; a program has two groups
KEYS = gl.constexpr(128)  # of a tile
STAGES = gl.constexpr(2)  # tiles of keys, and of values, on their way or in use
NO_KEYS = gl.constexpr(float("-inf"))
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # renamed in Triton 3.7


@gluon.jit
def find_sequence(query_starts, block, num_seqs, TOKENS: gl.constexpr):
    """As paged_kernel.py's."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = gl.load(query_starts + middle) // TOKENS + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@gluon.jit
def fetch_tile(source, room, ready, free, number, table, tile, last_page, page_rows, head_row):
    """A tile of keys or values, page by page, each in PARTs: shared memory then holds [PART] columns of all keys."""
    PAGE: gl.constexpr = source.block_type.shape[0]
    PAGES: gl.constexpr = KEYS // PAGE
    PARTS: gl.constexpr = room.shape[0] // (STAGES * PAGES)
    stage = number % STAGES
    bar = ready.index(stage)
    mbarrier.wait(free.index(stage), ((number // STAGES) & 1) ^ 1)
    mbarrier.expect(bar, PARTS * PAGES * source.block_type.nbytes)
    for each in gl.static_range(PAGES):
        row = gl.load(table + gl.minimum(tile * PAGES + each, last_page)) * page_rows + head_row
        for part in gl.static_range(PARTS):
            place = room.index((stage * PARTS + part) * PAGES + each)
            tma.async_copy_global_to_shared(source, [row, part * PART], bar, place)


@gluon.jit
def fetch(k_source, v_source, keys, values, k_ready, k_free, v_ready, v_free, table, first, tiles, last_page,
          page_rows, head_row):  # fmt: skip
    """What the copying warp does."""
    for number in range(tiles):
        tile = first + number
        fetch_tile(k_source, keys, k_ready, k_free, number, table, tile, last_page, page_rows, head_row)
        fetch_tile(v_source, values, v_ready, v_free, number, table, tile, last_page, page_rows, head_row)


@gluon.jit
def score(queries, keys, ready, number, SCORES: gl.constexpr):
    """Start the products of the rows with a tile of keys."""
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
def soften(scores, top, total, scale, tile, past_whole, positions):
    """As paged_kernel.py's; tiles before `past_whole` are seen by every row."""
    if tile >= past_whole:
        key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(key[None, :] <= positions[:, None], scores, NO_KEYS)
    new_top = gl.maximum(top, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, shrink, new_top, total * shrink + gl.sum(weights, 1)


@gluon.jit
def clear_past(values, stage, tile, end, PARTS: gl.constexpr):
    """Values past the last key may be anything, not a number included, and a weight of zero does not undo that."""
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    key = tile * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, FLAT))
    for part in gl.static_range(PARTS):
        room = values.index(stage * PARTS + part)
        room.store(gl.where((key < end)[:, None], room.load(FLAT), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def add_values(p, values, stage, low, high, PARTS: gl.constexpr):
    """Start adding the weighted values of a tile; a head of one PART has nothing in `high`."""
    low = warpgroup_mma(p, values.index(stage * PARTS), low, is_async=True)
    if PARTS == 2:
        high = warpgroup_mma(p, values.index(stage * PARTS + 1), high, is_async=True)
    else:
        high = low
    return low, high


@gluon.jit
def attend(q, out, logs, keys, values, queries, k_ready, k_free, v_ready, v_free, first, tiles, past_whole, end,
           first_token, first_position, count, head, q_stride, out_stride, scale, v_scale, HEADS: gl.constexpr,
           GROUP: gl.constexpr, SHARED: gl.constexpr):  # fmt: skip
    """What a group of four warps does: ROWS rows, from `first_token` on `count` tokens at most, over `tiles` tiles."""
    PARTS: gl.constexpr = queries.shape[0]
    HD: gl.constexpr = PARTS * PART
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, PART, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    OF_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    OF_ACC: gl.constexpr = gl.SliceLayout(1, ACC)
    keys = keys._reinterpret(gl.bfloat16, [STAGES * PARTS, KEYS, PART], keys.type.layout)
    values = values._reinterpret(gl.bfloat16, [STAGES * PARTS, KEYS, PART], values.type.layout)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, FLAT))
    column = gl.arange(0, PART, gl.SliceLayout(0, FLAT))
    token = first_token + row // GROUP
    live = (row // GROUP < count) & (row < ROWS // GROUP * GROUP)
    inside = (head * GROUP + row % GROUP) * HD
    for part in gl.static_range(PARTS):
        place = q + (token.to(gl.int64) * q_stride + inside)[:, None] + (part * PART + column)[None, :]
        queries.index(part).store(gl.load(place, mask=live[:, None], other=0.0))
    fence_async_shared()
    barrier()
    positions = gl.zeros([ROWS], gl.int32, OF_ROW) + first_position
    if not SHARED:
        positions += gl.arange(0, ROWS, OF_ROW) // GROUP
    top = gl.full([ROWS], NO_KEYS, gl.float32, OF_ROW)
    total = gl.zeros([ROWS], gl.float32, OF_ROW)
    low = gl.zeros([ROWS, PART], gl.float32, ACC)
    high = gl.zeros([ROWS, PART], gl.float32, ACC)
    scores = warpgroup_mma_wait(0, deps=[score(queries, keys, k_ready, 0, SCORES)])
    mbarrier.arrive(k_free.index(0), count=1)
    weights, shrink, top, total = soften(scores, top, total, scale, first, past_whole, positions)
    p = gl.convert_layout(weights.to(gl.bfloat16), OPERAND)
    for number in range(1, tiles):
        before = (number - 1) % STAGES
        started = score(queries, keys, k_ready, number, SCORES)
        mbarrier.wait(v_ready.index(before), ((number - 1) // STAGES) & 1)
        adding = add_values(p, values, before, low, high, PARTS)
        scores = warpgroup_mma_wait(PARTS, deps=[started])  # the values' products go on
        mbarrier.arrive(k_free.index(number % STAGES), count=1)
        weights, shrink, top, total = soften(scores, top, total, scale, first + number, past_whole, positions)
        if PARTS == 2:
            low, high, p = warpgroup_mma_wait(0, deps=[adding[0], adding[1], p])
        else:
            low, p = warpgroup_mma_wait(0, deps=[adding[0], p])
        mbarrier.arrive(v_free.index(before), count=1)
        by = gl.convert_layout(shrink, OF_ACC)[:, None]
        low = low * by
        if PARTS == 2:
            high = high * by
        p = gl.convert_layout(weights.to(gl.bfloat16), OPERAND)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(last), ((tiles - 1) // STAGES) & 1)
    if (first + tiles) * KEYS > end:
        clear_past(values, last, first + tiles - 1, end, PARTS)
    adding = add_values(p, values, last, low, high, PARTS)
    if PARTS == 2:
        low, high, p = warpgroup_mma_wait(0, deps=[adding[0], adding[1], p])
    else:
        low, p = warpgroup_mma_wait(0, deps=[adding[0], p])
    by = gl.convert_layout(v_scale / total, OF_ACC)[:, None]
    place = out + (token.to(gl.int64) * out_stride + inside)[:, None] + column[None, :]
    gl.store(place, gl.convert_layout((low * by).to(out.dtype.element_ty), FLAT), mask=live[:, None])
    if PARTS == 2:
        gl.store(place + PART, gl.convert_layout((high * by).to(out.dtype.element_ty), FLAT), mask=live[:, None])
    if SHARED:
        log = gl.convert_layout(top + gl.log2(total), gl.SliceLayout(1, FLAT))
        gl.store(logs + token * HEADS + head * GROUP + row % GROUP, log, mask=live)


@gluon.jit
def write_nothing(logs, first_token, count, head, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """A share without keys."""
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, 2 * ROWS, FLAT)
    live = row < gl.minimum(count, 2 * (ROWS // GROUP)) * GROUP
    place = logs + (first_token + row // GROUP) * HEADS + head * GROUP + row % GROUP
    gl.store(place, gl.full([2 * ROWS], NO_KEYS, gl.float32, FLAT), mask=live)


@gluon.jit(do_not_specialize=["num_seqs", "table_stride", "splits", "slot_lines"])
def _many_rows(
    q,
    k_source,
    v_source,
    out,
    logs,
    block_table,
    query_starts,
    seq_lens,
    bounds,
    k_scale,
    v_scale,
    scale,
    num_seqs,
    splits,
    slot_lines,
    q_stride,
    out_stride,
    table_stride,
    page_rows,
    head_rows,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    SHARED: gl.constexpr,
    PDL: gl.constexpr,
):
    """SHARED: `out` and `logs` are float32 partial results of `slot_lines` (token, head) pairs for each share."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    EACH: gl.constexpr = ROWS // GROUP  # tokens of a group of warps
    PAGE: gl.constexpr = k_source.block_type.shape[0]
    head = gl.program_id(1)
    if SHARED:
        seq = gl.load(bounds)
        token = seq + gl.program_id(0) * (2 * EACH)
        count = gl.load(bounds + 1) - token
        end = gl.load(bounds + 2)
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
        seq = find_sequence(query_starts, block, num_seqs, 2 * EACH)
        start = gl.load(query_starts + seq)
        whole = gl.load(query_starts + seq + 1) - start
        length = gl.load(seq_lens + seq)
        ahead = (block - (start // (2 * EACH) + seq)) * (2 * EACH)
        token = start + ahead
        count = gl.where(whole > 1, whole - ahead, 0)  # single tokens are another launch's
        position = length - whole + ahead
        end = gl.minimum(length, position + 2 * EACH)
        first = 0
        tiles = gl.cdiv(end, KEYS)
        past_whole = (position + 1) // KEYS
        each_further = EACH
    if SHARED:  # noqa: SIM102
        if (count > 0) & (tiles <= 0):
            write_nothing(logs, token, count, head, HEADS, GROUP)
    if (count > 0) & (tiles > 0):
        of_values = 1.0
        if k_scale is not None:
            scale = scale * gl.load(k_scale + head)
            of_values = gl.load(v_scale + head)
        table = block_table + seq.to(gl.int64) * table_stride
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
        last_page = (end - 1) // PAGE
        gl.warp_specialize(
            [
                (attend, (q, out, logs, keys, values, queries0, k_ready, k_free, v_ready, v_free, first, tiles,
                          past_whole, end, token, position, count, head, q_stride, out_stride, scale, of_values, HEADS,
                          GROUP, SHARED)),
                (attend, (q, out, logs, keys, values, queries1, k_ready, k_free, v_ready, v_free, first, tiles,
                          past_whole, end, token + EACH, position + each_further, count - EACH, head, q_stride,
                          out_stride, scale, of_values, HEADS, GROUP, SHARED)),
                (fetch, (k_source, v_source, keys, values, k_ready, k_free, v_ready, v_free, table, first, tiles,
                         last_page, page_rows, head * head_rows)),
            ],
            [4, 1],
            [232, 40],
        )  # fmt: skip


def suits(q: Tensor, k_pages: Tensor, window: int, cap: float) -> bool:
    """Whether these kernels can attend so."""
    heads, page_size, head_dim = k_pages.shape[1:]
    regular = head_dim in (64, 128) and page_size in (16, 32, 64, 128) and q.shape[1] // head_dim // heads <= ROWS.value
    return regular and not window and not cap and q.dtype == k_pages.dtype == torch.bfloat16


def tokens_of_block(group: int) -> int:
    """Tokens of a program."""
    return 2 * (ROWS.value // group)


@cache
def _layout() -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def _source(pages: Tensor) -> TensorDescriptor:
    """Pages as rows of [head_dim], for the copy engine."""
    page_size, head_dim = pages.shape[2:]
    assert all(stride % head_dim == 0 for stride in pages.stride()[:3]), "rows of a page lie apart"
    count = sum((n - 1) * stride for n, stride in zip(pages.shape[:3], pages.stride()[:3], strict=True)) // head_dim + 1
    rows = torch.as_strided(pages, (count, head_dim), (head_dim, 1))
    return TensorDescriptor.from_tensor(rows, [page_size, PART.value], _layout())


def attend_many(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    scales: tuple[Tensor, Tensor] | None,
    out: Tensor,
    shared: tuple[Tensor, Tensor, int] | None = None,
) -> None:
    """Prompts [query_starts, seq_lens] -> out [T, heads * head_dim]. `shared`: (bounds, logs, shares): instead the
    single tokens of sequences with a common prefix, whose partial results go to `out` and `logs`. `scale` is in units
    of log2(e)."""
    kv_heads, head_dim = k_pages.shape[1], k_pages.shape[3]
    heads = q.shape[1] // head_dim
    group = heads // kv_heads
    bounds, logs, splits = shared or (None, None, 1)
    block = tokens_of_block(group)
    blocks = triton.cdiv(q.shape[0], block) if shared else q.shape[0] // block + seq_lens.shape[0]
    k_scale, v_scale = scales or (None, None)
    launch: dict[str, Any] = {"launch_pdl": True} if early(q.device) else {}
    _many_rows[(blocks, kv_heads, splits)](
        q,
        _source(k_pages),
        _source(v_pages),
        out,
        logs,
        table,
        query_starts,
        seq_lens,
        bounds,
        k_scale,
        v_scale,
        scale,
        seq_lens.shape[0],
        splits,
        q.shape[0] * heads,
        q.stride(0),
        heads * head_dim if shared else out.stride(0),
        table.stride(0),
        k_pages.stride(0) // head_dim,
        k_pages.stride(1) // head_dim,
        HEADS=heads,
        GROUP=group,
        PARTS=head_dim // PART.value,
        SHARED=shared is not None,
        PDL=early(q.device),
        num_warps=4,
        **launch,
    )
