"""4-bit groups times 129 tokens or more, for Hopper: grouped_hopper.py's product with a role for every warp.

One warp of a program brings codes and tokens; two groups of four warps, the consumers, unpack and multiply
independently, so that the tensor cores have the products of one while the other prepares its own. A tile is 128 rows of
the matrix and 256 tokens; programs take equal shares of the blocks of all tiles, and what they share is added up in
grouped_hopper_ends.py. Called by grouped_hopper.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

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

from tokenmill.kernels.triton.launch import early, num_processors, workspace
from tokenmill.kernels.triton.matmul.grouped import GroupedWeight
from tokenmill.kernels.triton.matmul.grouped_hopper_ends import ROWS, TOKENS, Form, add_parts, finish_tile, row_at
from tokenmill.kernels.triton.matmul.grouped_hopper_unpack import WORDS, halves_of, load_lines, unpack

DEPTH = gl.constexpr(256)  # of a block of codes: eight stretches
SLOT = gl.constexpr(64)  # depth of a slot of tokens: two stretches
QUARTERS = gl.constexpr(4)  # slots of a block
STAGES = gl.constexpr(3)  # blocks of codes in shared memory
SLOTS = gl.constexpr(5)  # of tokens in shared memory
REGISTERS, FETCH_REGISTERS = gl.constexpr(240), gl.constexpr(24)  # of a consumer's and of the fetching warp's threads
MAX_PARTNERS, MAX_GATED_PARTNERS = 8, 4  # programs that share a tile; sums of gated rows come by sixteen


@gluon.jit
def make_operand(codes, scale, zero, QUARTER: gl.constexpr, FORM: gl.constexpr):
    """The weights of two neighbouring stretches, bf16 [ROWS, SLOT]; none of it moves between registers."""
    halves = codes[QUARTER // 2]
    PLACE: gl.constexpr = 2 * (QUARTER % 2)
    LEFT: gl.constexpr = 2 * QUARTER * WORDS // FORM.group
    RIGHT: gl.constexpr = (2 * QUARTER + 1) * WORDS // FORM.group
    left = unpack(halves, scale[LEFT], zero[LEFT], PLACE, FORM.affine)
    right = unpack(halves, scale[RIGHT], zero[RIGHT], PLACE + 1, FORM.affine)
    both = gl.join(left, right).permute((0, 2, 1)).reshape([ROWS, SLOT])
    return gl.convert_layout(both, halves.type.layout, assert_trivial=True)


@gluon.jit
def load_block(source, tile, block, part, N, FORM: gl.constexpr, LAYOUT: gl.constexpr):
    """Scales or zeros of a consumer's rows in a block."""
    LINES: gl.constexpr = DEPTH // FORM.group
    rows = row_at(gl.arange(0, ROWS, LAYOUT), tile, part, N, FORM)
    return load_lines(source + gl.minimum(rows, N - 1) + block * (LINES * N), N, LINES)


@gluon.jit
def fetch_codes(source, ring, number, at, steps, N, wanted, FORM: gl.constexpr):
    """A block of codes for both consumers."""
    codes, _inputs, codes_arrived, codes_free, _inputs_arrived, _inputs_free = ring
    stage, tile = number % STAGES, at // steps
    BOXES: gl.constexpr = ROWS // FORM.box
    mbarrier.wait(codes_free.index(stage), ((number // STAGES) & 1) ^ 1, pred=wanted)
    mbarrier.expect(codes_arrived.index(stage), 2 * BOXES * source.block_type.nbytes, pred=wanted)
    for part in gl.static_range(2):
        for box in gl.static_range(BOXES):
            row = (at - tile * steps) * N + row_at(box * FORM.box, tile, part, N, FORM)
            room = codes.index((stage * 2 + part) * BOXES + box)
            tma.async_copy_global_to_shared(source, [row, 0], codes_arrived.index(stage), room, pred=wanted)


@gluon.jit
def fetch(token_source, code_source, ring, work, FORM: gl.constexpr):
    """What one warp does: all copies, of codes two blocks and of tokens a block ahead of the products."""
    _codes, inputs, _codes_arrived, _codes_free, inputs_arrived, inputs_free = ring
    token, begin, end, steps, _share, _M, N, _out_stride = work
    for ahead in gl.static_range(STAGES):
        fetch_codes(code_source, ring, ahead, begin + ahead, steps, N, begin + ahead < end, FORM)
    if FORM.early:  # weights depend on no earlier kernel, tokens do
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    for at in range(begin, end):
        for quarter in gl.static_range(QUARTERS):
            if quarter == 2:  # the slot before this became free together with the block of codes that makes room here
                later = at + STAGES - 1
                fetch_codes(code_source, ring, later - begin, later, steps, N, (at > begin) & (later < end), FORM)
            number = (at - begin) * QUARTERS + quarter
            slot = number % SLOTS
            mbarrier.wait(inputs_free.index(slot), ((number // SLOTS) & 1) ^ 1)
            mbarrier.expect(inputs_arrived.index(slot), token_source.block_type.nbytes)
            place = [token, (at % steps) * DEPTH + quarter * SLOT]
            tma.async_copy_global_to_shared(token_source, place, inputs_arrived.index(slot), inputs.index(slot))


@gluon.jit
def take_codes(ring, number, wanted, part, LAYOUT: gl.constexpr):
    """A block of a consumer's codes; whatever lies there where none is wanted."""
    codes, _inputs, codes_arrived, _codes_free, _inputs_arrived, _inputs_free = ring
    blocks = codes._reinterpret(gl.int32, [STAGES * 2, ROWS, WORDS], codes.type.layout)
    stage = number % STAGES
    mbarrier.wait(codes_arrived.index(stage), (number // STAGES) & 1, pred=wanted)
    return blocks.index(stage * 2 + part).load(LAYOUT)


@gluon.jit
def multiply(operand, acc, ring, at):
    """Issue the product with one slot of tokens."""
    _codes, inputs, _codes_arrived, _codes_free, inputs_arrived, _inputs_free = ring
    slot = at % SLOTS
    mbarrier.wait(inputs_arrived.index(slot), (at // SLOTS) & 1)
    return warpgroup_mma(operand, inputs.index(slot).permute((1, 0)), acc, is_async=True)


@gluon.jit
def take_block(acc, words, scale, zero, ring, number, FORM: gl.constexpr):
    """The products of a block; the last is still on its way, with the operand that is returned. Every other is waited
    for with one behind it: its operand is free then, and the next is made while that one runs."""
    _codes, _inputs, _codes_arrived, codes_free, _inputs_arrived, inputs_free = ring
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
            mbarrier.arrive(codes_free.index(number % STAGES), count=1)
        mbarrier.arrive(inputs_free.index((at + quarter - 1) % SLOTS), count=1)
    return acc, now


@gluon.jit
def consume(ring, scales, zeros, tensors, work, part: gl.constexpr, FORM: gl.constexpr):
    """What four warps do."""
    _codes, _inputs, _codes_arrived, _codes_free, _inputs_arrived, inputs_free = ring
    _token, begin, end, steps, share, _M, N, _out_stride = work
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    LINE: gl.constexpr = gl.SliceLayout(1, OPERAND)
    scale = load_block(scales, begin // steps, begin % steps, part, N, FORM, LINE)
    words = take_codes(ring, 0, True, part, OPERAND)
    if FORM.early:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], gl.int32, False, 1)
    for tile in range(begin // steps, gl.cdiv(end, steps)):
        first, last = gl.maximum(begin - tile * steps, 0), gl.minimum(end - tile * steps, steps)
        acc = gl.zeros([ROWS, TOKENS], gl.float32, ACC)
        for block in range(first, last):
            number = tile * steps + block - begin
            # Codes and scales are read a block ahead, at the end of a tile those of the next one.
            ends, more = block + 1 == steps, number + 1 < end - begin
            next_tile = gl.where(ends & more, tile + 1, tile)
            next_block = gl.where(more, gl.where(ends, 0, block + 1), block)
            next_scale = load_block(scales, next_tile, next_block, part, N, FORM, LINE)
            zero = scale
            if FORM.affine:
                zero = load_block(zeros, tile, block, part, N, FORM, LINE)
            acc, before = take_block(acc, words, scale, zero, ring, number, FORM)
            words = take_codes(ring, number + 1, more, part, OPERAND)
            acc, before = warpgroup_mma_wait(0, deps=(acc, before))
            mbarrier.arrive(inputs_free.index((number * QUARTERS + QUARTERS - 1) % SLOTS), count=1)
            scale = next_scale
        finish_tile(acc, tensors, work, tile, first, part, FORM)
    if FORM.partners > 1:
        for tile in range(begin // steps, gl.cdiv(end, steps)):
            if (tile * steps) // share != ((tile + 1) * steps - 1) // share:
                add_parts(tensors, work, tile, part, FORM)


@gluon.jit(do_not_specialize=["M", "steps", "share", "total"])
def _multiply(
    token_source,
    code_source,
    scales,
    zeros,
    row_scale,
    bias,
    out,
    partial,
    counter,
    M,
    N,
    steps,
    share,
    total,
    out_stride,
    FORM: gl.constexpr,
):
    if FORM.early:
        gl.inline_asm_elementwise("griddepcontrol.launch_dependents; // $0", "=r", [], gl.int32, False, 1)
    begin = gl.program_id(1) * share
    codes = gl.allocate_shared_memory(gl.int32, [STAGES * 2 * (ROWS // FORM.box), FORM.box, WORDS], code_source.layout)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TOKENS, SLOT], token_source.layout)
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
    ring = (codes, inputs, codes_arrived, codes_free, inputs_arrived, inputs_free)
    tensors = (row_scale, bias, out, partial, counter)
    work = (gl.program_id(0) * TOKENS, begin, gl.minimum(begin + share, total), steps, share, M, N, out_stride)
    gl.warp_specialize(
        [
            (consume, (ring, scales, zeros, tensors, work, 0, FORM)),
            (consume, (ring, scales, zeros, tensors, work, 1, FORM)),
            (fetch, (token_source, code_source, ring, work, FORM)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )


@cache
def _layout(bits: int) -> gl.NVMMASharedLayout:
    """Of rows of 128 bytes in shared memory: codes, or a slot of tokens."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)


@cache
def plan_shares(tiles: int, steps: int, programs: int, most: int) -> tuple[int, int]:
    """How many of the tiles' blocks a program takes, and a power of two that no tile has more programs than."""
    share = triton.cdiv(tiles * steps, programs)
    while True:
        partners = max(((t + 1) * steps - 1) // share - t * steps // share + 1 for t in range(tiles))
        if partners <= most:
            return share, 1 << (partners - 1).bit_length()
        share += 1


def wide_matmul(
    x: Tensor,
    weight: GroupedWeight,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    gated: bool = False,
) -> Tensor:
    """x bf16 [M, K] @ weight^T (+ bias) -> [M, N]; `gated`: silu of the first half of the rows times the second."""
    assert weight.codes.shape[2] == WORDS.value <= weight.group, "another layout"
    assert not gated or weight.rows % (2 * ROWS.value) == 0, "a tile would have rows of both halves"
    tokens, rows, steps = x.shape[0], weight.rows, weight.codes.shape[0]
    out = torch.empty(tokens, rows // 2 if gated else rows, dtype=out_dtype, device=x.device)
    tiles, token_tiles = triton.cdiv(rows, 2 * ROWS.value), triton.cdiv(tokens, TOKENS.value)
    # All programs must run at once, since they wait for each other; one alone per tile of tokens waits for nobody.
    most = max(1, num_processors(x.device) // token_tiles)
    share, partners = plan_shares(tiles, steps, most, MAX_GATED_PARTNERS if gated else MAX_PARTNERS)
    programs, ahead = triton.cdiv(tiles * steps, share), early(x.device)
    form = Form(weight.group, gated, partners, weight.zeros is not None, bias is not None, ahead)
    scratch = workspace(x.device)
    sums = 2 * programs * token_tiles * 2 * ROWS.value * TOKENS.value  # of a first and a last tile each
    _multiply[(token_tiles, programs)](
        TensorDescriptor.from_tensor(x.contiguous(), [TOKENS.value, SLOT.value], _layout(16)),
        TensorDescriptor.from_tensor(weight.codes.view(-1, WORDS.value), [form.box.value, WORDS.value], _layout(32)),
        weight.scales,
        weight.zeros,
        weight.row_scale,
        bias,
        out,
        scratch.partials(sums if partners > 1 else 0),
        scratch.counters(2 * tiles * token_tiles),
        tokens,
        rows,
        steps,
        share,
        tiles * steps,
        out.stride(0),
        FORM=form,
        num_warps=4,
        **({"launch_pdl": True} if ahead else {}),
    )
    return out
