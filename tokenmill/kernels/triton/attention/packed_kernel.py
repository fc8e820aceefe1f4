"""Paged attention over quantized rows: codes are multiplied as they are, scales and zero points applied outside.

(code - zero) * scale of a key is applied to its scores, that of a value to its weight; so a code only has to become a
float (packed_widening.py). An element of 16 bits holds the codes of two (int8) or four dimensions a, b, c, d, each of
which has its own operands and accumulator. Tiles and key splits are as in dense_kernel.py. Rotated rows meet rotated
queries (fused/rotary_packed.py); the output is rotated back at the end. KIND is that of packed_pages.py; PAIRED_ZERO
has scales of its own for even and odd dimensions, and so scores and weights of its own. Launched by packed.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels import packed_pages
from tokenmill.kernels.triton.attention.online_softmax import merge_partials, online_softmax
from tokenmill.kernels.triton.attention.packed_widening import paired_scales, row_scales, widen
from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch, find_sequence, rotate_rows

INT8_FLOAT = tl.constexpr(packed_pages.INT8_FLOAT)
HIDDEN_ZERO = tl.constexpr(packed_pages.HIDDEN_ZERO)
PAIRED_ZERO = tl.constexpr(packed_pages.PAIRED_ZERO)
WEIGHT_SCALE = tl.constexpr(256.0)  # weight times scale of a value: small, and half precision ends at 6e-5


class Pages(NamedTuple):
    """The planes of PackedPages: codes [pages, kv_heads, ...] as elements, and numbers (scales, zero points)."""

    k_codes: Tensor
    k_numbers: Tensor
    v_codes: Tensor
    v_numbers: Tensor
    levels: Tensor | None  # float32 [16], of a codebook; for the interpreter, others have them in the code
    rotation: Tensor | None  # float16 [head_dim, head_dim], where rows lie rotated
    page_codes: int  # strides, in elements of the plane
    head_codes: int
    page_numbers: int
    head_numbers: int


class Variant(NamedTuple):
    """What a launch is compiled for besides the geometry."""

    prefill: bool  # blocks of a sequence's tokens over all keys before them; else one token over a split of the keys
    single_only: bool  # decode skips sequences with several tokens
    split: bool
    rows: int  # of a tile
    keys: int
    window: int  # 0: none
    capped: bool
    kind: int  # of packed_pages.py
    rotated: bool
    first_number: int  # where the numbers of a page and head begin
    compute: Any  # tl.dtype of the operands
    rotation_dtype: Any
    pdl: bool
    interpreted: bool


class Queries(NamedTuple):
    """Rows of a tile, one operand for each dimension of an element (int8: `c` and `d` are not read), and their sums
    over even and over odd dimensions."""

    a: Any
    b: Any
    c: Any
    d: Any
    even_sum: Any
    odd_sum: Any


class State(NamedTuple):
    """Sums over the keys walked so far, for each row: weighted codes of the dimensions of an element (int8: the last
    two stay empty), weighted zero points of even and odd ones, the running maximum and sum of the softmax."""

    a: Any
    b: Any
    c: Any
    d: Any
    zero: Any
    odd_zero: Any
    row_max: Any
    row_sum: Any


@triton.jit
def score_keys(queries, k_tile, k_line, pages, scale, GEOMETRY: tl.constexpr, VARIANT: tl.constexpr):
    """Scores [R, K] of a tile of keys."""
    KIND: tl.constexpr = VARIANT.kind
    HEAD_DIM: tl.constexpr = GEOMETRY.head_dim
    a, b, c, d = widen(k_tile, pages.levels, KIND, HEAD_DIM, VARIANT.compute, VARIANT.interpreted)
    scores = tl.dot(queries.a, tl.trans(a), input_precision="ieee")
    if KIND > INT8_FLOAT:
        scores = tl.dot(queries.c, tl.trans(c), scores, input_precision="ieee")
    if KIND == PAIRED_ZERO:
        k_scale, k_zero, odd_scale, odd_zero = paired_scales(k_line)
        odd_scores = tl.dot(queries.b, tl.trans(b), input_precision="ieee")
        odd_scores = tl.dot(queries.d, tl.trans(d), odd_scores, input_precision="ieee")
        odd_scores -= queries.odd_sum[:, None] * odd_zero[None, :]
        scores = (scores - queries.even_sum[:, None] * k_zero[None, :]) * (k_scale * scale)[None, :]
        scores += odd_scores * (odd_scale * scale)[None, :]
    else:
        k_scale, k_zero = row_scales(k_line, KIND, HEAD_DIM)
        scores = tl.dot(queries.b, tl.trans(b), scores, input_precision="ieee")
        if KIND > INT8_FLOAT:
            scores = tl.dot(queries.d, tl.trans(d), scores, input_precision="ieee")
        if KIND == HIDDEN_ZERO:
            scores -= (queries.even_sum + queries.odd_sum)[:, None] * k_zero[None, :]
        scores *= (k_scale * scale)[None, :]
    return scores


@triton.jit
def walk_packed(
    state, queries, table, pages, k_codes, k_numbers, v_codes, v_numbers, first, last, low, end, positions, scale, cap,
    GEOMETRY: tl.constexpr, VARIANT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Key tiles [first, last) of one KV head, whose planes begin at k_codes, k_numbers, v_codes and v_numbers."""
    ELEMENTS: tl.constexpr = GEOMETRY.elements
    PADDED: tl.constexpr = GEOMETRY.padded_elements
    PAGE: tl.constexpr = GEOMETRY.page_size
    HEAD_DIM: tl.constexpr = GEOMETRY.head_dim
    KEYS: tl.constexpr = VARIANT.keys
    KIND: tl.constexpr = VARIANT.kind
    COMPUTE: tl.constexpr = VARIANT.compute
    WINDOW: tl.constexpr = VARIANT.window
    CAP: tl.constexpr = VARIANT.capped
    acc_a, acc_b, acc_c, acc_d, zero, zero_odd, row_max, row_sum = state
    dims = tl.arange(0, PADDED)
    for tile in range(first, last):
        keys = tile * KEYS + tl.arange(0, KEYS)
        inside = (keys < end) & (keys >= low)
        if MASKED:
            page = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(table + keys // PAGE).to(tl.int64)
        places = (page * pages.page_codes + (keys % PAGE) * ELEMENTS)[:, None] + dims[None, :]
        lines = page * pages.page_numbers + keys % PAGE
        if MASKED or ELEMENTS != PADDED:
            ok = (dims < ELEMENTS)[None, :]
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
        scores = score_keys(queries, k_tile, k_line, pages, scale, GEOMETRY, VARIANT)
        weights, rescale, row_max, row_sum = online_softmax(
            scores, keys, inside, positions, row_max, row_sum, cap, WINDOW, CAP, MASKED
        )
        a, b, c, d = widen(v_tile, pages.levels, KIND, HEAD_DIM, COMPUTE, VARIANT.interpreted)
        # Zero points: of the rounded weights, so that what large ones add to the sums is taken off exactly.
        if KIND == PAIRED_ZERO:
            v_scale, v_zero, odd_scale, odd_zero = paired_scales(v_line)
            odd_weights = (weights * (odd_scale * WEIGHT_SCALE)[None, :]).to(COMPUTE)
            zero_odd = zero_odd * rescale + tl.sum(odd_weights.to(tl.float32) * odd_zero[None, :], 1)
            weights = (weights * (v_scale * WEIGHT_SCALE)[None, :]).to(COMPUTE)
        else:
            v_scale, v_zero = row_scales(v_line, KIND, HEAD_DIM)
            weights = (weights * (v_scale * WEIGHT_SCALE)[None, :]).to(COMPUTE)
            odd_weights = weights
        acc_a = tl.dot(weights, a, acc_a * rescale[:, None], input_precision="ieee")
        acc_b = tl.dot(odd_weights, b, acc_b * rescale[:, None], input_precision="ieee")
        if KIND > INT8_FLOAT:
            acc_c = tl.dot(weights, c, acc_c * rescale[:, None], input_precision="ieee")
            acc_d = tl.dot(odd_weights, d, acc_d * rescale[:, None], input_precision="ieee")
        if KIND == HIDDEN_ZERO or KIND == PAIRED_ZERO:  # noqa: SIM109 (the compiler has no `in`)
            zero = zero * rescale + tl.sum(weights.to(tl.float32) * v_zero[None, :], 1)
    return State(acc_a, acc_b, acc_c, acc_d, zero, zero_odd, row_max, row_sum)


@triton.jit
def normalized(state, GEOMETRY: tl.constexpr, VARIANT: tl.constexpr):
    """[R, PADDED_DIM]: the weighted means of values, all dimensions in order."""
    PADDED_DIM: tl.constexpr = GEOMETRY.padded_dim
    ROWS: tl.constexpr = VARIANT.rows
    a, b, c, d, zero, odd_zero, _, row_sum = state
    if VARIANT.kind != PAIRED_ZERO:
        odd_zero = zero
    norm = 1.0 / (tl.where(row_sum == 0.0, 1.0, row_sum) * WEIGHT_SCALE)
    a, b = (a - zero[:, None]) * norm[:, None], (b - odd_zero[:, None]) * norm[:, None]
    if VARIANT.kind > INT8_FLOAT:
        c, d = (c - zero[:, None]) * norm[:, None], (d - odd_zero[:, None]) * norm[:, None]
        a, b = tl.join(a, c), tl.join(b, d)
    return tl.reshape(tl.join(a, b), [ROWS, PADDED_DIM])


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits"])
def _attend_packed(
    q,
    out,
    pages,
    batch,
    partials,
    scale,
    cap,
    num_seqs,
    num_tokens,
    q_stride,
    out_stride,
    table_stride,
    splits,
    GEOMETRY: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """A program: a tile of rows, (token, head) pairs of one KV head's group. q, out [T, heads * head_dim]."""
    ROWS: tl.constexpr = VARIANT.rows
    KEYS: tl.constexpr = VARIANT.keys
    COMPUTE: tl.constexpr = VARIANT.compute
    WINDOW: tl.constexpr = VARIANT.window
    HEADS: tl.constexpr = GEOMETRY.heads
    GROUP: tl.constexpr = GEOMETRY.group
    PADDED_GROUP: tl.constexpr = GEOMETRY.padded_group
    HEAD_DIM: tl.constexpr = GEOMETRY.head_dim
    PADDED_DIM: tl.constexpr = GEOMETRY.padded_dim
    ELEMENTS: tl.constexpr = GEOMETRY.elements
    PADDED: tl.constexpr = GEOMETRY.padded_elements
    ROTATION_DTYPE: tl.constexpr = VARIANT.rotation_dtype
    PDL: tl.constexpr = VARIANT.pdl
    dependent_launch(PDL)
    kv_head, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    TOKENS: tl.constexpr = ROWS // GROUP
    rows = tl.arange(0, ROWS)
    heads = kv_head.to(tl.int32) * GROUP + rows % GROUP
    ahead = 0
    if VARIANT.prefill:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
        seq = find_sequence(batch.query_starts, block, num_seqs, TOKENS)
        start = tl.load(batch.query_starts + seq)
        count = tl.load(batch.query_starts + seq + 1) - start
        ahead = (block - (start // TOKENS + seq)) * TOKENS
        if (ahead >= count) | (count == 1):
            return
    else:
        seq = tl.program_id(0)
        start = tl.load(batch.query_starts + seq)
        count = tl.load(batch.query_starts + seq + 1) - start
        if VARIANT.single_only:  # noqa: SIM102 (longer ones belong to the prefill launch)
            if count != 1:
                return
    length = tl.load(batch.seq_lens + seq)
    live = (ahead + rows // GROUP < count) & (rows < TOKENS * GROUP)
    known = length - count + ahead  # tokens before the block
    positions = known + rows // GROUP
    end = tl.minimum(length, known + TOKENS)
    low = 0
    if WINDOW:
        low = tl.maximum(known - WINDOW + 1, 0)
    tokens = (start + ahead + rows // GROUP).to(tl.int64)
    table = batch.block_table + seq.to(tl.int64) * table_stride

    CODES: tl.constexpr = 2 if VARIANT.kind <= INT8_FLOAT else 4
    dims = tl.arange(0, PADDED)
    row_ok = live[:, None] & (dims < ELEMENTS)[None, :]
    q_place = q + tokens[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :] * CODES
    q_a = tl.load(q_place, mask=row_ok, other=0.0).to(COMPUTE)
    q_b = tl.load(q_place + 1, mask=row_ok, other=0.0).to(COMPUTE)
    q_c, q_d = q_a, q_b
    even_sum, odd_sum = tl.sum(q_a.to(tl.float32), 1), tl.sum(q_b.to(tl.float32), 1)
    none = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    acc_c, acc_d = none, none
    if CODES == 4:
        q_c = tl.load(q_place + 2, mask=row_ok, other=0.0).to(COMPUTE)
        q_d = tl.load(q_place + 3, mask=row_ok, other=0.0).to(COMPUTE)
        even_sum += tl.sum(q_c.to(tl.float32), 1)
        odd_sum += tl.sum(q_d.to(tl.float32), 1)
        acc_c, acc_d = acc, acc
    queries = Queries(q_a, q_b, q_c, q_d, even_sum, odd_sum)
    k_codes, v_codes = pages.k_codes + kv_head * pages.head_codes, pages.v_codes + kv_head * pages.head_codes
    k_numbers = pages.k_numbers + kv_head * pages.head_numbers + VARIANT.first_number
    v_numbers = pages.v_numbers + kv_head * pages.head_numbers + VARIANT.first_number
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    first_tile, past_tile = low // KEYS, tl.cdiv(end, KEYS)
    tiles = past_tile - first_tile
    share = tiles
    if VARIANT.split:
        # Short sequences are split less: one tile each up to 16 splits, then two.
        share = tl.maximum(tl.cdiv(tiles, splits), tl.minimum(2, tl.cdiv(tiles, 16)))
        splits = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
        if split >= splits:
            return
    first_tile += split * share
    past_tile = tl.minimum(past_tile, first_tile + share)
    past_whole = first_tile
    state = State(acc, acc, acc_c, acc_d, none, none, row_max, none)
    if not WINDOW:
        past_whole = tl.maximum(tl.minimum((known + 1) // KEYS, past_tile), first_tile)
        state = walk_packed(
            state, queries, table, pages, k_codes, k_numbers, v_codes, v_numbers, first_tile, past_whole, low, end,
            positions, scale, cap, GEOMETRY, VARIANT, False,
        )  # fmt: skip
    state = walk_packed(
        state, queries, table, pages, k_codes, k_numbers, v_codes, v_numbers, past_whole, past_tile, low, end,
        positions, scale, cap, GEOMETRY, VARIANT, True,
    )  # fmt: skip

    whole = normalized(state, GEOMETRY, VARIANT)
    every = tl.arange(0, PADDED_DIM)
    whole_ok = live[:, None] & (every < HEAD_DIM)[None, :]
    if not VARIANT.split:
        if VARIANT.rotated:
            whole = tl.where((every < HEAD_DIM)[None, :], whole, 0.0)
            whole = rotate_rows(whole, pages.rotation, HEAD_DIM, PADDED_DIM, ROTATION_DTYPE, True)
        place = out + tokens[:, None] * out_stride + heads[:, None] * HEAD_DIM + every[None, :]
        tl.store(place, whole.to(out.dtype.element_ty), mask=whole_ok)
    else:
        row_sum = state.row_sum
        log = tl.where(row_sum == 0.0, float("-inf"), state.row_max + tl.log2(row_sum))
        line = (split.to(tl.int64) * num_tokens + tokens) * HEADS + heads
        tl.store(partials.logs + line, log, mask=live)
        filled = whole_ok & (row_sum > 0.0)[:, None]
        tl.store(partials.outputs + line[:, None] * HEAD_DIM + every[None, :], whole, mask=filled)
        counter = partials.counters + seq * tl.num_programs(1) + tl.program_id(1)
        if arrive_last(counter, splits):
            tl.store(counter, 0)
            group_heads = tl.arange(0, PADDED_GROUP)
            valid = group_heads < GROUP
            first_line = start.to(tl.int64) * HEADS + kv_head * GROUP
            merged = merge_partials(
                partials, first_line + group_heads, valid, num_tokens, 0, splits, HEADS, HEAD_DIM, PADDED_DIM,
                PADDED_GROUP,
            )  # fmt: skip
            if VARIANT.rotated:
                merged = rotate_rows(merged, pages.rotation, HEAD_DIM, PADDED_DIM, ROTATION_DTYPE, True)
            place = out + start.to(tl.int64) * out_stride + (kv_head * GROUP + group_heads)[:, None] * HEAD_DIM
            ok = valid[:, None] & (every < HEAD_DIM)[None, :]
            tl.store(place + every[None, :], merged.to(out.dtype.element_ty), mask=ok)
