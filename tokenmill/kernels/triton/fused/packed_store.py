"""Queries, keys and values on their way to quantized pages, in one pass: norms, rotary positions, rotation, rounding.

Where rows lie rotated (PackedRows.turn) queries are rotated too: attention over the pages needs both in one basis.
The rounding is that of the torch twins in model/kvstore, row by row; a row with a NaN or an infinity gets a NaN for
its scale. A negative slot is not written (padding rows of a captured step).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.triton.attention.packed_kernel import turned
from tokenmill.kernels.triton.launch import INTERPRETED, begin, early, options, power_of_two

HEADS_AT_ONCE = 16  # the least that the tensor core takes


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


@triton.jit
def _rotate_store_packed(
    x, q_out, k_codes, k_numbers, v_codes, v_numbers, positions, slots, cos, sin, q_norm, k_norm, turn, levels, bounds,
    gains, eps, x_stride, q_stride, page_bytes, head_bytes, page_numbers, head_numbers,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HD: tl.constexpr, HDF: tl.constexpr, PAGE: tl.constexpr,
    FIRST_NUMBER: tl.constexpr, BH: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr,
    KIND: tl.constexpr, TURNED: tl.constexpr, GAINS: tl.constexpr, TURNING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [T, (Q + 2 * KV heads) * HD] -> q_out, and codes and scales in the pages."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    dims = tl.arange(0, HDF)
    HALF: tl.constexpr = HD // 2
    is_query, is_value = heads < Q_HEADS, heads >= Q_HEADS + KV_HEADS
    known = heads < Q_HEADS + 2 * KV_HEADS
    ok = known[:, None] & (dims < HD)[None, :]
    # Each dimension, and the one it is rotated with.
    if INTERLEAVED:
        pair, other, sign = dims // 2, dims + 1 - 2 * (dims % 2), tl.where(dims % 2 == 0, -1.0, 1.0)
    else:
        pair = dims % HALF
        other, sign = tl.where(dims < HALF, dims + HALF, dims - HALF), tl.where(dims < HALF, -1.0, 1.0)
    row = x + token * x_stride + heads[:, None] * HD
    own = tl.load(row + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORMED:
        inverse = tl.where(is_value, 1.0, tl.rsqrt(tl.sum(own * own, 1) / HD + eps))[:, None]
        inner = dims < HD
        q_gain, k_gain = tl.load(q_norm + dims, mask=inner), tl.load(k_norm + dims, mask=inner)
        q_pair, k_pair = tl.load(q_norm + other, mask=inner), tl.load(k_norm + other, mask=inner)
        gain = tl.where(is_query[:, None], q_gain[None, :], k_gain[None, :])
        pair_gain = tl.where(is_query[:, None], q_pair[None, :], k_pair[None, :])
        own = own * inverse * tl.where(is_value[:, None], 1.0, gain)
        partner = partner * inverse * tl.where(is_value[:, None], 1.0, pair_gain)
    position = tl.load(positions + token).to(tl.int64)
    c = tl.load(cos + position * HALF + pair, mask=dims < HD, other=0.0)[None, :]
    s = tl.load(sin + position * HALF + pair, mask=dims < HD, other=0.0)[None, :] * sign[None, :]
    values = tl.where(ok, tl.where(is_value[:, None], own, own * c + partner * s), 0.0)
    if TURNED:
        values = turned(values, turn, HD, HDF, TURNING, False)
    q_ok = ok & is_query[:, None]
    q_row = q_out + token * q_stride + heads[:, None] * HD
    tl.store(q_row + dims[None, :], values.to(q_out.dtype.element_ty), mask=q_ok)

    slot = tl.load(slots + token).to(tl.int64)
    written = known & ~is_query & (slot >= 0)
    kv_head = tl.where(is_value, heads - Q_HEADS - KV_HEADS, heads - Q_HEADS).to(tl.int64)
    in_page = (slot // PAGE) * page_bytes + kv_head * head_bytes
    line = (slot // PAGE) * page_numbers + kv_head * head_numbers + FIRST_NUMBER + slot % PAGE
    bad = tl.sum(values * 0.0, 1)  # NaN where a NaN or an infinity is
    if KIND < 2:
        amax = tl.max(tl.abs(values), 1)
        number = tl.maximum(amax / 127.0, 1e-6).to(k_numbers.dtype.element_ty)
        codes = round_away(values / number.to(tl.float32)[:, None])
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0)
        octets = codes.to(tl.int8).to(tl.uint8, bitcast=True)
        places = (in_page + (slot % PAGE) * HD)[:, None] + dims[None, :]
        byte_ok = written[:, None] & (dims < HD)[None, :]
        number = (number.to(tl.float32) + bad).to(k_numbers.dtype.element_ty)
    else:
        even, odd = tl.split(tl.reshape(values, [BH, HDF // 2, 2]))
        couples = tl.arange(0, HDF // 2)
        inner_ok = (couples < HALF)[None, :] & known[:, None]
        if KIND == 2:
            low = tl.minimum(tl.minimum(tl.min(even, 1), tl.min(odd, 1)), 0.0)
            high = tl.maximum(tl.maximum(tl.max(even, 1), tl.max(odd, 1)), 0.0)
            word = tl.maximum((high - low) / 15.0, 1e-6).to(tl.int32, bitcast=True) & -16
            scale = word.to(tl.float32, bitcast=True)
            zero = clamped(round_away(-low / scale))
            even_codes = clamped(round_away(even / scale[:, None]) + zero[:, None]).to(tl.int32)
            odd_codes = clamped(round_away(odd / scale[:, None]) + zero[:, None]).to(tl.int32)
            number = tl.where(bad == bad, word | zero.to(tl.int32), 0x7FC00000)
        elif KIND == 4:
            even_codes, even_number = zero_codes(even, bad)
            odd_codes, odd_number = zero_codes(odd, bad)
            number = even_number | (odd_number << 16)
        else:
            even_codes, odd_codes, length = codebook_codes(even, odd, inner_ok, levels, bounds, gains, GAINS)
            number = (length + bad).to(tl.float16)
        octets = (even_codes | (odd_codes << 4)).to(tl.uint8)
        places = (in_page + (slot % PAGE) * HALF)[:, None] + couples[None, :]
        byte_ok = written[:, None] & inner_ok
    tl.store(k_codes + places, octets, mask=byte_ok & ~is_value[:, None])
    tl.store(v_codes + places, octets, mask=byte_ok & is_value[:, None])
    tl.store(k_numbers + line, number, mask=written & ~is_value)
    tl.store(v_numbers + line, number, mask=written & is_value)


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
    _rotate_store_packed[(qkv.shape[0], triton.cdiv(q_heads + 2 * kv_heads, HEADS_AT_ONCE))](
        qkv,
        out,
        pages.k,
        k_numbers,
        pages.v,
        v_numbers,
        positions,
        slots,
        cos,
        sin,
        q_norm,
        k_norm,
        rows.turn,
        rows.levels,
        rows.bounds,
        rows.gains,
        eps,
        qkv.stride(0),
        out.stride(0),
        pages.k.stride(0),
        pages.k.stride(1),
        k_numbers.stride(0),
        k_numbers.stride(1),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        HD=rows.head_dim,
        HDF=max(2 * 16, power_of_two(rows.head_dim)),
        PAGE=pages.page_size,
        FIRST_NUMBER=pages.page_size * rows.code_bytes // rows.number_type.itemsize,
        BH=HEADS_AT_ONCE,
        INTERLEAVED=interleaved,
        NORMED=norms is not None,
        KIND=rows.kind,
        TURNED=rows.turn is not None,
        GAINS=0 if rows.gains is None else rows.gains.numel(),
        TURNING=tl.float32 if INTERPRETED else tl.float16,
        PDL=early(qkv.device),
        **options(qkv.device, 4, 1),
    )
    return out
