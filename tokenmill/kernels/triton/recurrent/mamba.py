"""The selective scan of Mamba: every channel has a state of N numbers that decays at rates of its own.

With t = softplus(dt): S = exp(t a) S + t x b, y = S c + d x. Chunks of rows are combined by an associative scan, since
decays differ by number and no product of matrices does it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.recurrent import choose
from tokenmill.kernels.triton.recurrent.choose import Tiling
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


@triton.jit
def _combine(decay, update, next_decay, next_update):
    return decay * next_decay, update * next_decay + next_update


@triton.jit
def _mamba_step(
    x,
    dt,
    b,
    c,
    states,
    slots,
    targets,
    a,
    d,
    out,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, BLOCK channels."""
    row = tl.program_id(0).to(tl.int64)
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    ok = channel < CHANNELS
    inside = channel[:, None] * SIZE + number[None, :]
    both = ok[:, None] & (number < SIZE)[None, :]
    rates = tl.load(a + inside, mask=both, other=0.0).to(tl.float32)
    skip = tl.load(d + channel, mask=ok, other=0.0).to(tl.float32)
    dependent_launch(PDL)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    value = tl.load(x + row * x_stride + channel, mask=ok, other=0.0).to(tl.float32)
    time = softplus(tl.load(dt + row * dt_stride + channel, mask=ok, other=0.0).to(tl.float32))
    own_b = tl.load(b + row * b_stride + number, mask=number < SIZE, other=0.0).to(tl.float32)
    own_c = tl.load(c + row * c_stride + number, mask=number < SIZE, other=0.0).to(tl.float32)
    state = tl.exp(time[:, None] * rates) * state + (time * value)[:, None] * own_b[None, :]
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0))
    y = tl.sum(state * own_c[None, :], 1) + skip * value
    tl.store(out + row * CHANNELS + channel, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _mamba_rows(
    x,
    dt,
    b,
    c,
    states,
    slots,
    targets,
    starts,
    a,
    d,
    out,
    num_rows,
    num_seqs,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    slot_stride,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """All rows of one sequence, BLOCK channels, CHUNK rows at a time."""
    sequence = tl.program_id(0)
    channel, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    ok, ok_number = (channel < CHANNELS)[None, :], (number < SIZE)[None, :]
    inside = channel[:, None] * SIZE + number[None, :]
    both = (channel < CHANNELS)[:, None] & ok_number
    rates = tl.load(a + inside, mask=both, other=0.0).to(tl.float32)
    skip = tl.load(d + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
    dependent_launch(PDL)
    begin, end, limit = load_bounds(starts, sequence, num_seqs, num_rows)
    if begin >= limit:
        return
    slot, target = tl.load(slots + sequence).to(tl.int64), tl.load(targets + sequence).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    step = tl.arange(0, CHUNK)
    for first in range(begin, limit, CHUNK):
        rows = (first + step).to(tl.int64)[:, None]
        live = rows < end
        value = tl.load(x + rows * x_stride + channel[None, :], mask=live & ok, other=0.0).to(tl.float32)
        time = tl.load(dt + rows * dt_stride + channel[None, :], mask=live & ok, other=0.0).to(tl.float32)
        time = tl.where(live, softplus(time), 0.0)
        own_b = tl.load(b + rows * b_stride + number[None, :], mask=live & ok_number, other=0.0).to(tl.float32)
        own_c = tl.load(c + rows * c_stride + number[None, :], mask=live & ok_number, other=0.0).to(tl.float32)
        decay = tl.exp(time[:, :, None] * rates[None, :, :])
        update = (time * value)[:, :, None] * own_b[:, None, :]
        update += tl.where(step[:, None, None] == 0, decay * state[None, :, :], 0.0)
        _, after = tl.associative_scan((decay, update), 0, _combine)
        y = tl.sum(after * own_c[:, None, :], 2) + skip[None, :] * value
        tl.store(out + rows * CHANNELS + channel[None, :], y.to(out.dtype.element_ty), mask=ok & (rows < limit))
        state = tl.sum(tl.where(step[:, None, None] == CHUNK - 1, after, 0.0), 0)
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0) & (end > begin))


def mamba_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    a: Tensor,
    d: Tensor,
    targets: Tensor | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """x, dt [T, I]; b, c [T, N]; states float32 [slots, I, N]; a [I, N]; d [I]."""
    check_rows(x, dt, b, c)
    check_states(states)
    (num_rows, channels), size, device = x.shape, states.shape[2], x.device
    where = sequences(slots, starts, targets, device)
    out = torch.empty((num_rows, channels), dtype=x.dtype, device=device)
    strides = x.stride(0), dt.stride(0), b.stride(0), c.stride(0), states.stride(0)
    constants = {"CHANNELS": channels, "SIZE": size, "BLOCK_SIZE": power_of_two(size), "PDL": uses_pdl(device)}
    tiling = tiling or choose.mamba(channels, is_step(x, slots))
    blocks = triton.cdiv(channels, tiling.block)
    constants |= {"BLOCK": tiling.block} | options(device, tiling.warps, tiling.stages)
    if is_step(x, slots):
        _mamba_step[(num_rows, blocks)](
            x, dt, b, c, states, where.slots, where.targets, a, d, out, *strides, **constants,
        )  # fmt: skip
        return out
    num_seqs = slots.shape[0]
    _mamba_rows[(num_seqs, blocks)](
        x, dt, b, c, states, where.slots, where.targets, where.starts, a, d, out, num_rows, num_seqs, *strides,
        CHUNK=tiling.chunk, **constants,
    )  # fmt: skip
    return out
