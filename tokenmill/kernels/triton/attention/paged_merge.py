"""Joining attention over shares of the keys: each part weighted by its share of the softmax sum, in base 2.

Parts are float32 [slots, tokens, heads, head_dim] with their logarithms [slots, tokens, heads], -inf where a part saw
no key. Called by the last program of a decode launch, and as a kernel of its own after a shared prefix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.launch import begin


@triton.jit
def merge_parts(
    partial,
    partial_log,
    line,
    live,
    num_tokens,
    first,
    slots,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HDF: tl.constexpr,
    R: tl.constexpr,
    CHUNK: tl.constexpr = 8,
):
    """R rows out of slots [first, slots) of partial results, weighted by their share of the softmax sum.

    CHUNK slots are read at a time: one after the other, the latency of each would add up."""
    dims = tl.arange(0, HDF)
    slot_lines = tl.cast(num_tokens, tl.int64) * HEADS
    top = tl.full([R], float("-inf"), dtype=tl.float32)
    acc = tl.zeros([R, HDF], dtype=tl.float32)
    total = tl.zeros([R], dtype=tl.float32)
    for start in range(0, slots, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        ok = (chunk < slots)[:, None] & (chunk >= first)[:, None] & live[None, :]
        place = chunk.to(tl.int64)[:, None] * slot_lines + line[None, :]  # [CHUNK, R]
        logs = tl.load(partial_log + place, mask=ok, other=float("-inf"), cache_modifier=".cg")
        filled = ok & (logs > float("-inf"))
        whole = filled[:, :, None] & (dims < HD)[None, None, :]
        parts = tl.load(
            partial + place[:, :, None] * HD + dims[None, None, :], mask=whole, other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, tl.max(logs, 0))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - safe_top[None, :])
        shrink = tl.exp2(top - safe_top)
        acc = acc * shrink[:, None] + tl.sum(parts * weights[:, :, None], 0)
        total = total * shrink + tl.sum(weights, 0)
        top = new_top
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "prefix_slots", "slots"])
def _merge(
    partial,
    partial_log,
    out,
    shared,
    num_tokens,
    out_stride,
    prefix_slots,
    slots,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HDF: tl.constexpr,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shared prefix (slots below `prefix_slots`) and own keys (the rest) of single tokens -> out."""
    begin(PDL)
    token = tl.program_id(0)
    heads = tl.program_id(1) * BM + tl.arange(0, BM)
    live = heads < HEADS
    sharing = (token >= tl.load(shared)) & (token < tl.load(shared + 1)) & (tl.load(shared + 2) > 0)
    first = tl.where(sharing, 0, prefix_slots)
    line = token.to(tl.int64) * HEADS + heads
    merged = merge_parts(partial, partial_log, line, live, num_tokens, first, slots, HEADS, HD, HDF, BM, 4)
    dims = tl.arange(0, HDF)
    place = out + token.to(tl.int64) * out_stride + heads[:, None] * HD + dims[None, :]
    tl.store(place, merged.to(out.dtype.element_ty), mask=live[:, None] & (dims < HD)[None, :])
