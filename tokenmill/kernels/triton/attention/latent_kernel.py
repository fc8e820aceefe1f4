"""Kernels of latent attention: what a token keeps and how queries are rotated, attention over rows, merge of splits.

Pages are [pages, 1, page_size, RANK + ROPE]: a tile of rows is read once and serves as keys and, without its rotated
end, as values. A program takes ROWS rows, each a (token, head) pair, since all heads read the same keys. Launched by
latent.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tokenmill.kernels.triton.attention.online_softmax import merge_partials, online_softmax
from tokenmill.kernels.triton.shared.device import dependent_launch, find_sequence


class LatentGeometry(NamedTuple):
    """What a launch is compiled for. Padded sizes are powers of two."""

    heads: int
    block_heads: int  # of a program
    rank: int
    padded_rank: int
    rope: int
    padded_rope: int
    page_size: int
    rows: int  # of a tile: tokens * block_heads, at least 16
    keys: int
    prefill: bool  # a block of a sequence's tokens; else its single token and a split of its keys
    single_only: bool  # a step with prompts: prefill skips sequences of one token, the other launch the rest
    split: bool
    fp8: bool
    compute: Any  # tl.dtype of the operands
    pdl: bool


@triton.jit
def _widen(bytes):
    """e4m3 bytes -> float16 / 256: the bits fit one place further right, exactly."""
    bits = bytes.to(tl.int16)
    return (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def _store_row(
    row, place, norm, row_scale, eps, c, s, first, second, inside, written,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, QUANTIZED: tl.constexpr,
):  # fmt: skip
    """The latent of a token, normed, and its rotated end: row [RANK + ROPE] -> place."""
    dims = tl.arange(0, PADDED_RANK)
    ok = dims < RANK
    latent = tl.load(row + dims, mask=ok, other=0.0).to(tl.float32)
    latent *= tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent *= tl.load(norm + dims, mask=ok, other=0.0).to(tl.float32)
    a = tl.load(row + RANK + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(row + RANK + second, mask=inside, other=0.0).to(tl.float32)
    turned_a, turned_b = a * c - b * s, b * c + a * s
    if QUANTIZED:
        by = 1.0 / tl.load(row_scale)
        latent = tl.minimum(tl.maximum(latent * by, -448.0), 448.0)
        turned_a = tl.minimum(tl.maximum(turned_a * by, -448.0), 448.0)
        turned_b = tl.minimum(tl.maximum(turned_b * by, -448.0), 448.0)
    kind = place.dtype.element_ty
    tl.store(place + dims, latent.to(kind), mask=ok & written)
    tl.store(place + RANK + first, turned_a.to(kind), mask=inside & written)
    tl.store(place + RANK + second, turned_b.to(kind), mask=inside & written)


@triton.jit
def _rotate_heads(source, place, c, s, first, second, ok):
    """Pairs of each head's query end: source and place [BLOCK], c and s [HALF]."""
    a = tl.load(source[:, None] + first[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(source[:, None] + second[None, :], mask=ok, other=0.0).to(tl.float32)
    kind = place.dtype.element_ty
    tl.store(place[:, None] + first[None, :], (a * c[None, :] - b * s[None, :]).to(kind), mask=ok)
    tl.store(place[:, None] + second[None, :], (b * c[None, :] + a * s[None, :]).to(kind), mask=ok)


@triton.jit
def _latent_inputs(
    q, kv, norm, q_out, pages, positions, slots, cos, sin, row_scale, eps, q_stride, kv_stride, page_stride,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr,
    QUANTIZED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token stores its row; the others rotate the ends of BLOCK heads' queries into q_out
    [T, HEADS * ROPE]. A negative slot is not written (padding rows of a captured step)."""
    dependent_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    HALVES: tl.constexpr = ROPE // 2
    pair = tl.arange(0, HALF)
    inside = pair < HALVES
    first = pair * 2 if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + HALVES
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALVES + pair, mask=inside, other=0.0)
    s = tl.load(sin + position * HALVES + pair, mask=inside, other=0.0)
    # No name may have another shape in the other branch.
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        place = pages + (slot // PAGE) * page_stride + (slot % PAGE) * (RANK + ROPE)
        _store_row(
            kv + token * kv_stride, place, norm, row_scale, eps, c, s, first, second, inside, slot >= 0,
            RANK, PADDED_RANK, QUANTIZED,
        )  # fmt: skip
    else:
        heads = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        source = q + token * q_stride + heads * (NOPE + ROPE) + NOPE
        target = q_out + (token * HEADS + heads) * ROPE
        _rotate_heads(source, target, c, s, first, second, (heads < HEADS)[:, None] & inside[None, :])


@triton.jit
def _walk_rows(
    state, q_latent, q_rope, table, pages, page_stride, first, last, end, positions, scale,
    GEOMETRY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Key tiles [first, last): `state` is (weighted latents, running maximum, running sum)."""
    RANK: tl.constexpr = GEOMETRY.rank
    ROPE: tl.constexpr = GEOMETRY.rope
    PADDED_RANK: tl.constexpr = GEOMETRY.padded_rank
    PADDED_ROPE: tl.constexpr = GEOMETRY.padded_rope
    PAGE: tl.constexpr = GEOMETRY.page_size
    KEYS: tl.constexpr = GEOMETRY.keys
    COMPUTE: tl.constexpr = GEOMETRY.compute
    acc, row_max, row_sum = state
    dims, tail = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    for tile in range(first, last):
        keys = tile * KEYS + tl.arange(0, KEYS)
        inside = keys < end
        numbers = tl.load(table + keys // PAGE, mask=inside, other=0)
        places = numbers.to(tl.int64) * page_stride + (keys % PAGE) * (RANK + ROPE)
        latent_ok = inside[:, None] & (dims < RANK)[None, :]
        rope_ok = inside[:, None] & (tail < ROPE)[None, :]
        latents = tl.load(pages + places[:, None] + dims[None, :], mask=latent_ok, other=0)
        ropes = tl.load(pages + places[:, None] + RANK + tail[None, :], mask=rope_ok, other=0)
        if GEOMETRY.fp8:
            latents, ropes = _widen(latents), _widen(ropes)
        latents, ropes = latents.to(COMPUTE), ropes.to(COMPUTE)
        scores = tl.dot(q_latent, tl.trans(latents), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(ropes), scores, input_precision="ieee") * scale
        weights, rescale, row_max, row_sum = online_softmax(
            scores, keys, inside, positions, row_max, row_sum, 0.0, 0, False, MASKED
        )
        acc = tl.dot(weights.to(COMPUTE), latents, acc * rescale[:, None], input_precision="ieee")
    return acc, row_max, row_sum


# Numbers that change from step to step must not make another kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits"])
def _attend_latent(
    q_latent, q_rope, out, pages, row_scale, batch, partials, scale, num_seqs, num_tokens, page_stride, table_stride,
    splits, GEOMETRY: tl.constexpr,
):  # fmt: skip
    """q_latent, out [heads, T, rank]; q_rope [T, heads * rope]."""
    HEADS: tl.constexpr = GEOMETRY.heads
    BLOCK: tl.constexpr = GEOMETRY.block_heads
    RANK: tl.constexpr = GEOMETRY.rank
    ROPE: tl.constexpr = GEOMETRY.rope
    PADDED_RANK: tl.constexpr = GEOMETRY.padded_rank
    PADDED_ROPE: tl.constexpr = GEOMETRY.padded_rope
    ROWS: tl.constexpr = GEOMETRY.rows
    KEYS: tl.constexpr = GEOMETRY.keys
    COMPUTE: tl.constexpr = GEOMETRY.compute
    TOKENS: tl.constexpr = ROWS // BLOCK if GEOMETRY.prefill else 1
    PDL: tl.constexpr = GEOMETRY.pdl
    dependent_launch(PDL)
    split = tl.program_id(2)
    rows = tl.arange(0, ROWS)
    heads = tl.program_id(1) * BLOCK + rows % BLOCK
    tokens = rows // BLOCK
    if GEOMETRY.prefill:
        block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
        seq = find_sequence(batch.query_starts, block, num_seqs, TOKENS)
    else:
        block = tl.program_id(0)
        seq = block
    start = tl.load(batch.query_starts + seq)
    count = tl.load(batch.query_starts + seq + 1) - start
    length = tl.load(batch.seq_lens + seq)
    ahead = 0
    if GEOMETRY.prefill:
        ahead = (block - (start // TOKENS + seq)) * TOKENS
        if ahead >= count:
            return
        if GEOMETRY.single_only:  # noqa: SIM102 (single tokens belong to the other launch)
            if count == 1:
                return
    elif GEOMETRY.single_only:  # noqa: SIM102
        if count != 1:
            return
    live = (ahead + tokens < count) & (tokens < TOKENS) & (heads < HEADS)
    positions = length - count + ahead + tokens
    end = tl.minimum(length, length - count + ahead + TOKENS)
    unmasked_end = length - count + ahead + 1
    tokens = start + ahead + tokens
    table = batch.block_table + seq.to(tl.int64) * table_stride

    dims, tail = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_ROPE)
    line = heads.to(tl.int64) * num_tokens + tokens
    latent_ok = live[:, None] & (dims < RANK)[None, :]
    q_l = tl.load(q_latent + line[:, None] * RANK + dims[None, :], mask=latent_ok, other=0.0).to(COMPUTE)
    tails = q_rope + (tokens.to(tl.int64) * HEADS + heads)[:, None] * ROPE + tail[None, :]
    q_r = tl.load(tails, mask=live[:, None] & (tail < ROPE)[None, :], other=0.0).to(COMPUTE)
    norm_scale = 1.0
    if GEOMETRY.fp8:
        norm_scale = 256.0 * tl.load(row_scale)  # widened rows are a 256th of their values
        scale = scale * norm_scale
    tiles = tl.cdiv(end, KEYS)
    share = tl.cdiv(tiles, splits)
    first_tile = split * share
    past_tile = tl.minimum(tiles, first_tile + share)
    past_whole = tl.maximum(tl.minimum(unmasked_end // KEYS, past_tile), first_tile)
    acc = tl.zeros([ROWS, PADDED_RANK], dtype=tl.float32)
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    state = acc, row_max, row_sum
    state = _walk_rows(
        state, q_l, q_r, table, pages, page_stride, first_tile, past_whole, end, positions, scale, GEOMETRY, False
    )
    acc, row_max, row_sum = _walk_rows(
        state, q_l, q_r, table, pages, page_stride, past_whole, past_tile, end, positions, scale, GEOMETRY, True
    )
    acc = acc * (norm_scale / tl.where(row_sum == 0.0, 1.0, row_sum))[:, None]
    if GEOMETRY.split:
        log = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        part = (split.to(tl.int64) * num_tokens + tokens) * HEADS + heads
        tl.store(partials.logs + part, log, mask=live)
        tl.store(partials.outputs + part[:, None] * RANK + dims[None, :], acc, mask=latent_ok)
    else:
        tl.store(out + line[:, None] * RANK + dims[None, :], acc.to(out.dtype.element_ty), mask=latent_ok)


@triton.jit(do_not_specialize=["num_tokens", "splits"])
def _merge_latent(
    partials, out, query_starts, num_tokens, splits,
    HEADS: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr, SINGLE_ONLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program for the single token of a sequence and a head: the parts of its splits -> out [heads, T, rank]."""
    dependent_launch(PDL)
    seq, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_starts + seq)
    if SINGLE_ONLY:  # noqa: SIM102
        if tl.load(query_starts + seq + 1) - token != 1:
            return
    line = token.to(tl.int64) * HEADS + head + tl.arange(0, 1)
    live = line >= 0
    merged = merge_partials(partials, line, live, num_tokens, 0, splits, HEADS, RANK, PADDED_RANK, 1, 4)
    dims = tl.arange(0, PADDED_RANK)
    place = out + (head.to(tl.int64) * num_tokens + token) * RANK + dims[None, :]
    tl.store(place, merged.to(out.dtype.element_ty), mask=(dims < RANK)[None, :])
