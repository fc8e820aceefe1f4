"""Queries, keys and values on their way to quantized pages, in one pass: norms, rotary positions, rotation, rounding.

Where rows lie rotated (PackedRows.turn) queries are rotated too: attention over the pages needs both in one basis.
Conditioned keys (KeyTransform) are centered and scaled before that, and queries divided by the scale.
The rounding is that of the torch twins in model/kvstore, row by row; a row with a NaN or an infinity gets a NaN for
its scale. A negative slot is not written (padding rows of a captured step).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels import packed_pages
from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.triton.shared.device import dependent_launch, rotate_rows
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl

HEADS_PER_PROGRAM = 16  # the least that the tensor core takes
_HEADS_PER_PROGRAM = tl.constexpr(HEADS_PER_PROGRAM)
INT8_FLOAT = tl.constexpr(packed_pages.INT8_FLOAT)
HIDDEN_ZERO = tl.constexpr(packed_pages.HIDDEN_ZERO)
PAIRED_ZERO = tl.constexpr(packed_pages.PAIRED_ZERO)


@triton.jit
def round_away(x):
    """To the nearest whole number, halves away from zero."""
    return tl.where(x < 0, tl.ceil(x - 0.5), tl.floor(x + 0.5))


@triton.jit
def clamped(codes):
    return tl.minimum(tl.maximum(codes, 0.0), 15.0)


@triton.jit
def zero_codes(values, bad):
    """Codes of rows with one scale, a half with the zero point in its low bits, and that half as a number."""
    low, high = tl.minimum(tl.min(values, 1), 0.0), tl.maximum(tl.max(values, 1), 0.0)
    half = tl.maximum((high - low) / 15.0, 1e-6).to(tl.float16).to(tl.int16, bitcast=True) & -16
    scale = half.to(tl.float16, bitcast=True).to(tl.float32)
    zero = clamped(round_away(-low / scale))
    codes = clamped(round_away(values / scale[:, None]) + zero[:, None]).to(tl.int32)
    return codes, tl.where(bad == bad, (half | zero.to(tl.int16)).to(tl.int32) & 0xFFFF, 0x7E00)


@triton.jit
def pick_codes(values, length, bounds):
    """The codebook's cell of each value for rows of this length."""
    scaled = tl.where(length[:, None] > 0, values / length[:, None], 0.0)
    codes = tl.zeros_like(scaled).to(tl.int32)
    for i in tl.static_range(15):
        codes += (scaled > tl.load(bounds + i)).to(tl.int32)
    return codes


@triton.jit
def codebook_codes(even, odd, ok, levels, bounds, gains, GAINS: tl.constexpr):
    """Codes of even and odd dimensions for the best of some lengths, and the length that keeps the product right."""
    square = tl.sum(even * even + odd * odd, 1)
    norm = tl.sqrt(square)
    best = tl.full(norm.shape, float("inf"), dtype=tl.float32)
    even_codes, odd_codes = tl.zeros_like(even).to(tl.int32), tl.zeros_like(odd).to(tl.int32)
    for i in tl.static_range(GAINS):
        length = norm * tl.load(gains + i)
        a, b = pick_codes(even, length, bounds), pick_codes(odd, length, bounds)
        a_off = tl.where(ok, tl.load(levels + a) * length[:, None] - even, 0.0)
        b_off = tl.where(ok, tl.load(levels + b) * length[:, None] - odd, 0.0)
        cost = tl.sum(a_off * a_off + b_off * b_off, 1)
        better = cost < best
        best = tl.where(better, cost, best)
        even_codes = tl.where(better[:, None], a, even_codes)
        odd_codes = tl.where(better[:, None], b, odd_codes)
    a_level, b_level = tl.load(levels + even_codes), tl.load(levels + odd_codes)
    product = tl.sum(even * a_level + odd * b_level, 1)
    return even_codes, odd_codes, tl.where(product > 0, square / product, norm)


class Pages(NamedTuple):
    """The planes of PackedPages, codes as bytes, and what rounding needs."""

    k_codes: Tensor
    k_numbers: Tensor
    v_codes: Tensor
    v_numbers: Tensor
    rotation: Tensor | None  # float16 [head_dim, head_dim]
    levels: Tensor | None  # of a codebook: see PackedRows
    bounds: Tensor | None
    gains: Tensor | None
    center: Tensor | None  # float32 [kv_heads, head_dim], of keys: see KeyTransform
    scale: Tensor | None
    page_bytes: int  # strides
    head_bytes: int
    page_numbers: int
    head_numbers: int


class Rotary(NamedTuple):
    """Where each token is, and what its heads are rotated and normalized by."""

    positions: Tensor  # [T]
    slots: Tensor  # [T]
    cos: Tensor  # float32 [max positions, head_dim / 2]
    sin: Tensor
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    eps: float


class Variant(NamedTuple):
    """What a launch is compiled for."""

    q_heads: int
    kv_heads: int
    head_dim: int
    padded_dim: int
    page_size: int
    first_number: int  # where the numbers of a page and head begin
    interleaved: bool
    kind: int  # of packed_pages.py
    num_gains: int
    rotation_dtype: Any
    pdl: bool


@triton.jit
def condition(values, heads, dims, ok, pages, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr):
    """Keys less their center and times the scale of their head, queries divided by it, values as they are."""
    is_query, is_value = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    kv_head = tl.where(is_query, heads // (Q_HEADS // KV_HEADS), heads - Q_HEADS)
    place = kv_head[:, None] * HD + dims[None, :]
    scale = tl.load(pages.scale + place, mask=ok & ~is_value[:, None], other=1.0)
    center = tl.load(pages.center + place, mask=ok & ~(is_query | is_value)[:, None], other=0.0)
    return tl.where(is_query[:, None], values / scale, (values - center) * scale)


@triton.jit
def _rotate_store_packed(x, q_out, pages, rotary, x_stride, q_stride, VARIANT: tl.constexpr):
    """x [T, (Q + 2 * KV heads) * head_dim] -> q_out, and codes and scales in the pages."""
    Q_HEADS: tl.constexpr = VARIANT.q_heads
    KV_HEADS: tl.constexpr = VARIANT.kv_heads
    HD: tl.constexpr = VARIANT.head_dim
    PADDED_DIM: tl.constexpr = VARIANT.padded_dim
    PAGE: tl.constexpr = VARIANT.page_size
    KIND: tl.constexpr = VARIANT.kind
    BH: tl.constexpr = _HEADS_PER_PROGRAM
    GAINS: tl.constexpr = VARIANT.num_gains
    ROTATION_DTYPE: tl.constexpr = VARIANT.rotation_dtype
    PDL: tl.constexpr = VARIANT.pdl
    dependent_launch(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    dims = tl.arange(0, PADDED_DIM)
    HALF: tl.constexpr = HD // 2
    is_query, is_value = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    known = heads < Q_HEADS + 2 * KV_HEADS
    ok = known[:, None] & (dims < HD)[None, :]
    # Each dimension, and the one it is rotated with.
    if VARIANT.interleaved:
        pair, other, sign = dims // 2, dims + 1 - 2 * (dims % 2), tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        pair = dims % HALF
        other, sign = tl.where(dims < HALF, dims + HALF, dims - HALF), tl.where(dims < HALF, -1.0, 1.0)
    row = x + token * x_stride + heads[:, None] * HD
    own = tl.load(row + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=ok, other=0.0).to(tl.float32)
    if rotary.q_norm is not None:
        inverse = tl.where(is_value, 1.0, tl.rsqrt(tl.sum(own * own, 1) / HD + rotary.eps))[:, None]
        inner = dims < HD
        q_gain, k_gain = tl.load(rotary.q_norm + dims, mask=inner), tl.load(rotary.k_norm + dims, mask=inner)
        q_pair, k_pair = tl.load(rotary.q_norm + other, mask=inner), tl.load(rotary.k_norm + other, mask=inner)
        gain = tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])
        pair_gain = tl.where(is_query[:, None], q_pair[None, :], k_pair[None, :])
        own = own * inverse * tl.where(is_value[:, None], 1.0, gain)
        partner = partner * inverse * tl.where(is_value[:, None], 1.0, pair_gain)
    position = tl.load(rotary.positions + token).to(tl.int64)
    c = tl.load(rotary.cos + position * HALF + pair, mask=dims < HD, other=0.0)[None, :]
    s = tl.load(rotary.sin + position * HALF + pair, mask=dims < HD, other=0.0)[None, :] * sign[None, :]
    values = tl.where(ok, tl.where(is_value[:, None], own, own * c + partner * s), 0.0)
    if pages.center is not None:
        values = condition(values, heads, dims, ok, pages, Q_HEADS, KV_HEADS, HD)
    if pages.rotation is not None:
        values = rotate_rows(values, pages.rotation, HD, PADDED_DIM, ROTATION_DTYPE, False)
    q_ok = ok & is_query[:, None]
    q_row = q_out + token * q_stride + heads[:, None] * HD
    tl.store(q_row + dims[None, :], values.to(q_out.dtype.element_ty), mask=q_ok)

    slot = tl.load(rotary.slots + token).to(tl.int64)
    written = known & ~is_query & (slot >= 0)
    kv_head = tl.where(is_value, heads - Q_HEADS - KV_HEADS, heads - Q_HEADS).to(tl.int64)
    in_page = (slot // PAGE) * pages.page_bytes + kv_head * pages.head_bytes
    line = (slot // PAGE) * pages.page_numbers + kv_head * pages.head_numbers + VARIANT.first_number + slot % PAGE
    bad = tl.sum(values * 0.0, 1)  # NaN where a NaN or an infinity is
    if KIND <= INT8_FLOAT:
        amax = tl.max(tl.abs(values), 1)
        number = tl.maximum(amax / 127.0, 1e-6).to(pages.k_numbers.dtype.element_ty)
        codes = round_away(values / number.to(tl.float32)[:, None])
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        octets = codes.to(tl.int8).to(tl.uint8, bitcast=True)
        places = (in_page + (slot % PAGE) * HD)[:, None] + dims[None, :]
        byte_ok = written[:, None] & (dims < HD)[None, :]
        number = (number.to(tl.float32) + bad).to(pages.k_numbers.dtype.element_ty)
    else:
        even, odd = tl.split(tl.reshape(values, [BH, PADDED_DIM // 2, 2]))
        couples = tl.arange(0, PADDED_DIM // 2)
        inner_ok = (couples < HALF)[None, :] & known[:, None]
        if KIND == HIDDEN_ZERO:
            low = tl.minimum(tl.minimum(tl.min(even, 1), tl.min(odd, 1)), 0.0)
            high = tl.maximum(tl.maximum(tl.max(even, 1), tl.max(odd, 1)), 0.0)
            word = tl.maximum((high - low) / 15.0, 1e-6).to(tl.int32, bitcast=True) & -16
            scale = word.to(tl.float32, bitcast=True)
            zero = clamped(round_away(-low / scale))
            even_codes = clamped(round_away(even / scale[:, None]) + zero[:, None]).to(tl.int32)
            odd_codes = clamped(round_away(odd / scale[:, None]) + zero[:, None]).to(tl.int32)
            number = tl.where(bad == bad, word | zero.to(tl.int32), 0x7FC00000)
        elif KIND == PAIRED_ZERO:
            even_codes, even_number = zero_codes(even, bad)
            odd_codes, odd_number = zero_codes(odd, bad)
            number = even_number | (odd_number << 16)
        else:
            even_codes, odd_codes, length = codebook_codes(
                even, odd, inner_ok, pages.levels, pages.bounds, pages.gains, GAINS
            )  # fmt: skip
            number = (length + bad).to(tl.float16)
        octets = (even_codes | (odd_codes << 4)).to(tl.uint8)
        places = (in_page + (slot % PAGE) * HALF)[:, None] + couples[None, :]
        byte_ok = written[:, None] & inner_ok
    tl.store(pages.k_codes + places, octets, mask=byte_ok & ~is_value[:, None])
    tl.store(pages.v_codes + places, octets, mask=byte_ok & is_value[:, None])
    tl.store(pages.k_numbers + line, number, mask=written & ~is_value)
    tl.store(pages.v_numbers + line, number, mask=written & is_value)


def rope_store_packed(
    qkv: Tensor,
    q_heads: int,
    pages: PackedPages,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    *,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """As `rope_store` of rotary.py, over quantized pages; the queries returned are rotated as their rows are."""
    rows, kv_heads = pages.rows, pages.k.shape[1]
    out = qkv.new_empty(qkv.shape[0], q_heads * rows.head_dim)
    k_numbers, v_numbers = pages.numbers
    q_norm, k_norm = norms or (None, None)
    strides = (pages.k.stride(0), pages.k.stride(1), k_numbers.stride(0), k_numbers.stride(1))
    center, scale = (None, None) if pages.keys is None else (pages.keys.center, pages.keys.scale)
    planes = (pages.k, k_numbers, pages.v, v_numbers)
    tables = (rows.turn, rows.levels, rows.bounds, rows.gains, center, scale)
    variant = Variant(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=rows.head_dim,
        padded_dim=max(2 * 16, power_of_two(rows.head_dim)),
        page_size=pages.page_size,
        first_number=pages.page_size * rows.code_bytes // rows.number_type.itemsize,
        interleaved=interleaved,
        kind=rows.kind,
        num_gains=0 if rows.gains is None else rows.gains.numel(),
        rotation_dtype=tl.float32 if INTERPRETED else tl.float16,
        pdl=uses_pdl(qkv.device),
    )
    _rotate_store_packed[(qkv.shape[0], triton.cdiv(q_heads + 2 * kv_heads, HEADS_PER_PROGRAM))](
        qkv,
        out,
        Pages(*planes, *tables, *strides),
        Rotary(positions, slots, cos, sin, q_norm, k_norm, eps),
        qkv.stride(0),
        out.stride(0),
        VARIANT=variant,
        **options(qkv.device, 4, 1),
    )
    return out
