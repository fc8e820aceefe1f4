"""The two products of an adapter: x A^T of the rows that name its slot, then B times that, added to their outputs.

Factors do not depend on earlier kernels of a step: their first lines are fetched while the base's product still runs.
Sums over a split depth are left apart by the first kernel and added up by the second, in a fixed order: a row has the
same bits in every mixture.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.ref_adapters import RANK_BLOCK
from tokenmill.kernels.triton.matmul.tile import prefetch_rows
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, uses_pdl

_FEW_TOKENS = 64  # up to which the depth is split, so that there are programs enough
_SPLIT_DEPTH = 1024
_GROUP_ROWS = 128  # slots that one program of `_expand` multiplies together, times tokens: what registers hold
_SPLIT_ROWS = 256  # rows of partial sums that `_expand` adds up: splits times tokens of a tile


class Factors(NamedTuple):
    """Of all slots (slot s at index s - 1), P matrices and N outputs together."""

    a: Tensor  # bf16 or float16 [slots, P, max rank, K]
    b: Tensor  # bf16 or float16 [slots, N, max rank]
    ranks: Tensor  # int32 [slots, P]: multiples of RANK_BLOCK, 0: none
    gains: Tensor  # float32 [slots, N]
    shifts: Tensor | None  # float32 [slots, N]: where the base has biases
    gained: Tensor  # int32 [slots, P]: whether the gains apply
    tiles: Tensor  # int32 [tiles, 3]: matrix, first column, end of its columns


Sums = tuple[Tensor, int]  # of `_shrink`, and over how many splits


class Variant(NamedTuple):
    """What a launch is compiled for."""

    tokens: int  # of a tile
    step: int  # of the depth, or columns of a tile
    max_rank: int
    parts: int
    even: bool  # the depth is a multiple of a split
    shifted: bool
    prefetch_lines: int  # of a row of A
    splits: int  # a power of two, at least the number of splits
    group: int  # slots that are multiplied together
    pdl: bool
    interpreted: bool


@triton.jit
def _dot(x, w, acc, INTERPRET: tl.constexpr):
    """The interpreter reads bf16 as integers, so there it is float32."""
    if INTERPRET:
        return tl.dot(x.to(tl.float32), w.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(x, w, acc)


@triton.jit(do_not_specialize=["M", "depth_each"])
def _shrink(x, slots, factors, partial, M, K, x_stride, depth_each, VARIANT: tl.constexpr):
    """partial [splits, M, P * max rank] = x A^T; a program: one slot, 16 ranks of one matrix, one split, one tile."""
    BM: tl.constexpr = VARIANT.tokens
    BK: tl.constexpr = VARIANT.step
    RANK: tl.constexpr = VARIANT.max_rank
    PARTS: tl.constexpr = VARIANT.parts
    blocks: tl.constexpr = PARTS * RANK // 16
    number, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, block = number // blocks, number % blocks
    part, rank = block * 16 // RANK, block * 16 % RANK
    tokens = tile * BM + tl.arange(0, BM)
    mine = tl.load(slots + tokens, mask=tokens < M, other=0) == slot + 1
    live = (rank < tl.load(factors.ranks + slot * PARTS + part)) & (tl.max(mine.to(tl.int32), 0) > 0)
    first = split * depth_each
    last = tl.minimum(first + depth_each, K)
    a_rows = factors.a + ((slot * PARTS + part) * RANK + rank + tl.arange(0, 16)).to(tl.int64) * K
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        if live:
            prefetch_rows(a_rows + first, 64, VARIANT.prefetch_lines)
        tl.extra.cuda.gdc_wait()
    if not live:
        return
    x_rows = x + tl.where(mine, tokens, 0).to(tl.int64) * x_stride
    acc = tl.zeros([BM, 16], dtype=tl.float32)
    for begin in range(first, last, BK):
        k = begin + tl.arange(0, BK)
        if VARIANT.even:
            a_tile = tl.load(a_rows[None, :] + k[:, None])
            x_tile = tl.load(x_rows[:, None] + k[None, :])
        else:
            a_tile = tl.load(a_rows[None, :] + k[:, None], mask=k[:, None] < last, other=0.0)
            x_tile = tl.load(x_rows[:, None] + k[None, :], mask=k[None, :] < last, other=0.0)
        acc = _dot(x_tile, a_tile, acc, VARIANT.interpreted)
    place = (split * M + tokens[:, None]) * (PARTS * RANK) + block * 16 + tl.arange(0, 16)[None, :]
    tl.store(partial + place, acc, mask=mine[:, None])


@triton.jit(do_not_specialize=["M", "slot_count", "splits", "first_tile", "first_column"])
def _expand(
    y, slots, factors, partial, M, N, slot_count, y_stride, splits, first_tile, first_column, VARIANT: tl.constexpr
):
    """y [M, columns]: gain * y + shift + partial B^T, by the slot of each row. A program: one tile of columns and of
    rows, whose slots are multiplied together, some at a time: a row has zeros where a slot is not its own, so that its
    sum is the same in every mixture."""
    BM: tl.constexpr = VARIANT.tokens
    BN: tl.constexpr = VARIANT.step
    RANK: tl.constexpr = VARIANT.max_rank
    PARTS: tl.constexpr = VARIANT.parts
    GROUP: tl.constexpr = VARIANT.group
    entry = factors.tiles + (first_tile + tl.program_id(0)) * 3
    part, column, end = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    columns = column + tl.arange(0, BN)
    column_ok = columns < end
    tokens = tl.program_id(1) * BM + tl.arange(0, BM)
    slot_of = tl.load(slots + tokens, mask=tokens < M, other=0)
    rank_of = tl.load(factors.ranks + (slot_of - 1) * PARTS + part, mask=slot_of > 0, other=0)
    mine = rank_of > 0
    live = tl.max(mine.to(tl.int32), 0) > 0
    group = tl.arange(0, GROUP * 16) // 16
    inside_block = tl.arange(0, GROUP * 16) % 16
    if VARIANT.pdl:
        tl.extra.cuda.gdc_launch_dependents()
        if live:
            lines = tl.arange(0, GROUP * BN * RANK // 64)  # of 128 bytes: first all of one slot
            within = lines % (BN * RANK // 64) * 64
            offset = (lines // (BN * RANK // 64)).to(tl.int64) * N * RANK + column * RANK + within
            prefetch_rows(factors.b + tl.minimum(offset, slot_count.to(tl.int64) * N * RANK - 64), 64, 1)
        tl.extra.cuda.gdc_wait()
    if not live:
        return
    sums = tl.zeros([BM, BN], dtype=tl.float32)
    for begin in range(0, tl.max(rank_of, 0), 16):
        # Of each row, for its own slot. All splits at once: one by one their latencies would add up.
        rows = tl.arange(0, VARIANT.splits)[:, None] * M + tokens[None, :]
        place = rows[:, :, None] * (PARTS * RANK) + part * RANK + begin + tl.arange(0, 16)[None, None, :]
        ok = (tl.arange(0, VARIANT.splits) < splits)[:, None, None] & (begin < rank_of)[None, :, None]
        own = tl.sum(tl.load(partial + place, mask=ok, other=0.0, cache_modifier=".cg"), 0)
        spread = tl.reshape(tl.broadcast_to(own[:, None, :], [BM, GROUP, 16]), [BM, GROUP * 16])
        for first in range(0, slot_count, GROUP):
            is_own = (slot_of[:, None] == first + group[None, :] + 1) & (begin < rank_of)[:, None]
            wanted = tl.max(is_own.to(tl.int32), 0) > 0
            if tl.max(wanted.to(tl.int32), 0) > 0:
                slot_rows = factors.b + (first + group).to(tl.int64) * N * RANK + begin + inside_block
                at = slot_rows[:, None] + (columns * RANK)[None, :]
                b_tile = tl.load(at, mask=wanted[:, None] & column_ok[None, :], other=0.0)
                h = tl.where(is_own, spread, 0.0).to(b_tile.dtype)
                sums = _dot(h, b_tile, sums, VARIANT.interpreted)
    inside = mine[:, None] & column_ok[None, :]
    at = y + tokens[:, None].to(tl.int64) * y_stride + (columns - first_column)[None, :]
    old = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gained = tl.load(factors.gained + (slot_of - 1) * PARTS + part, mask=mine, other=0) > 0
    if tl.max(gained.to(tl.int32), 0) > 0:
        places = (slot_of - 1).to(tl.int64)[:, None] * N + columns[None, :]
        use = gained[:, None] & column_ok[None, :]
        old *= tl.load(factors.gains + places, mask=use, other=1.0)
        if VARIANT.shifted:
            old += tl.load(factors.shifts + places, mask=use, other=0.0)
    tl.store(at, (old + sums).to(y.dtype.element_ty), mask=inside)


def tile_columns(columns: int) -> int:
    """Columns of a tile of `_expand`, for a product of so many outputs in all: the fewer, the smaller."""
    return 64 if columns >= 4096 else 32


def _tokens(count: int) -> int:
    return min(64, max(16, triton.next_power_of_2(count)))


def shrink(x: Tensor, slots: Tensor, factors: Factors) -> Sums:
    """x [M, K] like the factors, slots int32 [M] -> sums over the splits of the depth, and how many there are. Not in
    the scratch memory that products share: the base's product may run meanwhile."""
    (tokens, depth), (num_slots, parts, max_rank, _) = x.shape, factors.a.shape
    splits = min(_SPLIT_ROWS // _tokens(tokens), triton.cdiv(depth, _SPLIT_DEPTH)) if tokens <= _FEW_TOKENS else 1
    share = triton.cdiv(depth, splits)
    step = min(512 if tokens <= 16 else 128, max(16, triton.next_power_of_2(share)))
    depth_each = triton.cdiv(share, step) * step
    splits = triton.cdiv(depth, depth_each)
    partial = torch.empty(splits * tokens * parts * max_rank, dtype=torch.float32, device=x.device)
    variant = Variant(
        tokens=_tokens(tokens),
        step=step,
        max_rank=max_rank,
        parts=parts,
        even=depth % step == 0,
        shifted=False,
        splits=1,
        group=1,
        prefetch_lines=max(1, 1 << min(4, (min(depth_each, depth) // 64).bit_length() - 1)),
        pdl=uses_pdl(x.device),
        interpreted=INTERPRETED,
    )
    grid = (num_slots * parts * max_rank // RANK_BLOCK, splits, triton.cdiv(tokens, variant.tokens))
    _shrink[grid](
        x, slots, factors, partial, tokens, depth, x.stride(0), depth_each, VARIANT=variant, **options(x.device, 4, 3)
    )
    return partial, splits


def expand(y: Tensor, slots: Tensor, factors: Factors, sums: Sums, tiles: range, first_column: int = 0) -> None:
    """Add to y [M, columns], whose first column is `first_column` of the product: these entries of factors.tiles."""
    partial, splits = sums
    num_slots, columns, max_rank = factors.b.shape
    few = y.shape[0] <= _FEW_TOKENS
    variant = Variant(
        tokens=_tokens(y.shape[0]),
        step=tile_columns(columns),
        max_rank=max_rank,
        parts=factors.a.shape[1],
        even=True,
        shifted=factors.shifts is not None,
        splits=triton.next_power_of_2(splits),
        group=min(_GROUP_ROWS // _tokens(y.shape[0]), triton.next_power_of_2(num_slots)) if few else 1,
        prefetch_lines=1,
        pdl=uses_pdl(y.device),
        interpreted=INTERPRETED,
    )
    grid = (len(tiles), triton.cdiv(y.shape[0], variant.tokens))
    _expand[grid](
        y, slots, factors, partial, y.shape[0], columns, num_slots, y.stride(0), splits, tiles.start, first_column,
        VARIANT=variant, **options(y.device, 8 if variant.group > 1 else 4, 2),
    )  # fmt: skip


def make_tiles(widths: list[int], device: torch.device) -> tuple[Tensor, list[range]]:
    """The tiles of matrices of these outputs, side by side: the table, and which entries are of each matrix."""
    entries: list[tuple[int, int, int]] = []
    size, ranges, first = tile_columns(sum(widths)), [], 0
    for part, width in enumerate(widths):
        begin = len(entries)
        entries += [(part, column, first + width) for column in range(first, first + width, size)]
        ranges.append(range(begin, len(entries)))
        first += width
    return torch.tensor(entries, dtype=torch.int32, device=device), ranges
