"""Attention of many rows over 16-bit pages, for Hopper: prompts, and single tokens of sequences with a common prefix.

The meaning of dense_kernel.py's modes PREFILL and SHARED_PREFIX, without windows and caps. In Gluon, since plain Triton
makes the tensor cores wait for every softmax. choose.py says when; dense.py calls `attend_many_rows`.

A program is nine warps in three roles. Per tile of KEYS = 128 keys, for heads of D = 64 or 128:

  producer, 1 warp        (`fetch`)   page table -> TMA copies of K [128, D] and V [128, D] into a ring of STAGES tiles
  consumers, 2 x 4 warps  (`attend`)  each ROWS = 64 rows, (token, head) pairs of one KV head's group, over all tiles:
      1. S = Q K^T      wgmma, [64, D] x [D, 128] -> float32 [64, 128], operands in shared memory
      2. O += P V       wgmma of the tile *before*, [64, 128] x [128, D]; P 16-bit in registers, V in shared memory
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

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton.attention.arguments import Batch, Partials
from tokenmill.kernels.triton.attention.hopper_roles import (
    KEYS,
    PART,
    ROWS,
    STAGES,
    Output,
    Pages,
    Ring,
    Rows,
    Walk,
    attend,
    fetch,
    write_empty,
)
from tokenmill.kernels.triton.shared.gluon_device import find_sequence, launch_dependents, wait_for_predecessor
from tokenmill.kernels.triton.shared.launch import gluon_options, uses_pdl

# A thread of a consumer holds S, P and O: the producer gives up registers it does not need.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)


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
        keys = gl.allocate_shared_memory(k_source.dtype, [TILES, PAGE, PART], k_source.layout)
        values = gl.allocate_shared_memory(k_source.dtype, [TILES, PAGE, PART], v_source.layout)
        queries0 = gl.allocate_shared_memory(k_source.dtype, [PARTS, ROWS, PART], k_source.layout)
        queries1 = gl.allocate_shared_memory(k_source.dtype, [PARTS, ROWS, PART], k_source.layout)
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
