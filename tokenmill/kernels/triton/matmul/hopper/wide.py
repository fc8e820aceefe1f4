"""4-bit groups times 129 to 256 tokens, for Hopper: narrow.py's product, warp-specialised.

A tile is 128 rows of the matrix x TOKENS = 256 tokens; a block of codes is DEPTH = 256 of the depth. A program is nine
warps in three roles, and per block:

  producer, 1 warp        (`fetch`)    TMA: codes int32 [128, 32] into a ring of STAGES = 3 blocks, tokens 16-bit
                                       [256, 64] into a ring of SLOTS = 5 quarters of a block
  consumers, 2 x 4 warps  (`consume`)  each ROWS = 64 rows and all 256 tokens, float32 [64, 256] in registers:
      1. scales (and zeros) of the next block: global memory -> registers, a block ahead
      2. codes of the block, int32 [64, 32]: shared memory -> registers, in the layout of wgmma's left operand
      3. four times: unpack [64, 64] (two stretches of nibbles) in registers, nothing moves between threads;
         issue wgmma [64, 64] x [64, 256]; wait for the one before, hand its quarter of tokens back
      4. at the end of a tile: write the result, or the sums where other programs have blocks of the tile too

Unpacking runs on other units than products. Within a consumer the operand of a quarter is unpacked while the product of
the quarter before runs; between the two consumers, which nothing synchronizes, one unpacks while the other multiplies.
Both read the same tokens, so each byte of them is copied once for 128 rows. Two barriers per ring slot: `arrived` (one
arrival and the bytes of the copies) and `free` (one arrival of each consumer); slot and phase follow from the number of
the block. Programs take equal shares of the blocks of all tiles (`plan_shares`), so that no processor idles; what they
share is added up in wide_epilogue.py. Called by linear.py.
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

from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.hopper.unpack import WORDS, halves_of, load_lines, unpack
from tokenmill.kernels.triton.matmul.hopper.wide_epilogue import (
    ROWS,
    TOKENS,
    Form,
    Result,
    Work,
    add_partners,
    finish_tile,
    row_at,
)
from tokenmill.kernels.triton.matmul.tile import SplitSums
from tokenmill.kernels.triton.shared.gluon_device import launch_dependents, wait_for_predecessor
from tokenmill.kernels.triton.shared.launch import gluon_options, num_processors, uses_pdl, workspace

DEPTH = gl.constexpr(256)  # of a block of codes: eight stretches of 32, one for each nibble of a word
SLOT = gl.constexpr(64)  # depth of a slot of tokens: two stretches
QUARTERS = gl.constexpr(4)  # slots of a block
STAGES = gl.constexpr(3)  # blocks of codes in shared memory: 3 x 16 KiB
SLOTS = gl.constexpr(5)  # of tokens in shared memory: 5 x 32 KiB
# Of a thread. A consumer's holds 128 of the accumulator, codes and two operands; the producer needs few.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
MAX_PARTNERS, MAX_GATED_PARTNERS = 8, 4  # programs that share a tile; sums of gated rows come by sixteen


class Ring(NamedTuple):
    """Codes and tokens in shared memory, and their barriers."""

    codes: Any  # int32 [STAGES * 2 consumers * boxes, rows of a box, WORDS]
    inputs: Any  # 16-bit floats [SLOTS, TOKENS, SLOT]
    codes_arrived: Any
    codes_free: Any
    inputs_arrived: Any
    inputs_free: Any


@gluon.jit
def make_operand(codes, scale, zero, QUARTER: gl.constexpr, FORM: gl.constexpr):
    """The weights of a quarter, two neighbouring stretches [ROWS, SLOT]; nothing moves between threads."""
    halves = codes[QUARTER // 2]
    PLACE: gl.constexpr = 2 * (QUARTER % 2)
    LEFT: gl.constexpr = 2 * QUARTER * WORDS // FORM.group
    RIGHT: gl.constexpr = (2 * QUARTER + 1) * WORDS // FORM.group
    left = unpack(halves, scale[LEFT], zero[LEFT], PLACE, FORM.affine)
    right = unpack(halves, scale[RIGHT], zero[RIGHT], PLACE + 1, FORM.affine)
    both = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, SLOT])
    return gl.convert_layout(both, halves.type.layout, assert_trivial=True)


@gluon.jit
def load_block(source, tile, block, part, N, FORM: gl.constexpr, LAYOUT: gl.constexpr, TYPE: gl.constexpr):
    """Stage 1: scales or zeros of a consumer's rows in a block."""
    LINES: gl.constexpr = DEPTH // FORM.group
    rows = row_at(gl.arange(0, ROWS, LAYOUT), tile, part, N, FORM)
    return load_lines(source + gl.minimum(rows, N - 1) + block * (LINES * N), N, LINES, TYPE)


@gluon.jit
def fetch_codes(source, ring, number, at, steps, N, wanted, FORM: gl.constexpr):
    """Copy a block of codes, 64 rows for each consumer; gated rows come in boxes of eight, see `row_at`."""
    stage, tile = number % STAGES, at // steps
    BOXES: gl.constexpr = ROWS // FORM.box
    mbarrier.wait(ring.codes_free.index(stage), ((number // STAGES) & 1) ^ 1, pred=wanted)
    mbarrier.expect(ring.codes_arrived.index(stage), 2 * BOXES * source.block_type.nbytes, pred=wanted)
    for part in gl.static_range(2):
        for box in gl.static_range(BOXES):
            row = (at - tile * steps) * N + row_at(box * FORM.box, tile, part, N, FORM)
            room = ring.codes.index((stage * 2 + part) * BOXES + box)
            tma.async_copy_global_to_shared(source, [row, 0], ring.codes_arrived.index(stage), room, pred=wanted)


@gluon.jit
def fetch(token_source, code_source, ring, work, FORM: gl.constexpr):
    """The producer: all copies, of codes two blocks and of tokens up to SLOTS quarters ahead of the products."""
    begin, end, steps, N = work.begin, work.end, work.steps, work.N
    for ahead in gl.static_range(STAGES):
        fetch_codes(code_source, ring, ahead, begin + ahead, steps, N, begin + ahead < end, FORM)
    if FORM.pdl:  # weights depend on no earlier kernel, tokens do
        wait_for_predecessor()
    for at in range(begin, end):
        for quarter in gl.static_range(QUARTERS):
            if quarter == 2:  # the wait of the quarter before has seen the block of codes freed whose room this takes
                later = at + STAGES - 1
                fetch_codes(code_source, ring, later - begin, later, steps, N, (at > begin) & (later < end), FORM)
            number = (at - begin) * QUARTERS + quarter
            slot = number % SLOTS
            mbarrier.wait(ring.inputs_free.index(slot), ((number // SLOTS) & 1) ^ 1)
            mbarrier.expect(ring.inputs_arrived.index(slot), token_source.block_type.nbytes)
            place = [work.token, (at % steps) * DEPTH + quarter * SLOT]
            room = ring.inputs.index(slot)
            tma.async_copy_global_to_shared(token_source, place, ring.inputs_arrived.index(slot), room)


@gluon.jit
def take_codes(ring, number, wanted, part, LAYOUT: gl.constexpr):
    """Stage 2: a block of a consumer's codes; whatever lies there where none is wanted."""
    blocks = ring.codes._reinterpret(gl.int32, [STAGES * 2, ROWS, WORDS], ring.codes.type.layout)
    stage = number % STAGES
    mbarrier.wait(ring.codes_arrived.index(stage), (number // STAGES) & 1, pred=wanted)
    return blocks.index(stage * 2 + part).load(LAYOUT)


@gluon.jit
def multiply(operand, acc, ring, at):
    """Issue the product with one quarter of a block of tokens."""
    slot = at % SLOTS
    mbarrier.wait(ring.inputs_arrived.index(slot), (at // SLOTS) & 1)
    return warpgroup_mma(operand, ring.inputs.index(slot).permute((1, 0)), acc, is_async=True)


@gluon.jit
def take_block(acc, words, scale, zero, ring, number, FORM: gl.constexpr):
    """Stage 3: the products of a block. The last is still pending, with the operand that is returned; every other is
    waited for with one behind it: its operand is free then, and the next is unpacked while that one runs."""
    codes, at = halves_of(words), number * QUARTERS
    now = make_operand(codes, scale, zero, 0, FORM)
    acc = multiply(now, acc, ring, at)
    for quarter in gl.static_range(1, QUARTERS):
        before = now
        now = make_operand(codes, scale, zero, quarter, FORM)
        acc = multiply(now, acc, ring, at + quarter)
        acc, before = warpgroup_mma_wait(1, deps=(acc, before))
        if quarter == 1:
            # Only now is the block of codes given back: products were issued with all of it, so it has arrived in
            # registers. A read that is merely issued can be overtaken by the copy engine's next write.
            fence_async_shared()
            mbarrier.arrive(ring.codes_free.index(number % STAGES), count=1)
        mbarrier.arrive(ring.inputs_free.index((at + quarter - 1) % SLOTS), count=1)
    return acc, now


@gluon.jit
def consume(ring, scales, zeros, result, work, part: gl.constexpr, FORM: gl.constexpr):
    """A consumer: its rows of all blocks that the program has; the stages are those of the module's head."""
    begin, end, steps, share, N = work.begin, work.end, work.steps, work.share, work.N
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, OPERAND)
    scale = load_block(scales, begin // steps, begin % steps, part, N, FORM, LINE, ring.inputs.dtype)
    words = take_codes(ring, 0, True, part, OPERAND)
    if FORM.pdl:
        wait_for_predecessor()
    for tile in range(begin // steps, gl.cdiv(end, steps)):
        first, last = gl.maximum(begin - tile * steps, 0), gl.minimum(end - tile * steps, steps)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for block in range(first, last):
            number = tile * steps + block - begin
            # Codes and scales are read a block ahead, at the end of a tile those of the next one.
            ends, more = block + 1 == steps, number + 1 < end - begin
            next_tile = gl.where(ends & more, tile + 1, tile)
            next_block = gl.where(more, gl.where(ends, 0, block + 1), block)
            next_scale = load_block(scales, next_tile, next_block, part, N, FORM, LINE, ring.inputs.dtype)
            zero = scale
            if FORM.affine:
                zero = load_block(zeros, tile, block, part, N, FORM, LINE, ring.inputs.dtype)
            acc, before = take_block(acc, words, scale, zero, ring, number, FORM)
            words = take_codes(ring, number + 1, more, part, OPERAND)
            acc, before = warpgroup_mma_wait(0, deps=(acc, before))
            mbarrier.arrive(ring.inputs_free.index((number * QUARTERS + QUARTERS - 1) % SLOTS), count=1)
            scale = next_scale
        finish_tile(acc, result, work, tile, first, part, FORM)
    if FORM.partners > 1:
        for tile in range(begin // steps, gl.cdiv(end, steps)):
            if (tile * steps) // share != ((tile + 1) * steps - 1) // share:
                add_partners(result, work, tile, part, FORM)


@gluon.jit(do_not_specialize=["M", "steps", "share", "total"])
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
    share,
    total,
    out_stride,
    FORM: gl.constexpr,
):
    """Grid (token tiles, programs); `total` blocks of all row tiles, `steps` in each."""
    if FORM.pdl:
        launch_dependents()
    begin = gl.program_id(1) * share
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * (ROWS // FORM.box), FORM.box, WORDS], code_source.layout)
    inputs = gl.allocate_shared_memory(token_source.dtype, [SLOTS, TOKENS, SLOT], token_source.layout)
    codes_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    codes_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    inputs_arrived = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    inputs_free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for number in gl.static_range(STAGES):
        mbarrier.init(codes_arrived.index(number), count=1)
        mbarrier.init(codes_free.index(number), count=2)
    for number in gl.static_range(SLOTS):
        mbarrier.init(inputs_arrived.index(number), count=1)
        mbarrier.init(inputs_free.index(number), count=2)
    ring = Ring(codes, inputs, codes_arrived, codes_free, inputs_arrived, inputs_free)
    result = Result(weight.row_scale, bias, out, sums.partial, sums.counters, out_stride)
    work = Work(gl.program_id(0) * TOKENS, begin, gl.minimum(begin + share, total), steps, share, M, N)
    gl.warp_specialize(
        [
            (consume, (ring, weight.scales, weight.zeros, result, work, 0, FORM)),
            (consume, (ring, weight.scales, weight.zeros, result, work, 1, FORM)),
            (fetch, (token_source, code_source, ring, work, FORM)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )


@cache
def _layout(bits: int) -> gl.NVMMASharedLayout:
    """Of rows of 128 bytes in shared memory: codes, or a slot of tokens."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@cache
def plan_shares(tiles: int, steps: int, programs: int, max_partners: int) -> tuple[int, int]:
    """(Blocks that each program takes of those of all tiles, a power of two that bounds the programs of any tile)."""
    share = triton.cdiv(tiles * steps, programs)
    while True:
        partners = max(((t + 1) * steps - 1) // share - t * steps // share + 1 for t in range(tiles))
        if partners <= max_partners:
            return share, 1 << (partners - 1).bit_length()
        share += 1


def wide_matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    gated: bool = False,
) -> Tensor:
    """x bf16 or float16 [M, K] @ weight^T (+ bias) -> [M, N]; `gated`: silu of the first half of the rows times
    the second."""
    assert weight.codes.shape[2] == WORDS.value <= weight.group, "another layout"
    assert not gated or weight.rows % (2 * ROWS.value) == 0, "a tile would have rows of both halves"
    tokens, rows, steps = x.shape[0], weight.rows, weight.codes.shape[0]
    out = torch.empty(tokens, rows // 2 if gated else rows, dtype=out_dtype, device=x.device)
    tiles, token_tiles = triton.cdiv(rows, 2 * ROWS.value), triton.cdiv(tokens, TOKENS.value)
    # All programs must run at once, since they wait for each other; one alone per tile of tokens waits for nobody.
    programs = max(1, num_processors(x.device) // token_tiles)
    share, partners = plan_shares(tiles, steps, programs, MAX_GATED_PARTNERS if gated else MAX_PARTNERS)
    programs = triton.cdiv(tiles * steps, share)
    form = Form(weight.group, gated, partners, weight.zeros is not None, uses_pdl(x.device))
    scratch = workspace(x.device)
    size = 2 * programs * token_tiles * 2 * ROWS.value * TOKENS.value  # sums of a first and a last tile each
    _multiply[(token_tiles, programs)](
        TensorDescriptor.from_tensor(x.contiguous(), [TOKENS.value, SLOT.value], _layout(16)),
        TensorDescriptor.from_tensor(weight.codes.view(-1, WORDS.value), [form.box.value, WORDS.value], _layout(32)),
        weight.tensors,
        bias,
        out,
        SplitSums(scratch.partials(size if partners > 1 else 0), scratch.counters(2 * tiles * token_tiles)),
        tokens,
        rows,
        steps,
        share,
        tiles * steps,
        out.stride(0),
        FORM=form,
        **gluon_options(x.device, 4),
    )
    return out
