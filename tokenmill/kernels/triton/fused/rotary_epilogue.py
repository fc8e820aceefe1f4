"""The epilogue of a product of q, k and v for a few tokens: rotary positions, then keys and values into their pages.

A tile holds pairs of rows that rotate together. What is written is exactly what `rope_store` would make of the product
written in the type of the queries: whether the two are one kernel must not change a bit. Knows nothing of how a product
is computed; gemv.py, grouped.py and grouped_gemv.py of matmul/ call the device functions, linear.py passes `HeadPlaces`
on.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.fused.rotary import page_value


class HeadTensors(NamedTuple):
    """What the kernels read and write; positions and slots [T], tables as `rope_store` has them."""

    queries: Tensor
    k_pages: Tensor
    v_pages: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    query_stride: int
    page_stride: int
    head_stride: int


class HeadLayout(NamedTuple):
    """The compile-time half: how the rows of the matrix are heads. head_dim 0: the product does not rotate."""

    q_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    page_size: int = 1
    interleaved: bool = False


NOT_ROTATED = HeadLayout()


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """Where a product of q, k and v goes: q rotated to `tensors.queries`, k rotated and v to their pages."""

    tensors: HeadTensors
    layout: HeadLayout

    @property
    def queries(self) -> Tensor:
        return self.tensors.queries


def head_places(
    tokens: int,
    q_heads: int,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    scales: tuple[Tensor, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> HeadPlaces:
    """For `tokens` rows; arguments as `rope_store` has them. The queries are allocated here, in `dtype`."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    queries = torch.empty(tokens, q_heads * head_dim, dtype=dtype, device=k_pages.device)
    k_scale, v_scale = scales or (None, None)
    strides = (queries.stride(0), k_pages.stride(0), k_pages.stride(1))
    tensors = HeadTensors(queries, k_pages, v_pages, positions, slots, cos, sin, k_scale, v_scale, *strides)
    return HeadPlaces(tensors, HeadLayout(q_heads, kv_heads, head_dim, page_size, interleaved))


@triton.jit
def head_rows(tile, BN: tl.constexpr, LAYOUT: tl.constexpr):
    """The rows of the matrix in a tile: the first of BN / 2 pairs, then the second of each."""
    HD: tl.constexpr = LAYOUT.head_dim
    inside = tl.arange(0, BN)
    pair = tile * (BN // 2) + inside % (BN // 2)
    second = inside // (BN // 2)
    within = pair % (HD // 2)
    return (pair // (HD // 2)) * HD + (within * 2 + second if LAYOUT.interleaved else within + second * (HD // 2))


@triton.jit
def load_places(heads, tokens, M, LAYOUT: tl.constexpr):
    """Positions and slots of tokens; where the product does not rotate, nobody reads the result."""
    if LAYOUT.head_dim:
        safe = tl.minimum(tokens, M - 1)
        return tl.load(heads.positions + safe), tl.load(heads.slots + safe)
    else:
        return 0, 0


@triton.jit
def load_angles(heads, position, tile, BN: tl.constexpr, LAYOUT: tl.constexpr):
    """cos and sin [BN / 2, tokens] of a tile's pairs. Load them before the sum that they rotate is complete."""
    HD: tl.constexpr = LAYOUT.head_dim
    if HD:
        pair = tile * (BN // 2) + tl.arange(0, BN // 2)
        place = position.to(tl.int64)[None, :] * (HD // 2) + (pair % (HD // 2))[:, None]
        return tl.load(heads.cos + place), tl.load(heads.sin + place)
    else:
        return 0, 0


@triton.jit
def write_heads(acc, cos, sin, slot, heads, tile, tokens, M, BN: tl.constexpr, BM: tl.constexpr, LAYOUT: tl.constexpr):
    """acc [BN, BM] of `head_rows`, scaled and with its bias, rotated by cos and sin and stored; `slot` [BM]."""
    Q_HEADS: tl.constexpr = LAYOUT.q_heads
    K_HEADS: tl.constexpr = LAYOUT.kv_heads
    HD: tl.constexpr = LAYOUT.head_dim
    PAGE: tl.constexpr = LAYOUT.page_size
    a, b = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
    a, b = a.to(heads.queries.dtype.element_ty).to(tl.float32), b.to(heads.queries.dtype.element_ty).to(tl.float32)
    pair = tile * (BN // 2) + tl.arange(0, BN // 2)
    head, within = pair // (HD // 2), pair % (HD // 2)
    first = within * 2 if LAYOUT.interleaved else within
    APART: tl.constexpr = 1 if LAYOUT.interleaved else HD // 2
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + K_HEADS
    ok = (tokens < M)[None, :] & (head < Q_HEADS + 2 * K_HEADS)[:, None]
    rotated_a = tl.where(is_value[:, None], a, a * cos - b * sin)
    rotated_b = tl.where(is_value[:, None], b, b * cos + a * sin)
    place = heads.queries + tokens[None, :].to(tl.int64) * heads.query_stride + (head * HD + first)[:, None]
    DTYPE: tl.constexpr = heads.queries.dtype.element_ty
    tl.store(place, rotated_a.to(DTYPE), mask=ok & is_query[:, None])
    tl.store(place + APART, rotated_b.to(DTYPE), mask=ok & is_query[:, None])

    stored = ok & (slot >= 0)[None, :]
    kv_head = tl.where(is_value, head - Q_HEADS - K_HEADS, head - Q_HEADS)
    PAGES: tl.constexpr = heads.k_pages.dtype.element_ty
    QUANTIZED: tl.constexpr = heads.k_scale is not None
    if QUANTIZED:
        by = tl.where(is_value, heads.v_scale + kv_head, heads.k_scale + kv_head)
        by = tl.load(by, mask=~is_query & (kv_head < K_HEADS), other=1.0)[:, None]
        rotated_a, rotated_b = rotated_a / by, rotated_b / by
    page_a, page_b = page_value(rotated_a, PAGES, QUANTIZED), page_value(rotated_b, PAGES, QUANTIZED)
    slot = slot.to(tl.int64)
    in_page = ((slot // PAGE) * heads.page_stride + (slot % PAGE) * HD)[None, :]
    place = in_page + (kv_head.to(tl.int64) * heads.head_stride + first)[:, None]
    place = tl.where(is_value[:, None], heads.v_pages + place, heads.k_pages + place)
    tl.store(place, page_a, mask=stored & ~is_query[:, None])
    tl.store(place + APART, page_b, mask=stored & ~is_query[:, None])
