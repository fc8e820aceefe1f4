"""The online softmax, in base 2: over the key tiles of one program, and over the partial results of several.

A program keeps, for each of its rows, the maximum score, the sum of exponentials and the weighted sum of values seen so
far; a new tile rescales what was gathered. Where the keys of a sequence are split over programs, each leaves its
normalized output and log2 of its sum; `merge_partials` weighs the parts by those. Used by dense_kernel.py and
packed_kernel.py; `_merge_prefix` is launched by dense.py after a shared prefix.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from tokenmill.kernels.triton.shared.device import dependent_launch


@triton.jit
def online_softmax(
    scores, keys, inside, positions, row_max, row_sum, cap, WINDOW: tl.constexpr, CAP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Scores [R, K] of a tile of keys -> (exp2 weights [R, K], the factor [R] that rescales earlier sums, the new
    maximum [R], the new sum [R])."""
    if CAP:
        # cap * tanh(s / cap) in units of log2(e): the scale has no log2(e) in it here
        scores = cap * 1.4426950408889634 * (2 * tl.sigmoid(2 * scores / cap) - 1)
    if MASKED:
        visible = (keys[None, :] <= positions[:, None]) & inside[None, :]
        if WINDOW:
            visible &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet has a maximum of -inf, and -inf - -inf is not a number.
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max) if MASKED else new_max
    weights = tl.exp2(scores - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def add_sinks(acc, acc_odd, row_max, row_sum, places, has_sink):
    """A logit without a value joins the softmax of each row that `has_sink`. places: of natural logits [R]."""
    sink = tl.load(places, mask=has_sink, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    new_max = tl.maximum(row_max, sink)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    row_sum = row_sum * rescale + tl.exp2(sink - safe_max)
    return acc * rescale[:, None], acc_odd * rescale[:, None], new_max, row_sum


@triton.jit
def merge_partials(
    partials,
    line,
    live,
    num_tokens,
    first,
    slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr = 8,
):
    """ROWS rows out of slots [first, slots) of partial results: values float32 [slots, tokens, heads, head_dim] and
    logs [slots, tokens, heads], -inf where a part saw no key; `line` [ROWS] is token * heads + head.

    CHUNK slots are read at a time: one after the other, the latency of each would add up."""
    dims = tl.arange(0, PADDED_DIM)
    slot_lines = tl.cast(num_tokens, tl.int64) * HEADS
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    acc = tl.zeros([ROWS, PADDED_DIM], dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, slots, CHUNK):
        chunk = start + tl.arange(0, CHUNK)
        ok = (chunk < slots)[:, None] & (chunk >= first)[:, None] & live[None, :]
        place = chunk.to(tl.int64)[:, None] * slot_lines + line[None, :]  # [CHUNK, ROWS]
        logs = tl.load(partials.logs + place, mask=ok, other=float("-inf"), cache_modifier=".cg")
        filled = ok & (logs > float("-inf"))
        whole = filled[:, :, None] & (dims < HEAD_DIM)[None, None, :]
        values = tl.load(
            partials.outputs + place[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=whole,
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(logs, 0))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(logs - safe_max[None, :])
        rescale = tl.exp2(row_max - safe_max)
        acc = acc * rescale[:, None] + tl.sum(values * weights[:, :, None], 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    return acc / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]


@triton.jit(do_not_specialize=["num_tokens", "prefix_slots", "slots"])
def _merge_prefix(
    partials,
    out,
    shared,
    num_tokens,
    out_stride,
    prefix_slots,
    slots,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Shared prefix (slots below `prefix_slots`) and own keys (the rest) of single tokens -> out. `shared` int32 [T]:
    tokens of the prefix of each."""
    dependent_launch(PDL)
    token = tl.program_id(0)
    heads = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = heads < HEADS
    sharing = tl.load(shared + token) > 0
    first = tl.where(sharing, 0, prefix_slots)
    line = token.to(tl.int64) * HEADS + heads
    merged = merge_partials(partials, line, live, num_tokens, first, slots, HEADS, HEAD_DIM, PADDED_DIM, ROWS, 4)
    dims = tl.arange(0, PADDED_DIM)
    place = out + token.to(tl.int64) * out_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    tl.store(place, merged.to(out.dtype.element_ty), mask=live[:, None] & (dims < HEAD_DIM)[None, :])
