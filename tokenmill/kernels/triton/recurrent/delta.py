"""The gated delta rule: a state matrix [Dk, Dv] for each head, which is corrected by what it gets wrong about a key.

With q and k of length one, q times Dk ** -0.5, g = a softplus(dt + dt_bias), w = sigmoid(beta): S = exp(g) S;
S += k (w (v - S' k))'; y = S' q. Columns of the state do not depend on each other, so programs share a head by columns.
The updates of a chunk do depend on each other: (I + L) U = W with L strictly lower triangular, and the inverse of I + L
is (I - L)(I + L^2)(I + L^4)..., a product of few factors since chunks are short (in long ones its terms would grow).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.recurrent import choose
from tokenmill.kernels.triton.recurrent.choose import Tiling
from tokenmill.kernels.triton.recurrent.convolution import (
    Convolution,
    convolution_arguments,
    convolution_constants,
    convolve,
    convolve_row,
)
from tokenmill.kernels.triton.recurrent.sequences import (
    check_rows,
    check_states,
    is_step,
    load_bounds,
    sequences,
    softplus,
)
from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _delta_step(
    qkv,
    beta,
    dt,
    states,
    slots,
    targets,
    a,
    dt_bias,
    out,
    qkv_stride,
    beta_stride,
    dt_stride,
    slot_stride,
    inputs,
    weight,
    channel_bias,
    inputs_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, BLOCK columns of one head's state. WIDTH > 0: the row is convolved first, with the states `inputs`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column, number = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_KEY)
    ok, ok_number = column < VALUE, number < KEY
    both = ok_number[:, None] & ok[None, :]
    inside = (head * KEY + number)[:, None] * VALUE + column[None, :]
    rate, bias = tl.load(a + head), tl.load(dt_bias + head)
    dependent_launch(PDL)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    own = qkv + row * qkv_stride
    key_head = head // (HEADS // KEY_HEADS) * KEY
    if WIDTH > 0:
        channels: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
        is_first = (head % (HEADS // KEY_HEADS) == 0) & (tl.program_id(2) == 0)  # of those with the same q and k
        q = convolve_row(
            own, inputs, slot, target, weight, channel_bias, key_head + number, ok_number, is_first, channels,
            inputs_stride, WIDTH, BIASED,
        )  # fmt: skip
        k = convolve_row(
            own, inputs, slot, target, weight, channel_bias, KEY_HEADS * KEY + key_head + number, ok_number, is_first,
            channels, inputs_stride, WIDTH, BIASED,
        )  # fmt: skip
        v = convolve_row(
            own, inputs, slot, target, weight, channel_bias, 2 * KEY_HEADS * KEY + head * VALUE + column, ok, ok,
            channels, inputs_stride, WIDTH, BIASED,
        )  # fmt: skip
    else:
        q = tl.load(own + key_head + number, mask=ok_number, other=0.0).to(tl.float32)
        k = tl.load(own + KEY_HEADS * KEY + key_head + number, mask=ok_number, other=0.0).to(tl.float32)
        v = tl.load(own + 2 * KEY_HEADS * KEY + head * VALUE + column, mask=ok, other=0.0).to(tl.float32)
    scale: tl.constexpr = KEY**-0.5
    q *= tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
    strength = tl.sigmoid(tl.load(beta + row * beta_stride + head).to(tl.float32))
    gate = rate * softplus(tl.load(dt + row * dt_stride + head).to(tl.float32) + bias)
    state *= tl.exp(gate)
    update = strength * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * update[None, :]
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0))
    y = tl.sum(state * q[:, None], 0)
    tl.store(out + row * (HEADS * VALUE) + head * VALUE + column, y.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _inverse(lower, CHUNK: tl.constexpr, SQUARINGS: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular matrix [CHUNK, CHUNK], CHUNK = 2 ** (SQUARINGS + 1)."""
    step = tl.arange(0, CHUNK)
    power = -lower
    inverse = tl.where(step[:, None] == step[None, :], 1.0, 0.0) + power
    for _ in tl.static_range(SQUARINGS):
        power = tl.dot(power, power, input_precision="ieee")
        inverse += tl.dot(inverse, power, input_precision="ieee")
    return inverse


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _delta_rows(
    qkv,
    beta,
    dt,
    states,
    slots,
    targets,
    starts,
    a,
    dt_bias,
    out,
    num_rows,
    num_seqs,
    qkv_stride,
    beta_stride,
    dt_stride,
    slot_stride,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    SQUARINGS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """All rows of one sequence, BLOCK columns of one head's state, CHUNK rows at a time."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    column, number = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_KEY)
    ok, ok_number = (column < VALUE)[None, :], (number < KEY)[None, :]
    both = (number < KEY)[:, None] & ok
    inside = (head * KEY + number)[:, None] * VALUE + column[None, :]
    rate, bias = tl.load(a + head), tl.load(dt_bias + head)
    dependent_launch(PDL)
    begin, end, limit = load_bounds(starts, sequence, num_seqs, num_rows)
    if begin >= limit:
        return
    slot, target = tl.load(slots + sequence).to(tl.int64), tl.load(targets + sequence).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    key_head = head // (HEADS // KEY_HEADS) * KEY
    scale: tl.constexpr = KEY**-0.5
    step = tl.arange(0, CHUNK)
    for first in range(begin, limit, CHUNK):
        rows = (first + step).to(tl.int64)
        live = rows < end
        own = qkv + rows[:, None] * qkv_stride
        keys = live[:, None] & ok_number
        q = tl.load(own + key_head + number[None, :], mask=keys, other=0.0).to(tl.float32)
        k = tl.load(own + KEY_HEADS * KEY + key_head + number[None, :], mask=keys, other=0.0).to(tl.float32)
        values = own + 2 * KEY_HEADS * KEY + head * VALUE + column[None, :]
        v = tl.load(values, mask=live[:, None] & ok, other=0.0).to(tl.float32)
        q *= (tl.rsqrt(tl.sum(q * q, 1) + _L2_EPS) * scale)[:, None]
        k *= tl.rsqrt(tl.sum(k * k, 1) + _L2_EPS)[:, None]
        weight = tl.sigmoid(tl.load(beta + rows * beta_stride + head, mask=live, other=0.0).to(tl.float32))
        weight = tl.where(live, weight, 0.0)[:, None]
        gate = rate * softplus(tl.load(dt + rows * dt_stride + head, mask=live, other=0.0).to(tl.float32) + bias)
        gate = tl.where(live, gate, 0.0)
        sums, total = tl.cumsum(gate, 0), tl.sum(gate, 0)
        grown = tl.exp(sums)[:, None]
        decays = tl.where(step[:, None] >= step[None, :], sums[:, None] - sums[None, :], float("-inf"))
        decays = tl.exp(decays)
        like = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays * weight
        inverse = _inverse(tl.where(step[:, None] > step[None, :], like, 0.0), CHUNK, SQUARINGS)
        wanted = weight * (v - grown * tl.dot(k, state, input_precision=PRECISION))
        updates = tl.dot(inverse, wanted, input_precision=PRECISION)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays
        y = grown * tl.dot(q, state, input_precision=PRECISION)
        y += tl.dot(scores, updates, input_precision=PRECISION)
        place = out + rows[:, None] * (HEADS * VALUE) + head * VALUE + column[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=ok & (rows < limit)[:, None])
        left = k * tl.exp(total - sums)[:, None]
        state = tl.exp(total) * state + tl.dot(tl.trans(left), updates, input_precision=PRECISION)
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0) & (end > begin))


def delta_scan(
    qkv: Tensor,
    beta: Tensor,
    dt: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    targets: Tensor | None = None,
    tiling: Tiling | None = None,
    convolution: Convolution | None = None,
) -> Tensor:
    """qkv [T, 2 Hk Dk + H Dv], beta and dt [T, H]; states float32 [slots, H, Dk, Dv]; a, dt_bias [H]. `convolution`:
    qkv is what goes into it; `targets` are other slots then than any of `slots`."""
    if convolution is not None and not (is_step(qkv, slots) and choose.convolves(qkv.shape[0])):
        qkv, convolution = convolve(qkv, convolution.states, slots, starts, *convolution[1:], targets), None
    check_rows(qkv, beta, dt)
    check_states(states)
    _, heads, key, value = states.shape
    num_rows, num_seqs, device = qkv.shape[0], slots.shape[0], qkv.device
    where = sequences(slots, starts, targets, device)
    out = torch.empty((num_rows, heads * value), dtype=qkv.dtype, device=device)
    tiling = tiling or choose.delta(value, is_step(qkv, slots))
    grid = (num_seqs, heads, triton.cdiv(value, tiling.block))
    strides = qkv.stride(0), beta.stride(0), dt.stride(0), states.stride(0)
    constants = {
        "HEADS": heads,
        "KEY_HEADS": num_key_heads,
        "KEY": key,
        "VALUE": value,
        "BLOCK_KEY": power_of_two(key, 16),
        "BLOCK": tiling.block,
        "PDL": uses_pdl(device),
        **options(device, tiling.warps, tiling.stages),
    }
    if is_step(qkv, slots):
        _delta_step[grid](
            qkv, beta, dt, states, where.slots, where.targets, a, dt_bias, out, *strides,
            *convolution_arguments(convolution), **convolution_constants(convolution), **constants,
        )  # fmt: skip
        return out
    precision = "ieee" if qkv.dtype == torch.float32 else "tf32"
    _delta_rows[grid](
        qkv, beta, dt, states, where.slots, where.targets, where.starts, a, dt_bias, out, num_rows, num_seqs, *strides,
        CHUNK=tiling.chunk, SQUARINGS=tiling.chunk.bit_length() - 2, PRECISION=precision, **constants,
    )  # fmt: skip
    return out
