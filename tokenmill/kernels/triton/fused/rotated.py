"""The end of a product of q, k and v for a few tokens: rotate, and store, without a kernel of its own for it.

A tile holds pairs of rows that rotate together. What is written is exactly what `rope_store` would make of the product
written as bf16: whether the two are one kernel must not change a bit. Knows nothing of how a product is computed;
vector.py, grouped.py and grouped_vector.py call the kernels' parts, linear.py hands `HeadPlaces` through.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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


@dataclass(frozen=True, slots=True)
class HeadPlaces:
    """Where a product of q, k and v goes: q rotated to `tensors.queries`, k rotated and v to their pages."""

    tensors: HeadTensors
    interleaved: bool

    @property
    def queries(self) -> Tensor:
        return self.tensors.queries

    @property
    def constants(self) -> dict[str, Any]:
        _, kv_heads, page_size, head_dim = self.tensors.k_pages.shape
        q_heads = self.queries.shape[1] // head_dim
        counts = {"Q_HEADS": q_heads, "K_HEADS": kv_heads, "HD": head_dim, "PAGE": page_size}
        return counts | {"INTERLEAVED": self.interleaved}


NOT_ROTATED: dict[str, Any] = {"Q_HEADS": 0, "K_HEADS": 0, "HD": 0, "PAGE": 1, "INTERLEAVED": False}


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
) -> HeadPlaces:
    """For `tokens` rows; arguments as `rope_store` has them. The queries are allocated here."""
    queries = torch.empty(tokens, q_heads * k_pages.shape[3], dtype=torch.bfloat16, device=k_pages.device)
    k_scale, v_scale = scales or (None, None)
    strides = (queries.stride(0), k_pages.stride(0), k_pages.stride(1))
    tensors = HeadTensors(queries, k_pages, v_pages, positions, slots, cos, sin, k_scale, v_scale, *strides)
    return HeadPlaces(tensors, interleaved)


@triton.jit
def head_rows(tile, BN: tl.constexpr, HD: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The rows of the matrix in a tile: the first of BN / 2 pairs, then the second of each."""
    inside = tl.arange(0, BN)
    pair = tile * (BN // 2) + inside % (BN // 2)
    second = inside // (BN // 2)
    within = pair % (HD // 2)
    return (pair // (HD // 2)) * HD + (within * 2 + second if INTERLEAVED else within + second * (HD // 2))


@triton.jit
def load_places(heads, tokens, M, HD: tl.constexpr):
    """Positions and slots of tokens; HD 0: the product does not rotate, and nobody reads the result."""
    if HD:
        safe = tl.minimum(tokens, M - 1)
        return tl.load(heads.positions + safe), tl.load(heads.slots + safe)
    else:
        return 0, 0


@triton.jit
def load_angles(heads, position, tile, BN: tl.constexpr, HD: tl.constexpr):
    """cos and sin [BN / 2, tokens] of a tile's pairs. Ask for them before the sum they turn is there."""
    if HD:
        pair = tile * (BN // 2) + tl.arange(0, BN // 2)
        place = position.to(tl.int64)[None, :] * (HD // 2) + (pair % (HD // 2))[:, None]
        return tl.load(heads.cos + place), tl.load(heads.sin + place)
    else:
        return 0, 0


@triton.jit
def write_heads(
    acc,
    cos,
    sin,
    slot,
    heads,
    tile,
    tokens,
    M,
    BN: tl.constexpr,
    BM: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HD: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """acc [BN, BM] of `head_rows`, scaled and with its bias, rotated by cos and sin and stored; `slot` [BM]."""
    a, b = tl.split(tl.permute(tl.reshape(acc, (2, BN // 2, BM)), (1, 2, 0)))
    a, b = a.to(heads.queries.dtype.element_ty).to(tl.float32), b.to(heads.queries.dtype.element_ty).to(tl.float32)
    pair = tile * (BN // 2) + tl.arange(0, BN // 2)
    head, within = pair // (HD // 2), pair % (HD // 2)
    first = within * 2 if INTERLEAVED else within
    APART: tl.constexpr = 1 if INTERLEAVED else HD // 2
    is_query, is_value = head < Q_HEADS, head >= Q_HEADS + K_HEADS
    ok = (tokens < M)[None, :] & (head < Q_HEADS + 2 * K_HEADS)[:, None]
    turned_a = tl.where(is_value[:, None], a, a * cos - b * sin)
    turned_b = tl.where(is_value[:, None], b, b * cos + a * sin)
    place = heads.queries + tokens[None, :].to(tl.int64) * heads.query_stride + (head * HD + first)[:, None]
    DTYPE: tl.constexpr = heads.queries.dtype.element_ty
    tl.store(place, turned_a.to(DTYPE), mask=ok & is_query[:, None])
    tl.store(place + APART, turned_b.to(DTYPE), mask=ok & is_query[:, None])

    stored = ok & (slot >= 0)[None, :]
    kv_head = tl.where(is_value, head - Q_HEADS - K_HEADS, head - Q_HEADS)
    PAGES: tl.constexpr = heads.k_pages.dtype.element_ty
    QUANTIZED: tl.constexpr = heads.k_scale is not None
    if QUANTIZED:
        by = tl.where(is_value, heads.v_scale + kv_head, heads.k_scale + kv_head)
        by = tl.load(by, mask=~is_query & (kv_head < K_HEADS), other=1.0)[:, None]
        turned_a, turned_b = turned_a / by, turned_b / by
    page_a, page_b = page_value(turned_a, PAGES, QUANTIZED), page_value(turned_b, PAGES, QUANTIZED)
    slot = slot.to(tl.int64)
    in_page = ((slot // PAGE) * heads.page_stride + (slot % PAGE) * HD)[None, :]
    place = in_page + (kv_head.to(tl.int64) * heads.head_stride + first)[:, None]
    place = tl.where(is_value[:, None], heads.v_pages + place, heads.k_pages + place)
    tl.store(place, page_a, mask=stored & ~is_query[:, None])
    tl.store(place + APART, page_b, mask=stored & ~is_query[:, None])
