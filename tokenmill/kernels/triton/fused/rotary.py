"""Rotary positions and the KV pages: rotate, and in the same pass store keys and values where they belong.

Pages are [pages, kv_heads, page_size, head_dim]; a slot is page * page_size + offset, and a negative one is not written
(padding rows of a captured step). FP8 pages hold value / scale of their KV head.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

HEADS_PER_PROGRAM = 8


@triton.jit
def page_value(values, dtype: tl.constexpr, QUANTIZED: tl.constexpr):
    if QUANTIZED:
        values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    return values.to(dtype)


@triton.jit
def _rotate_store(
    x,
    q_out,
    k_pages,
    v_pages,
    positions,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    k_scale,
    v_scale,
    eps,
    x_stride,
    q_stride,
    page_stride,
    head_stride,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    V_HEADS: tl.constexpr,
    HD: tl.constexpr,
    HALF: tl.constexpr,
    ROTATED: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORMED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    """x [T, (Q + K + V heads) * HD] -> q_out rotated, k_pages rotated, v_pages as it is. HALF is HD / 2, padded. Of the
    pairs of a head, ROTATED are rotated: the first 2 * ROTATED numbers; the others go along in pairs too."""
    dependent_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    pair = tl.arange(0, HALF)
    HALVES: tl.constexpr = HD // 2
    if INTERLEAVED:
        first = pair * 2
        second = first + 1
    else:
        first = tl.where(pair < ROTATED, pair, pair + ROTATED)
        second = tl.where(pair < ROTATED, pair + ROTATED, pair + HALVES)
    ok = (heads < Q_HEADS + K_HEADS + V_HEADS)[:, None] & (pair < HALVES)[None, :]
    place = x + token * x_stride + heads[:, None] * HD
    a = tl.load(place + first[None, :], mask=ok, other=0.0).to(tl.float32)
    b = tl.load(place + second[None, :], mask=ok, other=0.0).to(tl.float32)
    is_query = heads < Q_HEADS
    is_value = heads >= Q_HEADS + K_HEADS
    if NORMED:
        inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / HD + eps)
        inner = (pair < HALVES)[None, :] & (heads >= 0)[:, None]
        gain_a = tl.where(is_query[:, None], tl.load(q_norm + first, mask=pair < HALVES, other=0.0)[None, :],
                          tl.load(k_norm + first, mask=pair < HALVES, other=0.0)[None, :])  # fmt: skip
        gain_b = tl.where(is_query[:, None], tl.load(q_norm + second, mask=pair < HALVES, other=0.0)[None, :],
                          tl.load(k_norm + second, mask=pair < HALVES, other=0.0)[None, :])  # fmt: skip
        normed = inner & (heads < Q_HEADS + K_HEADS)[:, None]
        a = tl.where(normed, a * inverse[:, None] * gain_a, a)
        b = tl.where(normed, b * inverse[:, None] * gain_b, b)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * ROTATED + pair, mask=pair < ROTATED, other=1.0)[None, :]
    s = tl.load(sin + position * ROTATED + pair, mask=pair < ROTATED, other=0.0)[None, :]
    rotated_a = tl.where(is_value[:, None], a, a * c - b * s)
    rotated_b = tl.where(is_value[:, None], b, b * c + a * s)
    q_place = q_out + token * q_stride + heads[:, None] * HD
    q_ok = ok & is_query[:, None]
    tl.store(q_place + first[None, :], rotated_a.to(q_out.dtype.element_ty), mask=q_ok)
    tl.store(q_place + second[None, :], rotated_b.to(q_out.dtype.element_ty), mask=q_ok)
    if K_HEADS:
        slot = tl.load(slots + token).to(tl.int64)
        in_page = (slot // PAGE) * page_stride + (slot % PAGE) * HD
        k_head = heads - Q_HEADS
        v_head = heads - Q_HEADS - K_HEADS
        k_ok = ok & (~is_query & ~is_value)[:, None] & (slot >= 0)
        v_ok = ok & is_value[:, None] & (slot >= 0)
        if QUANTIZED:
            by_key = tl.load(k_scale + k_head, mask=~is_query & ~is_value, other=1.0)
            by_value = tl.load(v_scale + v_head, mask=is_value & (v_head < V_HEADS), other=1.0)
            by = tl.where(is_value, by_value, by_key)[:, None]
            rotated_a, rotated_b = rotated_a / by, rotated_b / by
        page_a = page_value(rotated_a, k_pages.dtype.element_ty, QUANTIZED)
        page_b = page_value(rotated_b, k_pages.dtype.element_ty, QUANTIZED)
        k_place = k_pages + in_page + k_head.to(tl.int64)[:, None] * head_stride
        v_place = v_pages + in_page + v_head.to(tl.int64)[:, None] * head_stride
        tl.store(k_place + first[None, :], page_a, mask=k_ok)
        tl.store(k_place + second[None, :], page_b, mask=k_ok)
        tl.store(v_place + first[None, :], page_a, mask=v_ok)
        tl.store(v_place + second[None, :], page_b, mask=v_ok)


@triton.jit
def _store(
    x,
    pages,
    slots,
    scale,
    x_stride,
    page_stride,
    head_stride,
    HEADS: tl.constexpr,
    HD: tl.constexpr,
    HDP: tl.constexpr,
    PAGE: tl.constexpr,
    BH: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    dims = tl.arange(0, HDP)
    slot = tl.load(slots + token).to(tl.int64)
    ok = (heads < HEADS)[:, None] & (dims < HD)[None, :] & (slot >= 0)
    values = tl.load(x + token * x_stride + heads[:, None] * HD + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    if QUANTIZED:
        values /= tl.load(scale + heads, mask=heads < HEADS, other=1.0)[:, None]
    place = pages + (slot // PAGE) * page_stride + (slot % PAGE) * HD + heads.to(tl.int64)[:, None] * head_stride
    tl.store(place + dims[None, :], page_value(values, pages.dtype.element_ty, QUANTIZED), mask=ok)


def store_kv(x: Tensor, pages: Tensor, slots: Tensor, scale: Tensor | None = None) -> None:
    """Write rows [T, kv_heads * head_dim] to token slots of `pages`; `scale` float32 [kv_heads] for FP8 pages."""
    _, kv_heads, page_size, head_dim = pages.shape
    quantized = pages.element_size() == 1
    assert quantized == (scale is not None), "FP8 pages have scales, others have none"
    _store[(x.shape[0], triton.cdiv(kv_heads, HEADS_PER_PROGRAM))](
        x,
        pages,
        slots,
        scale,
        x.stride(0),
        pages.stride(0),
        pages.stride(1),
        HEADS=kv_heads,
        HD=head_dim,
        HDP=power_of_two(head_dim),
        PAGE=page_size,
        BH=HEADS_PER_PROGRAM,
        QUANTIZED=quantized,
        PDL=uses_pdl(x.device),
        **options(x.device, 4, 1),
    )


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    """The op of ref.py: rotate the first pairs of each head, as many as cos has columns."""
    x = x.contiguous()
    out = torch.empty_like(x)
    heads = x.shape[1] // head_dim
    _launch(x, out, heads, 0, head_dim, positions, cos, sin, interleaved)
    return out


def rope_store(
    qkv: Tensor,
    q_heads: int,
    k_pages: Tensor,
    v_pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
    q_out: Tensor | None = None,
) -> Tensor:
    """One pass over a joined projection [T, (q_heads + 2 * kv_heads) * head_dim]: per-head norms of q and k (optional),
    rotation, keys and values stored at `slots`. Returns the queries [T, q_heads * head_dim]."""
    head_dim, kv_heads = k_pages.shape[3], k_pages.shape[1]
    out = qkv.new_empty(qkv.shape[0], q_heads * head_dim) if q_out is None else q_out
    _launch(
        qkv, out, q_heads, kv_heads, head_dim, positions, cos, sin, interleaved,
        pages=(k_pages, v_pages), slots=slots, norms=norms, eps=eps, scales=scales,
    )  # fmt: skip
    return out


def _launch(
    x: Tensor,
    q_out: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    pages: tuple[Tensor, Tensor] | None = None,
    slots: Tensor | None = None,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    k_pages, v_pages = pages or (None, None)
    q_norm, k_norm = norms or (None, None)
    k_scale, v_scale = scales or (None, None)
    heads = q_heads + 2 * kv_heads
    _rotate_store[(x.shape[0], triton.cdiv(heads, HEADS_PER_PROGRAM))](
        x,
        q_out,
        k_pages,
        v_pages,
        positions,
        slots,
        cos,
        sin,
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        eps,
        x.stride(0),
        q_out.stride(0),
        0 if k_pages is None else k_pages.stride(0),
        0 if k_pages is None else k_pages.stride(1),
        Q_HEADS=q_heads,
        K_HEADS=kv_heads,
        V_HEADS=kv_heads,
        HD=head_dim,
        HALF=power_of_two(head_dim // 2),
        ROTATED=cos.shape[1],
        PAGE=1 if k_pages is None else k_pages.shape[2],
        BH=HEADS_PER_PROGRAM,
        INTERLEAVED=interleaved,
        NORMED=norms is not None,
        QUANTIZED=k_pages is not None and k_pages.element_size() == 1,
        PDL=uses_pdl(x.device),
        **options(x.device, 4, 1),
    )
