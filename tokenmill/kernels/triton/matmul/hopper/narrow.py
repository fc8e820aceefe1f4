"""4-bit groups times 65 to 128 tokens (or 257 and more), for Hopper: every warp unpacks and multiplies.

grouped.py's layout and meaning (`GroupedWeight` of 4 bits, groups of 32 or more). Written in Gluon, since plain Triton
makes the tensor cores wait for every unpacked operand. choose.py says when; 129 to 256 tokens are wide.py's.

A program of eight warps has a tile of 256 rows of the matrix, two accumulators float32 [HALF = 128, TOKENS = 128], and
walks blocks of codes, 256 of the depth each, in PARTS = 8 stretches of 32. Per block:

  1. codes of a block, int32 [2 x 128, 32], and tokens [128, 256] in two halves, arrive by TMA, two blocks ahead;
     copies are spread over the block, each into room that was freed before, so that they overlap the products
  2. scales of the next block are loaded to registers; those of this one are there
  3. for each stretch: unpack [128, 32] x 2 operands in registers, issue two wgmma [128, 32] x [32, 128], and wait only
     for the two before: the tensor cores work while the next operands are unpacked
  4. codes of the next block go from shared memory to registers beside the last stretch

Scales are multiplied into the weights. Programs that split the depth of a tile exchange float32 sums through global
memory at the end; the launcher starts no more of them than run at once, since they wait for each other.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.hopper.unpack import WORDS, halves_of, load_lines, unpack
from tokenmill.kernels.triton.matmul.tile import SplitSums
from tokenmill.kernels.triton.shared.gluon_device import barrier, launch_dependents, silu_gate, wait_for_predecessor
from tokenmill.kernels.triton.shared.launch import gluon_options, num_processors, uses_pdl, workspace

HALF = gl.constexpr(128)  # rows of the matrix in an accumulator; a program has two
TOKENS = gl.constexpr(128)  # of a program
PARTS = gl.constexpr(8)  # stretches of a block
SLOTS = gl.constexpr(4)  # stretches of tokens that are fetched together
MAX_SPLITS = 8
WARPS = 8


@gluon.jit
def fetch_codes(source, room, arrived, stage, row0, row1, wanted):
    mbarrier.expect(arrived.index(stage), 2 * source.block_type.nbytes, pred=wanted)
    tma.async_copy_global_to_shared(source, [row0, 0], arrived.index(stage), room.index(2 * stage), pred=wanted)
    tma.async_copy_global_to_shared(source, [row1, 0], arrived.index(stage), room.index(2 * stage + 1), pred=wanted)


@gluon.jit
def fetch_tokens(source, room, arrived, quarter, token, depth, wanted):
    """The tokens for half a block: SLOTS stretches of the depth."""
    bar = arrived.index(quarter)
    mbarrier.expect(bar, SLOTS * source.block_type.nbytes, pred=wanted)
    for slot in gl.static_range(SLOTS):
        place = [token, depth + slot * WORDS]
        tma.async_copy_global_to_shared(source, place, bar, room.index(quarter * SLOTS + slot), pred=wanted)


@gluon.jit
def write_rows(values, out, row, token, M, N, out_stride):
    """values [rows, TOKENS] -> out [token ..., row ...], through shared memory so that rows are written whole."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    transposed = gl.convert_layout(gl.permute(values.to(out.dtype.element_ty), (1, 0)), WIDE)
    tokens = token + gl.arange(0, TOKENS, gl.SliceLayout(1, WIDE))
    rows = row + gl.arange(0, values.shape[0], gl.SliceLayout(0, WIDE))
    place = out + tokens[:, None].to(gl.int64) * out_stride + rows[None, :]
    gl.store(place, transposed, mask=(tokens < M)[:, None] & (rows < N)[None, :])


@gluon.jit
def add_splits(acc0, acc1, out, sums, number, tiles, split, row, token, M, N, out_stride, SPLITS: gl.constexpr):
    """Sums of the programs that split a tile's depth: all write theirs, wait for each other, and each adds up a share
    of the rows. All of them run at once (the launcher sees to it), so waiting ends."""
    partial, counter = sums.partial, sums.counters
    ACC: gl.constexpr = acc0.type.layout
    SIZE: gl.constexpr = 2 * HALF * TOKENS
    rows = gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    columns = gl.arange(0, TOKENS, gl.SliceLayout(0, ACC))
    place = partial + (split * tiles + number).to(gl.int64) * SIZE + rows[:, None] * TOKENS + columns[None, :]
    gl.store(place, acc0)
    gl.store(place + HALF * TOKENS, acc1)
    barrier()
    arrived = gl.atomic_add(counter + number, 1, sem="acq_rel", scope="gpu") + 1
    while arrived < SPLITS:
        arrived = gl.atomic_add(counter + number, 0, sem="acquire", scope="gpu")
    barrier()
    SHARE: gl.constexpr = 2 * HALF // SPLITS
    LONG: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    own = split * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, LONG))
    inside = own[:, None] * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(0, LONG))[None, :]
    total = gl.zeros([SHARE, TOKENS], gl.float32, LONG)
    for other in gl.static_range(SPLITS):
        start = (other * tiles + number).to(gl.int64) * SIZE
        total += gl.load(partial + start + inside, cache_modifier=".cg")
    write_rows(total, out, row + split * SHARE, token, M, N, out_stride)
    # The last to have seen all arrive resets the counter.
    if gl.atomic_add(counter + number, 1, sem="relaxed", scope="gpu") == 2 * SPLITS - 1:
        gl.store(counter + number, 0)


@gluon.jit(do_not_specialize=["M"])
def _multiply(
    token_source,
    code_source,
    weight,
    bias,
    out,
    sums,
    M,
    N,
    steps,
    out_stride,
    GROUP: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Grid (token tiles, row tiles, splits); the stages are those of the module's head."""
    AFFINE: gl.constexpr = weight.zeros is not None
    scales, zeros = weight.scales, weight.zeros
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINES: gl.constexpr = PARTS * WORDS // GROUP
    TYPE: gl.constexpr = token_source.dtype
    PER_LINE: gl.constexpr = GROUP // WORDS
    DEPTH: gl.constexpr = PARTS * WORDS
    token_tile, tile, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    token = token_tile * TOKENS
    if GATED:  # the second half has the rows that are multiplied with those of the first
        row0 = tile * HALF
        row1 = row0 + N // 2
    else:
        row0 = tile * (2 * HALF)
        row1 = row0 + HALF
    per_split = gl.cdiv(steps, SPLITS)
    first = split * per_split
    last = gl.minimum(first + per_split, steps)
    # 64 KiB of codes, two blocks of two halves; 128 KiB of tokens, two blocks of eight stretches.
    codes = gl.allocate_shared_memory(gl.int32, [4, HALF, WORDS], code_source.layout)
    inputs = gl.allocate_shared_memory(TYPE, [2 * PARTS, TOKENS, WORDS], token_source.layout)
    codes_arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    inputs_arrived = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(2):
        mbarrier.init(codes_arrived.index(number), count=1)
    for number in gl.static_range(4):
        mbarrier.init(inputs_arrived.index(number), count=1)
    # Stage 1 begins before the predecessor ends: weights depend on no earlier kernel, tokens do.
    for ahead in gl.static_range(2):
        start = (first + ahead) * N
        fetch_codes(code_source, codes, codes_arrived, ahead, start + row0, start + row1, first + ahead < last)
    inside = gl.arange(0, HALF, gl.SliceLayout(1, OPERAND))
    safe0, safe1 = gl.minimum(row0 + inside, N - 1), gl.minimum(row1 + inside, N - 1)
    scale0 = load_lines(scales + safe0 + first * LINES * N, N, LINES, TYPE)
    scale1 = load_lines(scales + safe1 + first * LINES * N, N, LINES, TYPE)
    zero0, zero1 = scale0, scale1
    if AFFINE:
        zero0 = load_lines(zeros + safe0 + first * LINES * N, N, LINES, TYPE)
        zero1 = load_lines(zeros + safe1 + first * LINES * N, N, LINES, TYPE)
    if PDL:
        launch_dependents()
        wait_for_predecessor()
    for number in gl.static_range(4):
        wanted = first + number // 2 < last
        fetch_tokens(token_source, inputs, inputs_arrived, number, token, first * DEPTH + number * (DEPTH // 2), wanted)
    acc0 = gl.zeros([HALF, TOKENS], gl.float32, ACC)
    acc1 = gl.zeros([HALF, TOKENS], gl.float32, ACC)
    mbarrier.wait(codes_arrived.index(0), 0)
    low0, high0 = halves_of(codes.index(0).load(OPERAND))
    low1, high1 = halves_of(codes.index(1).load(OPERAND))
    # The first operand of a block is made while the last product of the one before runs.
    now0 = unpack(low0, scale0[0], zero0[0], 0, AFFINE)
    now1 = unpack(low1, scale1[0], zero1[0], 0, AFFINE)
    for block in range(first, last):
        stage, phase = (block - first) & 1, ((block - first) >> 1) & 1
        following = gl.minimum(block + 1, last - 1) * LINES * N  # stage 2
        next0 = load_lines(scales + safe0 + following, N, LINES, TYPE)
        next1 = load_lines(scales + safe1 + following, N, LINES, TYPE)
        later = block + 2
        mbarrier.wait(inputs_arrived.index(stage * 2), phase)
        before0, before1 = now0, now1
        acc0 = warpgroup_mma(before0, inputs.index(stage * PARTS).permute((1, 0)), acc0, is_async=True)
        acc1 = warpgroup_mma(before1, inputs.index(stage * PARTS).permute((1, 0)), acc1, is_async=True)
        # The second half of the next block's tokens: its room was freed by the block before this one.
        start = (block + 1) * DEPTH + DEPTH // 2
        wanted = (block > first) & (block + 1 < last)
        fetch_tokens(token_source, inputs, inputs_arrived, (stage ^ 1) * 2 + 1, token, start, wanted)
        for part in gl.static_range(1, PARTS):
            halves0 = low0 if part < 4 else high0
            halves1 = low1 if part < 4 else high1
            now0 = unpack(halves0, scale0[part // PER_LINE], zero0[part // PER_LINE], part % 4, AFFINE)
            now1 = unpack(halves1, scale1[part // PER_LINE], zero1[part // PER_LINE], part % 4, AFFINE)
            if part == SLOTS:
                mbarrier.wait(inputs_arrived.index(stage * 2 + 1), phase)
            if part == PARTS - 1:  # stage 4; after the last block it reads whatever lies there
                if block + 1 < last:
                    mbarrier.wait(codes_arrived.index(stage ^ 1), ((block + 1 - first) >> 1) & 1)
                words0 = codes.index(2 * (stage ^ 1)).load(OPERAND)
                words1 = codes.index(2 * (stage ^ 1) + 1).load(OPERAND)
            acc0 = warpgroup_mma(now0, inputs.index(stage * PARTS + part).permute((1, 0)), acc0, is_async=True)
            acc1 = warpgroup_mma(now1, inputs.index(stage * PARTS + part).permute((1, 0)), acc1, is_async=True)
            # Two may be pending: the products before these two are done, and their operands are free.
            acc0, acc1, before0, before1 = warpgroup_mma_wait(2, deps=(acc0, acc1, before0, before1))
            if part == 2:
                start = later * N
                fetch_codes(code_source, codes, codes_arrived, stage, start + row0, start + row1, later < last)
            if part == SLOTS:
                fetch_tokens(token_source, inputs, inputs_arrived, stage * 2, token, later * DEPTH, later < last)
            before0, before1 = now0, now1
        low0, high0 = halves_of(words0)
        low1, high1 = halves_of(words1)
        if AFFINE:
            zero0 = load_lines(zeros + safe0 + following, N, LINES, TYPE)
            zero1 = load_lines(zeros + safe1 + following, N, LINES, TYPE)
        scale0, scale1 = next0, next1
        now0 = unpack(low0, scale0[0], zero0[0], 0, AFFINE)
        now1 = unpack(low1, scale1[0], zero1[0], 0, AFFINE)
        deps = (acc0, acc1, before0, before1, now0, now1)
        acc0, acc1, before0, before1, now0, now1 = warpgroup_mma_wait(0, deps=deps)
    rows = gl.arange(0, HALF, gl.SliceLayout(1, ACC))
    of0, of1 = gl.minimum(row0 + rows, N - 1), gl.minimum(row1 + rows, N - 1)
    acc0 *= gl.load(weight.row_scale + of0)[:, None]
    acc1 *= gl.load(weight.row_scale + of1)[:, None]
    if bias is not None:
        alone = (split == 0).to(gl.float32)
        acc0 += (gl.load(bias + of0) * alone)[:, None]
        acc1 += (gl.load(bias + of1) * alone)[:, None]
    if GATED:
        write_rows(silu_gate(acc0, acc1, out.dtype.element_ty), out, row0, token, M, N // 2, out_stride)
    elif SPLITS > 1:
        tiles = gl.num_programs(0) * gl.num_programs(1)
        of_tile = tile * gl.num_programs(0) + token_tile
        add_splits(acc0, acc1, out, sums, of_tile, tiles, split, row0, token, M, N, out_stride, SPLITS)
    else:
        write_rows(acc0, out, row0, token, M, N, out_stride)
        write_rows(acc1, out, row1, token, M, N, out_stride)


@cache
def _layouts() -> tuple[gl.NVMMASharedLayout, gl.NVMMASharedLayout]:
    """Of a slot of tokens and of half a block of codes in shared memory."""
    tokens = gl.NVMMASharedLayout.get_default_for([TOKENS.value, WORDS.value], gl.bfloat16)
    return tokens, gl.NVMMASharedLayout.get_default_for([HALF.value, WORDS.value], gl.int32)


def _choose_splits(tiles: int, steps: int, device: torch.device) -> int:
    """Programs that share a tile, a power of two: all must run at once, so no more than there are processors; none
    without work."""
    most = max(1, min(num_processors(device) // tiles, steps, MAX_SPLITS))
    splits = 1 << (most.bit_length() - 1)
    while splits > 1 and (splits - 1) * triton.cdiv(steps, splits) >= steps:
        splits //= 2
    return splits


def narrow_matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    gated: bool = False,
) -> Tensor:
    """x bf16 or float16 [M, K] @ weight^T (+ bias) -> [M, N]; `gated`: silu of the first half of the rows times
    the second."""
    assert weight.codes.shape[2] == WORDS.value <= weight.group, "another layout"
    assert not gated or weight.rows % (2 * HALF.value) == 0, "a tile would have rows of both halves"
    tokens, rows = x.shape[0], weight.rows
    out = torch.empty(tokens, rows // 2 if gated else rows, dtype=out_dtype, device=x.device)
    tiles, token_tiles = triton.cdiv(rows, 2 * HALF.value), triton.cdiv(tokens, TOKENS.value)
    steps = weight.codes.shape[0]
    splits = 1 if gated else _choose_splits(tiles * token_tiles, steps, x.device)
    scratch = workspace(x.device)
    partial = scratch.partials(splits * tiles * token_tiles * 2 * HALF.value * TOKENS.value if splits > 1 else 0)
    token_layout, code_layout = _layouts()
    _multiply[(token_tiles, tiles, splits)](
        TensorDescriptor.from_tensor(x.contiguous(), [TOKENS.value, WORDS.value], token_layout),
        TensorDescriptor.from_tensor(weight.codes.view(-1, WORDS.value), [HALF.value, WORDS.value], code_layout),
        weight.tensors,
        bias,
        out,
        SplitSums(partial, scratch.counters(tiles * token_tiles)),
        tokens,
        rows,
        steps,
        out.stride(0),
        GROUP=weight.group,
        GATED=gated,
        SPLITS=splits,
        PDL=uses_pdl(x.device),
        **gluon_options(x.device, WARPS),
    )
    return out
