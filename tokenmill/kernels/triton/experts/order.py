"""Assignments (token, expert) sorted by expert, and the blocks of rows that the products take one expert at a time.

A counting sort: stable, without atomics, so the same ids always give the same order. Every shape follows from the
number of assignments and experts, never from the ids, so that it can be captured: the table of blocks is as long as
the worst case needs, and unused blocks have expert -1. Called by layer.py; product.py reads the result.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

CHUNK = 256  # assignments that one program places
MAX_ALONE = 512  # up to this many, one program places all: a second launch would take longer
STEP = 32  # of those, compared with all others at a time


class ExpertOrder(NamedTuple):
    """All int32. Sorted position p holds assignment `assignments[p]` = token * k + place among the token's experts."""

    assignments: Tensor  # [S]
    ends: Tensor  # [experts]: the position after an expert's last
    block_expert: Tensor  # [blocks]; -1: unused
    block_first: Tensor  # [blocks]: the position of a block's first row; it ends with its expert's rows at the latest


def max_blocks(assignments: int, num_experts: int, rows: int) -> int:
    """Blocks of `rows` that any distribution over the experts fits into."""
    hit = min(assignments, num_experts)
    return hit + (assignments - hit) // rows


@triton.jit
def count_chunk(ids, chunk, S, EB: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr):
    """Assignments of each expert [EB] among those of a chunk."""
    experts = tl.arange(0, EB)
    counts = tl.zeros([EB], dtype=tl.int32)
    for first in range(0, CHUNK, STEP):
        own = chunk * CHUNK + first + tl.arange(0, STEP)
        expert = tl.load(ids + own, mask=own < S, other=-1)
        counts += tl.sum((expert[:, None] == experts[None, :]).to(tl.int32), 0)
    return counts


@triton.jit(do_not_specialize=["S"])
def _count(ids, counts, S, E, EB: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr):
    dependent_launch(PDL)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EB)
    tl.store(counts + chunk * E + experts, count_chunk(ids, chunk, S, EB, CHUNK, STEP), mask=experts < E)


@triton.jit
def write_blocks(order, counts, starts, E, blocks, EB: tl.constexpr, ROWS: tl.constexpr):
    """The table of blocks: those of each expert in turn, then unused ones."""
    experts = tl.arange(0, EB)
    tl.store(order.ends + experts, starts + counts, mask=experts < E)
    own = (counts + ROWS - 1) // ROWS
    first = tl.cumsum(own, 0) - own
    for number in range(tl.max(own, 0)):
        ok = number < own
        tl.store(order.block_expert + first + number, experts, mask=ok)
        tl.store(order.block_first + first + number, starts + number * ROWS, mask=ok)
    for begin in range(tl.sum(own, 0), blocks, EB):
        unused = begin + experts
        tl.store(order.block_expert + unused, tl.full([EB], -1, tl.int32), mask=unused < blocks)


@triton.jit(do_not_specialize=["S", "blocks", "chunks"])
def _place(
    ids, counts, bases, order, S, E, blocks, chunks,
    EB: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, ALONE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Position of an assignment: its expert's start, plus its expert's assignments in earlier chunks and in its own."""
    dependent_launch(PDL)
    chunk = tl.program_id(0)
    experts = tl.arange(0, EB)
    earlier = tl.zeros([EB], dtype=tl.int32)
    if ALONE:
        total = count_chunk(ids, chunk, S, EB, CHUNK, STEP)
    else:
        total = tl.zeros([EB], dtype=tl.int32)
        for first in range(0, chunks, STEP):
            other = first + tl.arange(0, STEP)
            ok = (other < chunks)[:, None] & (experts < E)[None, :]
            found = tl.load(counts + other[:, None] * E + experts[None, :], mask=ok, other=0)
            total += tl.sum(found, 0)
            earlier += tl.sum(tl.where((other < chunk)[:, None], found, 0), 0)
    starts = tl.cumsum(total, 0) - total
    tl.store(bases + chunk * E + experts, starts + earlier, mask=experts < E)
    tl.debug_barrier()  # the bases are read by other threads than those that wrote them
    own = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + own, mask=own < S, other=-1)
    rank = tl.zeros([CHUNK], dtype=tl.int32)
    for first in range(0, CHUNK, STEP):
        other = chunk * CHUNK + first + tl.arange(0, STEP)
        same = expert[:, None] == tl.load(ids + other, mask=other < S, other=-2)[None, :]
        rank += tl.sum((same & (other[None, :] < own[:, None])).to(tl.int32), 1)
    base = tl.load(bases + chunk * E + expert, mask=own < S, other=0)
    tl.store(order.assignments + base + rank, own, mask=own < S)
    if chunk == 0:
        write_blocks(order, total, starts, E, blocks, EB, ROWS)


def sort_by_expert(ids: Tensor, num_experts: int, rows: int) -> ExpertOrder:
    """ids int32 [T, k], each below `num_experts`; blocks of at most `rows` assignments of one expert."""
    size = ids.numel()
    device = ids.device
    blocks = max_blocks(size, num_experts, rows)
    chunk = MAX_ALONE if CHUNK < size <= MAX_ALONE else CHUNK
    chunks = triton.cdiv(size, chunk)
    scratch = torch.empty(2, chunks, num_experts, dtype=torch.int32, device=device)
    sizes = (size, num_experts, blocks, blocks)
    order = ExpertOrder(*(torch.empty(length, dtype=torch.int32, device=device) for length in sizes))
    padded, pdl = power_of_two(num_experts, 16), uses_pdl(device)
    if chunks > 1:
        _count[(chunks,)](
            ids, scratch[0], size, num_experts, EB=padded, CHUNK=CHUNK, STEP=STEP, PDL=pdl, **options(device, 4, 1)
        )
    _place[(chunks,)](
        ids,
        scratch[0],
        scratch[1],
        order,
        size,
        num_experts,
        blocks,
        chunks,
        EB=padded,
        CHUNK=chunk,
        STEP=STEP,
        ROWS=rows,
        ALONE=chunks == 1,
        PDL=pdl,
        **options(device, 4 * chunk // CHUNK, 1),
    )
    return order
