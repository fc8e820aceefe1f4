"""Paged attention: one flash-style kernel for decoding, (chunked) prefill and shared prefixes.

A program takes BM rows, each a (token, head) pair of one KV head's group, and walks key tiles gathered through the page
table with a running softmax in base 2. Which rows and keys: ATTEND_DECODE one token of a sequence, a share of its keys;
ATTEND_PREFILL a block of tokens, all keys before them; ATTEND_SHARED the single tokens of many sequences stacked, a
share of the keys they have in common. Launched by paged.py; paged_merge.py joins the shares.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.attention.paged_merge import merge_parts
from tokenmill.kernels.triton.launch import begin
from tokenmill.kernels.triton.matmul.skinny import arrive_last

ATTEND_DECODE = tl.constexpr(0)
ATTEND_PREFILL = tl.constexpr(1)
ATTEND_SHARED = tl.constexpr(2)


@triton.jit
def find_sequence(query_starts, block, num_seqs, TOKENS: tl.constexpr):
    """The sequence whose token blocks include `block` when every one has cdiv(count, TOKENS) or one more of them."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(query_starts + middle) // TOKENS + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def widen_pairs(pairs, INTERPRET: tl.constexpr):
    """int16, each two e4m3 bytes -> (low, high) as float16 / 256: the bits fit one place further right, exactly."""
    if INTERPRET:
        low = ((pairs << 8) & -32768) | ((pairs & 127) << 7)
        high = (pairs & -32768) | ((pairs >> 1) & 0x3F80)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            shl.b32 a, $2, 8;
            and.b32 b, a, 0x80008000;
            shr.u32 a, a, 1;
            lop3.b32 $0, a, 0x3f803f80, b, 0xea;
            and.b32 b, $2, 0x80008000;
            shr.u32 a, $2, 1;
            lop3.b32 $1, a, 0x3f803f80, b, 0xea;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def soften(
    scores, keys, inside, positions, top, total, cap, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Scores of a tile of keys -> weights under the running maximum of each row: (weights, what the sums gathered
    before shrink by, the new maximum and total)."""
    if CAP:
        # cap * tanh(s / cap) in units of log2(e): the scale has no log2(e) in it here
        scores = cap * 1.4426950408889634 * (2 * tl.sigmoid(2 * scores / cap) - 1)
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & inside[None, :]
        if WINDOW:
            visible &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    safe_top = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
    weights = tl.exp2(scores - safe_top[:, None])
    shrink = tl.exp2(top - safe_top)
    return weights, shrink, new_top, total * shrink + tl.sum(weights, 1)


@triton.jit
def walk_tiles(
    acc,
    acc_odd,
    top,
    total,
    q_tile,
    q_odd,
    table,
    k_base,
    v_base,
    first,
    last,
    low,
    end,
    positions,
    scale,
    cap,
    page_stride,
    HD: tl.constexpr,
    HDP: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    MASKED: tl.constexpr,
    LOW: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COMPUTE: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """Key tiles [first, last): update the running maximum, sum and weighted values of every row.

    MASKED: some keys may lie past `end`, after a row's position, outside its window or (LOW) before `low`. QUANTIZED:
    HD counts pairs; the odd dimensions have their own operand and accumulator: nothing needs interleaving."""
    dims = tl.arange(0, HDP)
    for tile in range(first, last):
        keys = tile * BN + tl.arange(0, BN)
        inside = keys < end
        if MASKED:
            if LOW:
                inside &= keys >= low
            pages = tl.load(table + keys // PAGE, mask=inside, other=0)
        else:
            pages = tl.load(table + keys // PAGE)
        places = pages.to(tl.int64) * page_stride + (keys % PAGE) * HD
        if MASKED or HD != HDP:
            ok = (dims < HD)[None, :]
            if MASKED:
                ok &= inside[:, None]
            k_tile = tl.load(k_base + places[:, None] + dims[None, :], mask=ok, other=0)
            v_tile = tl.load(v_base + places[:, None] + dims[None, :], mask=ok, other=0)
        else:
            k_tile = tl.load(k_base + places[:, None] + dims[None, :])
            v_tile = tl.load(v_base + places[:, None] + dims[None, :])
        if QUANTIZED:
            k_even, k_odd = widen_pairs(k_tile, INTERPRET)
            scores = tl.dot(q_tile, tl.trans(k_even), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(q_tile, tl.trans(k_tile.to(COMPUTE)), input_precision="ieee") * scale
        weights, shrink, top, total = soften(
            scores, keys, inside, positions, top, total, cap, WINDOW, CAP, MASKED
        )  # fmt: skip
        weights = weights.to(COMPUTE)
        if QUANTIZED:
            v_even, v_odd = widen_pairs(v_tile, INTERPRET)
            acc = tl.dot(weights, v_even, acc * shrink[:, None], input_precision="ieee")
            acc_odd = tl.dot(weights, v_odd, acc_odd * shrink[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, v_tile.to(COMPUTE), acc * shrink[:, None], input_precision="ieee")
    return acc, acc_odd, top, total


# Numbers that change from step to step do not make another kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits", "first_slot"])
def _attend(
    q,
    k_pages,
    v_pages,
    out,
    partial,
    partial_log,
    counter,
    block_table,
    query_starts,
    seq_lens,
    shared,
    k_scale,
    v_scale,
    scale,
    cap,
    num_seqs,
    num_tokens,
    q_stride,
    out_stride,
    table_stride,
    page_stride,
    head_stride,
    splits,
    first_slot,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    HD: tl.constexpr,
    HDP: tl.constexpr,
    HDF: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    MODE: tl.constexpr,
    SPLIT: tl.constexpr,
    CASCADE: tl.constexpr,
    SINGLE_ONLY: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    begin(PDL)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = BM // GROUP  # tokens of a block; BM - TOKENS * GROUP rows are idle
    rows = tl.arange(0, BM)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP

    # Which tokens (rows of q), at which positions, over which keys [low, end) of whose page table.
    if MODE == 2:  # shared: int32 [3] = first sequence, one past the last, tokens in common
        first_seq, past_seq = tl.load(shared), tl.load(shared + 1)
        low, end = 0, tl.load(shared + 2)
        tokens = first_seq + tl.program_id(0) * TOKENS + tokens
        live = (tokens < past_seq) & (rows < TOKENS * GROUP)
        positions = tl.zeros([BM], dtype=tl.int32) + end
        table = block_table + first_seq.to(tl.int64) * table_stride
        unmasked_end = end
        if first_seq + tl.program_id(0) * TOKENS >= past_seq:
            end = 0
        seq = first_seq
    else:
        if MODE == 1:
            block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
            seq = find_sequence(query_starts, block, num_seqs, TOKENS)
        else:
            block = tl.program_id(0)
            seq = block
        start = tl.load(query_starts + seq)
        count = tl.load(query_starts + seq + 1) - start
        length = tl.load(seq_lens + seq)
        if MODE == 1:
            ahead = (block - (start // TOKENS + seq)) * TOKENS
            if ahead >= count:
                return
            if SINGLE_ONLY:  # noqa: SIM102 (single tokens are the decode launch's)
                if count == 1:
                    return
        else:
            ahead = 0
            if SINGLE_ONLY:  # noqa: SIM102
                if count != 1:
                    return
        live = (ahead + tokens < count) & (rows < TOKENS * GROUP)
        positions = length - count + ahead + tokens
        end = tl.minimum(length, length - count + ahead + TOKENS)
        low = 0
        if WINDOW:
            low = tl.maximum(length - count + ahead - WINDOW + 1, 0)
        if CASCADE:  # noqa: SIM102
            if (seq >= tl.load(shared)) & (seq < tl.load(shared + 1)):
                low = tl.load(shared + 2)
        unmasked_end = length - count + ahead + 1
        tokens = start + ahead + tokens
        table = block_table + seq.to(tl.int64) * table_stride

    STEP: tl.constexpr = 2 if QUANTIZED else 1  # dimensions per element of a page
    HDE: tl.constexpr = HD // STEP
    dims = tl.arange(0, HDP)
    row_ok = live[:, None] & (dims < HDE)[None, :]
    q_place = q + tokens[:, None].to(tl.int64) * q_stride + heads[:, None] * HD + dims[None, :] * STEP
    q_tile = tl.load(q_place, mask=row_ok, other=0.0).to(COMPUTE)
    q_odd = q_tile
    acc = tl.zeros([BM, HDP], dtype=tl.float32)
    acc_odd = tl.zeros([BM, 1], dtype=tl.float32)
    if QUANTIZED:
        q_odd = tl.load(q_place + 1, mask=row_ok, other=0.0).to(COMPUTE)
        acc_odd = tl.zeros([BM, HDP], dtype=tl.float32)
        scale = scale * 256.0
    if k_scale is not None:
        scale = scale * tl.load(k_scale + kv_head)
    k_base = k_pages + kv_head.to(tl.int64) * head_stride
    v_base = v_pages + kv_head.to(tl.int64) * head_stride
    top = tl.full([BM], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    first_tile, past_tile = low // BN, tl.cdiv(end, BN)
    tiles = past_tile - first_tile
    share = tl.cdiv(tiles, splits)
    if MODE == 0 and SPLIT and not CASCADE:
        # Short sequences are shared out less: one tile each up to 16 shares, then two.
        share = tl.maximum(share, tl.minimum(2, tl.cdiv(tiles, 16)))
        splits = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
        if split >= splits:
            return
    first_tile += split * share
    past_tile = tl.minimum(past_tile, first_tile + share)
    # Tiles before `past_whole` need no mask. Own keys after a shared prefix are few, may begin inside a tile: masked.
    past_whole = first_tile
    if not WINDOW and not CASCADE:
        past_whole = tl.maximum(tl.minimum(unmasked_end // BN, past_tile), first_tile)
        acc, acc_odd, top, total = walk_tiles(
            acc, acc_odd, top, total, q_tile, q_odd, table, k_base, v_base, first_tile, past_whole, low, end,
            positions, scale, cap, page_stride, HDE, HDP, PAGE, BN, WINDOW, CAP, False, False, QUANTIZED, COMPUTE,
            INTERPRET,
        )  # fmt: skip
    acc, acc_odd, top, total = walk_tiles(
        acc, acc_odd, top, total, q_tile, q_odd, table, k_base, v_base, past_whole, past_tile, low, end,
        positions, scale, cap, page_stride, HDE, HDP, PAGE, BN, WINDOW, CAP, True, CASCADE or WINDOW > 0, QUANTIZED,
        COMPUTE, INTERPRET,
    )  # fmt: skip

    norm = 1.0 / tl.where(total == 0.0, 1.0, total)
    if v_scale is not None:
        norm *= tl.load(v_scale + kv_head)
    if QUANTIZED:
        norm *= 256.0
        acc_odd = acc_odd * norm[:, None]
    acc = acc * norm[:, None]
    out_place = out + tokens[:, None].to(tl.int64) * out_stride + heads[:, None] * HD + dims[None, :] * STEP
    if not SPLIT and not CASCADE and MODE != 2:
        tl.store(out_place, acc.to(out.dtype.element_ty), mask=row_ok)
        if QUANTIZED:
            tl.store(out_place + 1, acc_odd.to(out.dtype.element_ty), mask=row_ok)
    else:
        log = tl.where(total == 0.0, float("-inf"), top + tl.log2(total))
        slot = (first_slot + split).to(tl.int64) * num_tokens
        line = (slot + tokens) * HEADS + heads
        tl.store(partial_log + line, log, mask=live)
        part_place = partial + line[:, None] * HD + dims[None, :] * STEP
        filled = row_ok & (total > 0.0)[:, None]
        tl.store(part_place, acc, mask=filled)
        if QUANTIZED:
            tl.store(part_place + 1, acc_odd, mask=filled)
        if MODE == 0 and not CASCADE:
            number = counter + seq * tl.num_programs(1) + kv_head
            if arrive_last(number, splits):
                tl.store(number, 0)
                group_heads = tl.arange(0, GROUP_P)
                valid = group_heads < GROUP
                first_line = start.to(tl.int64) * HEADS + kv_head * GROUP
                merged = merge_parts(
                    partial,
                    partial_log,
                    first_line + group_heads,
                    valid,
                    num_tokens,
                    0,
                    splits,
                    HEADS,
                    HD,
                    HDF,
                    GROUP_P,
                )
                every = tl.arange(0, HDF)
                place = out + start.to(tl.int64) * out_stride + (kv_head * GROUP + group_heads)[:, None] * HD
                merged_ok = valid[:, None] & (every < HD)[None, :]
                tl.store(place + every[None, :], merged.to(out.dtype.element_ty), mask=merged_ok)
