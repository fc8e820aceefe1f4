"""Attention of encoders over packed texts: every token sees its whole text, or a window of it, in both directions.

Queries, keys and values lie side by side in one row per token, as the joined projection leaves them; texts follow each
other without padding. A program takes a tile of queries of one text and head; tiles beyond the end of a short text
return at once. Called by model/encoders/attention.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.launch import INTERPRETED, power_of_two

_LOG2E = 1.4426950408889634
_KEYS = 64  # of a tile


@triton.jit
def _encoder_attention(
    qkv, starts, out, scale, window, hidden,
    HD: tl.constexpr, PADDED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """qkv [T, 3 * hidden], starts [S + 1] -> out [T, hidden]. `scale` has log2(e) in it; `window` 0: all keys."""
    text = tl.program_id(1)
    head = tl.program_id(2)
    begin = tl.load(starts + text).to(tl.int64)
    length = (tl.load(starts + text + 1).to(tl.int64) - begin).to(tl.int32)
    first = tl.program_id(0) * QUERIES
    if first >= length:
        return
    dims = tl.arange(0, PADDED)
    rows = first + tl.arange(0, QUERIES)
    in_head = dims < HD
    queries = tl.load(
        qkv + (begin + rows)[:, None] * 3 * hidden + head * HD + dims[None, :],
        mask=(rows < length)[:, None] & in_head[None, :],
        other=0.0,
    )
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, PADDED], tl.float32)
    low = 0
    high = length
    if window > 0:
        low = tl.maximum(first - window, 0) // KEYS * KEYS
        high = tl.minimum(first + QUERIES + window, length)
    for start in range(low, high, KEYS):
        keys = start + tl.arange(0, KEYS)
        place = qkv + (begin + keys)[:, None] * 3 * hidden + head * HD + dims[None, :]
        there = (keys < length)[:, None] & in_head[None, :]
        k = tl.load(place + hidden, mask=there, other=0.0)
        v = tl.load(place + 2 * hidden, mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        seen = (keys < length)[None, :] & (rows < length)[:, None]
        if window > 0:
            distance = rows[:, None] - keys[None, :]
            seen = seen & (distance <= window) & (distance >= -window)
        scores = tl.where(seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - safe_max[:, None])
        rescale = tl.exp2(row_max - safe_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        mixed = mixed * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        row_max = new_max
    mixed = mixed / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(
        out + (begin + rows)[:, None] * hidden + head * HD + dims[None, :],
        mixed.to(out.dtype.element_ty),
        mask=(rows < length)[:, None] & in_head[None, :],
    )


def encoder_attention(qkv: Tensor, starts: Tensor, max_length: int, num_heads: int, window: int) -> Tensor:
    """qkv [T, 3 x hidden] of packed texts that begin at starts [S + 1] int32 -> [T, hidden]."""
    hidden = qkv.shape[1] // 3
    size = hidden // num_heads
    out = qkv.new_empty(qkv.shape[0], hidden)
    queries = min(64, power_of_two(max_length, 16))
    grid = (triton.cdiv(max_length, queries), starts.shape[0] - 1, num_heads)
    precision = "ieee" if qkv.dtype == torch.float32 and not INTERPRETED else "tf32"
    _encoder_attention[grid](
        qkv, starts, out, _LOG2E / size**0.5, window, hidden,
        size, power_of_two(size, 16), queries, _KEYS, precision, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
