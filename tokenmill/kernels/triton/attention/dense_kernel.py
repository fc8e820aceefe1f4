"""Paged attention over bf16, float16, float32 and FP8 pages: one flash-style kernel for all kinds of steps.

A program takes ROWS rows, each a (token, head) pair of one KV head's group, and walks key tiles gathered through the
page table with an online softmax. Which rows and keys is the mode: DECODE one token of a sequence and a split of its
keys; PREFILL a block of a sequence's tokens and all keys before them; SHARED_PREFIX the single tokens of many sequences
stacked, and a split of the keys they have in common. Launched by dense.py; online_softmax.py merges the splits.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention.fp8_widening import widen_pairs
from tokenmill.kernels.triton.attention.online_softmax import add_sinks, merge_partials, online_softmax
from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch, find_sequence

DECODE = tl.constexpr(0)
PREFILL = tl.constexpr(1)
SHARED_PREFIX = tl.constexpr(2)


class Pages(NamedTuple):
    """Keys and values [pages, kv_heads, page_size, head_dim]; FP8 ones as int16, two values an element."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None  # float32 [kv_heads], FP8 only
    v_scale: Tensor | None
    page_stride: int  # in elements
    head_stride: int


class Variant(NamedTuple):
    """What a launch is compiled for besides the geometry."""

    mode: int  # DECODE, PREFILL or SHARED_PREFIX
    rows: int  # of a tile
    keys: int  # of a tile
    split: bool  # the keys of a sequence are split over programs; the last to arrive merges
    after_prefix: bool  # own keys of sequences whose prefix another launch attends to; a third launch merges
    single_only: bool  # DECODE skips sequences with several tokens, PREFILL those with one
    window: int  # 0: none
    capped: bool
    fp8: bool
    compute: Any  # tl.dtype of the operands
    pdl: bool
    interpreted: bool
    prefixes: int = 1  # SHARED_PREFIX: runs of sequences, each with a prefix of its own


@triton.jit
def walk_tiles(
    state, q_even, q_odd, table, k_base, v_base, page_stride, first, last, low, end, positions, scale, cap,
    GEOMETRY: tl.constexpr, VARIANT: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr,
):  # fmt: skip
    """Key tiles [first, last): `state` is (weighted values, those of odd dimensions, running maximum, running sum).

    MASKED: some keys may lie at or past `end`, after a row's position, outside its window or (LOW) before `low`. FP8:
    an element is a pair of values; odd dimensions have their own operand and accumulator, so that nothing needs to be
    interleaved."""
    ELEMENTS: tl.constexpr = GEOMETRY.elements
    PADDED: tl.constexpr = GEOMETRY.padded_elements
    PAGE: tl.constexpr = GEOMETRY.page_size
    KEYS: tl.constexpr = VARIANT.keys
    COMPUTE: tl.constexpr = VARIANT.compute
    WINDOW: tl.constexpr = VARIANT.window
    CAP: tl.constexpr = VARIANT.capped
    INTERPRET: tl.constexpr = VARIANT.interpreted
    acc, acc_odd, row_max, row_sum = state
    dims = tl.arange(0, PADDED)
    for tile in range(first, last):
        keys = tile * KEYS + tl.arange(0, KEYS)
        inside = keys < end
        if MASKED:
            if LOW:
                inside &= keys >= low
            pages = tl.load(table + keys // PAGE, mask=inside, other=0)
        else:
            pages = tl.load(table + keys // PAGE)
        places = pages.to(tl.int64) * page_stride + (keys % PAGE) * ELEMENTS
        if MASKED or ELEMENTS != PADDED:
            ok = (dims < ELEMENTS)[None, :]
            if MASKED:
                ok &= inside[:, None]
            k_tile = tl.load(k_base + places[:, None] + dims[None, :], mask=ok, other=0)
            v_tile = tl.load(v_base + places[:, None] + dims[None, :], mask=ok, other=0)
        else:
            k_tile = tl.load(k_base + places[:, None] + dims[None, :])
            v_tile = tl.load(v_base + places[:, None] + dims[None, :])
        if VARIANT.fp8:
            k_even, k_odd = widen_pairs(k_tile, INTERPRET)
            scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
            scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee") * scale
        else:
            scores = tl.dot(q_even, tl.trans(k_tile.to(COMPUTE)), input_precision="ieee") * scale
        weights, rescale, row_max, row_sum = online_softmax(
            scores, keys, inside, positions, row_max, row_sum, cap, WINDOW, CAP, MASKED
        )
        weights = weights.to(COMPUTE)
        if VARIANT.fp8:
            v_even, v_odd = widen_pairs(v_tile, INTERPRET)
            acc = tl.dot(weights, v_even, acc * rescale[:, None], input_precision="ieee")
            acc_odd = tl.dot(weights, v_odd, acc_odd * rescale[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights, v_tile.to(COMPUTE), acc * rescale[:, None], input_precision="ieee")
    return acc, acc_odd, row_max, row_sum


@triton.jit
def merge_splits(partials, out, seq, start, kv_head, num_tokens, out_stride, splits, GEOMETRY: tl.constexpr):
    """The last program of a sequence and KV head to arrive here merges what all of them stored into `out`."""
    HEADS: tl.constexpr = GEOMETRY.heads
    GROUP: tl.constexpr = GEOMETRY.group
    PADDED_GROUP: tl.constexpr = GEOMETRY.padded_group
    HEAD_DIM: tl.constexpr = GEOMETRY.head_dim
    PADDED_DIM: tl.constexpr = GEOMETRY.padded_dim
    counter = partials.counters + seq * tl.num_programs(1) + kv_head
    if arrive_last(counter, splits):
        tl.store(counter, 0)
        heads = tl.arange(0, PADDED_GROUP)
        valid = heads < GROUP
        line = start.to(tl.int64) * HEADS + kv_head * GROUP + heads
        merged = merge_partials(
            partials, line, valid, num_tokens, 0, splits, HEADS, HEAD_DIM, PADDED_DIM, PADDED_GROUP
        )  # fmt: skip
        dims = tl.arange(0, PADDED_DIM)
        place = out + start.to(tl.int64) * out_stride + (kv_head * GROUP + heads)[:, None] * HEAD_DIM
        ok = valid[:, None] & (dims < HEAD_DIM)[None, :]
        tl.store(place + dims[None, :], merged.to(out.dtype.element_ty), mask=ok)


# Numbers that change from step to step must not make another kernel.
@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits", "first_slot"])
def _attend(
    q, out, pages, batch, partials, prefix, sinks, scale, cap, num_seqs, num_tokens, q_stride, out_stride, table_stride,
    splits, first_slot, GEOMETRY: tl.constexpr, VARIANT: tl.constexpr,
):  # fmt: skip
    """q, out [T, heads * head_dim]; `prefix`: of SHARED_PREFIX int32 [prefixes, 3], by run of sequences with a shared
    prefix: first, past the last, tokens of the prefix (runs in order, those that are not there begin beyond all
    sequences or are empty); of DECODE after it int32 [S], the tokens of each sequence's shared prefix.
    `sinks` float32 [heads]: logits that join the softmax and carry no value, or None. `first_slot`: where the partial
    results of this launch begin."""
    MODE: tl.constexpr = VARIANT.mode
    ROWS: tl.constexpr = VARIANT.rows
    KEYS: tl.constexpr = VARIANT.keys
    COMPUTE: tl.constexpr = VARIANT.compute
    WINDOW: tl.constexpr = VARIANT.window
    HEADS: tl.constexpr = GEOMETRY.heads
    GROUP: tl.constexpr = GEOMETRY.group
    HEAD_DIM: tl.constexpr = GEOMETRY.head_dim
    ELEMENTS: tl.constexpr = GEOMETRY.elements
    PADDED: tl.constexpr = GEOMETRY.padded_elements
    STEP: tl.constexpr = HEAD_DIM // ELEMENTS  # dimensions per element of a page
    dependent_launch(VARIANT.pdl)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    TOKENS: tl.constexpr = ROWS // GROUP
    rows = tl.arange(0, ROWS)
    heads = kv_head * GROUP + rows % GROUP
    tokens = rows // GROUP

    # Which rows, and keys [low, end) of which sequence; keys before `unmasked_end` are seen by every row.
    if MODE == SHARED_PREFIX:
        block = tl.program_id(0)
        # As prompts: the blocks of a run begin at its first sequence over TOKENS, plus the runs before it.
        PREFIXES: tl.constexpr = VARIANT.prefixes
        runs = tl.arange(0, PREFIXES)
        begun = tl.load(prefix + 3 * runs) // TOKENS + runs <= block
        run = tl.maximum(tl.sum(begun.to(tl.int32), 0) - 1, 0)
        first_seq, past_seq = tl.load(prefix + 3 * run), tl.load(prefix + 3 * run + 1)
        low, end = 0, tl.load(prefix + 3 * run + 2)
        ahead = (block - (first_seq // TOKENS + run)) * TOKENS
        tokens = first_seq + ahead + tokens
        live = (tokens < past_seq) & (rows < TOKENS * GROUP)
        positions = tl.zeros([ROWS], dtype=tl.int32) + end
        table = batch.block_table + first_seq.to(tl.int64) * table_stride
        unmasked_end = end
        if first_seq + ahead >= past_seq:
            end = 0
        seq = first_seq
    else:
        if MODE == PREFILL:
            block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest walks first
            seq = find_sequence(batch.query_starts, block, num_seqs, TOKENS)
        else:
            block = tl.program_id(0)
            seq = block
        start = tl.load(batch.query_starts + seq)
        count = tl.load(batch.query_starts + seq + 1) - start
        length = tl.load(batch.seq_lens + seq)
        if MODE == PREFILL:
            ahead = (block - (start // TOKENS + seq)) * TOKENS
            if ahead >= count:
                return
            if VARIANT.single_only:  # noqa: SIM102 (single tokens belong to the decode launch)
                if count == 1:
                    return
        else:
            ahead = 0
            if VARIANT.single_only:  # noqa: SIM102
                if count != 1:
                    return
        live = (ahead + tokens < count) & (rows < TOKENS * GROUP)
        positions = length - count + ahead + tokens
        end = tl.minimum(length, length - count + ahead + TOKENS)
        low = 0
        if WINDOW:
            low = tl.maximum(length - count + ahead - WINDOW + 1, 0)
        if VARIANT.after_prefix:
            low = tl.load(prefix + seq)
        unmasked_end = length - count + ahead + 1
        tokens = start + ahead + tokens
        table = batch.block_table + seq.to(tl.int64) * table_stride

    dims = tl.arange(0, PADDED)
    row_ok = live[:, None] & (dims < ELEMENTS)[None, :]
    q_place = q + tokens[:, None].to(tl.int64) * q_stride + heads[:, None] * HEAD_DIM + dims[None, :] * STEP
    q_even = tl.load(q_place, mask=row_ok, other=0.0).to(COMPUTE)
    q_odd = q_even
    acc = tl.zeros([ROWS, PADDED], dtype=tl.float32)
    acc_odd = tl.zeros([ROWS, 1], dtype=tl.float32)
    if VARIANT.fp8:
        q_odd = tl.load(q_place + 1, mask=row_ok, other=0.0).to(COMPUTE)
        acc_odd = tl.zeros([ROWS, PADDED], dtype=tl.float32)
        scale = scale * 256.0  # widened keys are a 256th of their values
    if pages.k_scale is not None:
        scale = scale * tl.load(pages.k_scale + kv_head)
    k_base = pages.k + kv_head.to(tl.int64) * pages.head_stride
    v_base = pages.v + kv_head.to(tl.int64) * pages.head_stride
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    first_tile, past_tile = low // KEYS, tl.cdiv(end, KEYS)
    tiles = past_tile - first_tile
    share = tl.cdiv(tiles, splits)
    if MODE == DECODE and VARIANT.split and not VARIANT.after_prefix:
        # Short sequences are split less: one tile each up to 16 splits, then two.
        share = tl.maximum(share, tl.minimum(2, tl.cdiv(tiles, 16)))
        splits = tl.maximum(tl.cdiv(tiles, tl.maximum(share, 1)), 1)
        if split >= splits:
            return
    first_tile += split * share
    past_tile = tl.minimum(past_tile, first_tile + share)
    # Tiles before `past_whole` need no mask. Own keys after a shared prefix are few, may begin inside a tile: masked.
    past_whole = first_tile
    state = acc, acc_odd, row_max, row_sum
    if not WINDOW and not VARIANT.after_prefix:
        past_whole = tl.maximum(tl.minimum(unmasked_end // KEYS, past_tile), first_tile)
        state = walk_tiles(
            state, q_even, q_odd, table, k_base, v_base, pages.page_stride, first_tile, past_whole, low, end,
            positions, scale, cap, GEOMETRY, VARIANT, False, False,
        )  # fmt: skip
    acc, acc_odd, row_max, row_sum = walk_tiles(
        state, q_even, q_odd, table, k_base, v_base, pages.page_stride, past_whole, past_tile, low, end,
        positions, scale, cap, GEOMETRY, VARIANT, True, VARIANT.after_prefix or WINDOW > 0,
    )  # fmt: skip

    if sinks is not None and MODE != SHARED_PREFIX:  # once for each row: in the first part of its keys
        acc, acc_odd, row_max, row_sum = add_sinks(
            acc, acc_odd, row_max, row_sum, sinks + heads, live & (split == 0)
        )  # fmt: skip
    norm = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    if pages.v_scale is not None:
        norm *= tl.load(pages.v_scale + kv_head)
    if VARIANT.fp8:
        norm *= 256.0
        acc_odd = acc_odd * norm[:, None]
    acc = acc * norm[:, None]
    if not VARIANT.split and not VARIANT.after_prefix and MODE != SHARED_PREFIX:
        out_place = out + tokens[:, None].to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :] * STEP
        tl.store(out_place, acc.to(out.dtype.element_ty), mask=row_ok)
        if VARIANT.fp8:
            tl.store(out_place + 1, acc_odd.to(out.dtype.element_ty), mask=row_ok)
    else:
        log = tl.where(row_sum == 0.0, float("-inf"), row_max + tl.log2(row_sum))
        slot = (first_slot + split).to(tl.int64) * num_tokens
        line = (slot + tokens) * HEADS + heads
        tl.store(partials.logs + line, log, mask=live)
        part_place = partials.outputs + line[:, None] * HEAD_DIM + dims[None, :] * STEP
        filled = row_ok & (row_sum > 0.0)[:, None]
        tl.store(part_place, acc, mask=filled)
        if VARIANT.fp8:
            tl.store(part_place + 1, acc_odd, mask=filled)
        if MODE == DECODE and not VARIANT.after_prefix:
            merge_splits(partials, out, seq, start, kv_head, num_tokens, out_stride, splits, GEOMETRY)
