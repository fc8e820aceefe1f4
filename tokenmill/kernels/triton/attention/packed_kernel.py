"""Paged attention over quantized rows: codes are multiplied as they are, scales and zero points applied outside.

(code - zero) * scale of a key comes out of its scores, that of a value goes into its weight; so a code becomes a float
and nothing else, exactly. An element holds two codes, of an even and an odd dimension (int8: 16 bits, 4-bit codes: 8);
the two have their own operands and accumulators. Tiles and shares of keys are those of paged_kernel.py. Rotated rows
meet rotated queries (packed_store.py); the output is turned back at the end. KIND is that of packed_pages.py; where
even and odd dimensions have scales of their own (4), so have their scores and weights. Launched by packed.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.attention.paged_kernel import find_sequence, soften
from tokenmill.kernels.triton.attention.paged_merge import merge_parts
from tokenmill.kernels.triton.launch import begin
from tokenmill.kernels.triton.matmul.skinny import arrive_last

WEIGHT_SCALE = tl.constexpr(256.0)  # weight times scale of a value: small, and half precision ends at 6e-5


@triton.jit
def row_scales(numbers, KIND: tl.constexpr):
    """(scale, zero) of rows, float32."""
    if KIND == 2:
        scale = (numbers & -16).to(tl.float32, bitcast=True)
        return scale, (numbers & 15).to(tl.float32)
    else:
        scale = numbers.to(tl.float32)
        return scale, scale * 0.0


@triton.jit
def paired_scales(numbers):
    """(scale, zero) of the even and (scale, zero) of the odd dimensions of rows, float32: two halves in 32 bits."""
    even, odd = numbers.to(tl.int16), (numbers >> 16).to(tl.int16)
    even_scale = (even & -16).to(tl.float16, bitcast=True).to(tl.float32)
    odd_scale = (odd & -16).to(tl.float16, bitcast=True).to(tl.float32)
    return even_scale, (even & 15).to(tl.float32), odd_scale, (odd & 15).to(tl.float32)


@triton.jit
def widen_octets(codes):
    """Two int8 in 16 bits -> (low, high) as float16, each as the last byte of 1024 + 128 + code: instructions that
    convert would take most of the time."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, m;
        mov.b32 m, 0x64806480;
        xor.b32 u, $2, 0x80808080;
        prmt.b32 $0, u, 0x64646464, 0x4240;
        prmt.b32 $1, u, 0x64646464, 0x4341;
        sub.f16x2 $0, $0, m;
        sub.f16x2 $1, $1, m;
        }
        """,
        "=&r,=&r,r",
        [codes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def widen_halves(codes):
    """Two codes a byte -> (low, high) as float16, each as the last byte of 1024 + code."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 u, v, m;
        mov.b32 m, 0x64006400;
        and.b32 u, $4, 0x0f0f0f0f;
        shr.u32 v, $4, 4;
        and.b32 v, v, 0x0f0f0f0f;
        prmt.b32 $0, u, 0x64646464, 0x4140;
        prmt.b32 $1, u, 0x64646464, 0x4342;
        prmt.b32 $2, v, 0x64646464, 0x4140;
        prmt.b32 $3, v, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, m;
        sub.f16x2 $1, $1, m;
        sub.f16x2 $2, $2, m;
        sub.f16x2 $3, $3, m;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [codes],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def widen(codes, levels, KIND: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr):
    """Elements -> (even, odd) as floats."""
    if KIND < 2:
        if INTERPRET:
            return ((codes << 8) >> 8).to(COMPUTE), (codes >> 8).to(COMPUTE)
        even, odd = widen_octets(codes)
        return even.to(COMPUTE), odd.to(COMPUTE)
    elif KIND != 3 and not INTERPRET:
        even, odd = widen_halves(codes)
        return even.to(COMPUTE), odd.to(COMPUTE)
    else:
        low, high = codes & 15, codes >> 4
        if KIND == 3:
            return tl.load(levels + low.to(tl.int32)).to(COMPUTE), tl.load(levels + high.to(tl.int32)).to(COMPUTE)
        else:
            return low.to(COMPUTE), high.to(COMPUTE)


@triton.jit
def turned(x, matrix, HD: tl.constexpr, HDF: tl.constexpr, COMPUTE: tl.constexpr, BACK: tl.constexpr):
    """Rows [R, HDF] @ matrix / sqrt(HD), or (BACK) its inverse; scaled first, so that half precision holds them."""
    rows, columns = tl.arange(0, HDF), tl.arange(0, HDF)
    ok = (rows < HD)[:, None] & (columns < HD)[None, :]
    place = columns[None, :] * HD + rows[:, None] if BACK else rows[:, None] * HD + columns[None, :]
    operand = tl.load(matrix + place, mask=ok, other=0.0).to(COMPUTE)
    size = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    inverse_root: tl.constexpr = HD**-0.5
    return tl.dot((x / size[:, None]).to(COMPUTE), operand, input_precision="ieee") * (size * inverse_root)[:, None]


@triton.jit
def walk_packed(
    acc, acc_odd, shift, shift_odd, top, total, q_tile, q_odd, q_sum, q_odd_sum, table, k_codes, k_numbers,
    v_codes, v_numbers, levels, first, last, low, end, positions, scale, cap, page_codes, page_numbers,
    CB: tl.constexpr, CBP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr,
    CAP: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Key tiles [first, last): the running maximum, sum, weighted codes and (`shift`) weighted zero points of rows."""
    dims = tl.arange(0, CBP)
    for tile in range(first, last):
        keys = tile * BN + tl.arange(0, BN)
        inside = (keys < end) & (keys >= low)
        if MASKED:
            pages = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            pages = tl.load(table + keys // PAGE).to(tl.int64)
        places = (pages * page_codes + (keys % PAGE) * CB)[:, None] + dims[None, :]
        lines = pages * page_numbers + keys % PAGE
        if MASKED or CB != CBP:
            ok = (dims < CB)[None, :]
            if MASKED:
                ok &= inside[:, None]
            k_tile = tl.load(k_codes + places, mask=ok, other=0)
            v_tile = tl.load(v_codes + places, mask=ok, other=0)
        else:
            k_tile = tl.load(k_codes + places)
            v_tile = tl.load(v_codes + places)
        if MASKED:
            k_line = tl.load(k_numbers + lines, mask=inside, other=0)
            v_line = tl.load(v_numbers + lines, mask=inside, other=0)
        else:
            k_line, v_line = tl.load(k_numbers + lines), tl.load(v_numbers + lines)
        k_even, k_odd = widen(k_tile, levels, KIND, COMPUTE, INTERPRET)
        scores = tl.dot(q_tile, tl.trans(k_even), input_precision="ieee")
        if KIND == 4:
            k_scale, k_zero, odd_scale, odd_zero = paired_scales(k_line)
            odd_scores = tl.dot(q_odd, tl.trans(k_odd), input_precision="ieee")
            odd_scores -= q_odd_sum[:, None] * odd_zero[None, :]
            scores = (scores - q_sum[:, None] * k_zero[None, :]) * (k_scale * scale)[None, :]
            scores += odd_scores * (odd_scale * scale)[None, :]
        else:
            k_scale, k_zero = row_scales(k_line, KIND)
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
            if KIND == 2:
                scores -= (q_sum + q_odd_sum)[:, None] * k_zero[None, :]
            scores *= (k_scale * scale)[None, :]
        weights, shrink, top, total = soften(
            scores, keys, inside, positions, top, total, cap, WINDOW, CAP, MASKED
        )  # fmt: skip
        v_even, v_odd = widen(v_tile, levels, KIND, COMPUTE, INTERPRET)
        # Zero points: of the rounded weights, so that what large ones add to `acc` is taken off exactly.
        if KIND == 4:
            v_scale, v_zero, odd_scale, odd_zero = paired_scales(v_line)
            odd_weights = (weights * (odd_scale * WEIGHT_SCALE)[None, :]).to(COMPUTE)
            shift_odd = shift_odd * shrink + tl.sum(odd_weights.to(tl.float32) * odd_zero[None, :], 1)
        else:
            v_scale, v_zero = row_scales(v_line, KIND)
        weights = (weights * (v_scale * WEIGHT_SCALE)[None, :]).to(COMPUTE)
        acc = tl.dot(weights, v_even, acc * shrink[:, None], input_precision="ieee")
        if KIND == 4:
            acc_odd = tl.dot(odd_weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
        else:
            acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
        if KIND == 2 or KIND == 4:
            shift = shift * shrink + tl.sum(weights.to(tl.float32) * v_zero[None, :], 1)
    return acc, acc_odd, shift, shift_odd, top, total


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits"])
def _attend_packed(
    q, k_codes, k_numbers, v_codes, v_numbers, levels, turn, out, partial, partial_log, counter, block_table,
    query_starts, seq_lens, scale, cap, num_seqs, num_tokens, q_stride, out_stride, table_stride,
    page_codes, head_codes, page_numbers, head_numbers, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_P: tl.constexpr, HD: tl.constexpr, HDF: tl.constexpr,
    CBP: tl.constexpr, PAGE: tl.constexpr, FIRST_NUMBER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PREFILL: tl.constexpr, SINGLE_ONLY: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    KIND: tl.constexpr, TURNED: tl.constexpr, COMPUTE: tl.constexpr, TURNING: tl.constexpr, PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    """A program: BM rows, (token, head) pairs of one KV head's group; PREFILL a block of a sequence's tokens over all
    keys before them, else its one token over a share of the keys. FIRST_NUMBER: where a block's scales begin."""
    begin(PDL)
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    TOKENS: tl.constexpr = BM // GROUP
    CB: tl.constexpr = HD // 2  # elements of a row
    rows = tl.arange(0, BM)
    heads = kv_head.to(tl.int32) * GROUP + rows % GROUP
    ahead = 0
    if PREFILL:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
        seq = find_sequence(query_starts, block, num_seqs, TOKENS)
        start = tl.load(query_starts + seq)
        count = tl.load(query_starts + seq + 1) - start
        ahead = (block - (start // TOKENS + seq)) * TOKENS
        if (ahead >= count) | (count == 1):
            return
    else:
        seq = tl.program_id(0)
        start = tl.load(query_starts + seq)
        count = tl.load(query_starts + seq + 1) - start
        if SINGLE_ONLY:  # noqa: SIM102 (longer ones are the prefill launch's)
            if count != 1:
                return
    length = tl.load(seq_lens + seq)
    live = (ahead + rows // GROUP < count) & (rows < TOKENS * GROUP)
    known = length - count + ahead  # tokens before the block
    positions = known + rows // GROUP
    end = tl.minimum(length, known + TOKENS)
    low = 0
    if WINDOW:
        low = tl.maximum(known - WINDOW + 1, 0)
    tokens = (start + ahead + rows // GROUP).to(tl.int64)
    table = block_table + seq.to(tl.int64) * table_stride

    dims = tl.arange(0, CBP)
    row_ok = live[:, None] & (dims < CB)[None, :]
    q_place = q + tokens[:, None] * q_stride + heads[:, None] * HD + dims[None, :] * 2
    q_tile = tl.load(q_place, mask=row_ok, other=0.0).to(COMPUTE)
    q_odd = tl.load(q_place + 1, mask=row_ok, other=0.0).to(COMPUTE)
    q_sum, q_odd_sum = tl.sum(q_tile.to(tl.float32), 1), tl.sum(q_odd.to(tl.float32), 1)
    acc = tl.zeros([BM, CBP], dtype=tl.float32)
    acc_odd = tl.zeros([BM, CBP], dtype=tl.float32)
    k_block, v_block = k_codes + kv_head * head_codes, v_codes + kv_head * head_codes
    k_scales = k_numbers + kv_head * head_numbers + FIRST_NUMBER
    v_scales = v_numbers + kv_head * head_numbers + FIRST_NUMBER
    top = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    shift, shift_odd = tl.zeros([BM], dtype=tl.float32), tl.zeros([BM], dtype=tl.float32)
    first_tile, past_tile = low // BN, tl.cdiv(end, BN)
    tiles = past_tile - first_tile
    share = tiles
    if SPLIT:
        # Short sequences are shared out less: one tile each up to 16 shares, then two.
        share = tl.maximum(tl.cdiv(tiles, splits), tl.minimum(2, tl.cdiv(tiles, 16)))
        splits = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
        if split >= splits:
            return
    first_tile += split * share
    past_tile = tl.minimum(past_tile, first_tile + share)
    past_whole = first_tile
    if not WINDOW:
        past_whole = tl.maximum(tl.minimum((known + 1) // BN, past_tile), first_tile)
        acc, acc_odd, shift, shift_odd, top, total = walk_packed(
            acc, acc_odd, shift, shift_odd, top, total, q_tile, q_odd, q_sum, q_odd_sum, table, k_block, k_scales,
            v_block, v_scales, levels, first_tile, past_whole, low, end, positions, scale, cap, page_codes,
            page_numbers, CB, CBP, PAGE, BN, WINDOW, CAP, False, KIND, COMPUTE, INTERPRET,
        )  # fmt: skip
    acc, acc_odd, shift, shift_odd, top, total = walk_packed(
        acc, acc_odd, shift, shift_odd, top, total, q_tile, q_odd, q_sum, q_odd_sum, table, k_block, k_scales,
        v_block, v_scales, levels, past_whole, past_tile, low, end, positions, scale, cap, page_codes, page_numbers,
        CB, CBP, PAGE, BN, WINDOW, CAP, True, KIND, COMPUTE, INTERPRET,
    )  # fmt: skip

    norm = 1.0 / (tl.where(total == 0.0, 1.0, total) * WEIGHT_SCALE)
    acc = (acc - shift[:, None]) * norm[:, None]
    acc_odd = (acc_odd - (shift_odd if KIND == 4 else shift)[:, None]) * norm[:, None]
    every = tl.arange(0, HDF)
    if not SPLIT:
        out_row = out + tokens[:, None] * out_stride + heads[:, None] * HD
        if TURNED:
            whole = tl.reshape(tl.join(acc, acc_odd), [BM, HDF])
            whole = tl.where((every < HD)[None, :], whole, 0.0)
            whole = turned(whole, turn, HD, HDF, TURNING, True)
            ok = live[:, None] & (every < HD)[None, :]
            tl.store(out_row + every[None, :], whole.to(out.dtype.element_ty), mask=ok)
        else:
            tl.store(out_row + dims[None, :] * 2, acc.to(out.dtype.element_ty), mask=row_ok)
            tl.store(out_row + dims[None, :] * 2 + 1, acc_odd.to(out.dtype.element_ty), mask=row_ok)
    else:
        log = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        line = (split.to(tl.int64) * num_tokens + tokens) * HEADS + heads
        tl.store(partial_log + line, log, mask=live)
        filled = row_ok & (total > 0.0)[:, None]
        tl.store(partial + line[:, None] * HD + dims[None, :] * 2, acc, mask=filled)
        tl.store(partial + line[:, None] * HD + dims[None, :] * 2 + 1, acc_odd, mask=filled)
        number = counter + seq * tl.num_programs(1) + tl.program_id(1)
        if arrive_last(number, splits):
            tl.store(number, 0)
            group_heads = tl.arange(0, GROUP_P)
            valid = group_heads < GROUP
            first_line = start.to(tl.int64) * HEADS + kv_head * GROUP
            merged = merge_parts(
                partial, partial_log, first_line + group_heads, valid, num_tokens, 0, splits, HEADS, HD, HDF, GROUP_P
            )
            if TURNED:
                merged = turned(merged, turn, HD, HDF, TURNING, True)
            place = out + start.to(tl.int64) * out_stride + (kv_head * GROUP + group_heads)[:, None] * HD
            ok = valid[:, None] & (every < HD)[None, :]
            tl.store(place + every[None, :], merged.to(out.dtype.element_ty), mask=ok)
