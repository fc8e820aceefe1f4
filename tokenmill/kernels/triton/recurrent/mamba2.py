"""The scan of Mamba 2: a state matrix [P, N] for each head, which decays as a whole.

With t = softplus(dt_scale dt + dt_bias) within its limits: S = exp(t a) S + t x b', y = S c + d x. A program has a head
(or some rows of its states) of one sequence and goes over its rows in chunks: inside a chunk the outputs are a product
of [chunk, chunk] scores, as in attention, and the state before it adds one more. Decays are exponentials of numbers
<= 0 and never divided by.
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
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl

_MAX_TIME = 3.0e38  # instead of infinity


@triton.jit
def _time_steps(dt, scale, bias, low, high):
    return tl.minimum(tl.maximum(softplus(dt * scale + bias), low), high)


@triton.jit
def _mamba2_step(
    xbc,
    dt,
    states,
    slots,
    targets,
    a,
    d,
    dt_bias,
    out,
    dt_scale,
    dt_low,
    dt_high,
    xbc_stride,
    dt_stride,
    slot_stride,
    inputs,
    weight,
    channel_bias,
    inputs_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row, BLOCK rows of one head's state. WIDTH > 0: the row is convolved first, with the states `inputs`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    part, number = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    ok, ok_number = part < DIM, number < SIZE
    both = ok[:, None] & ok_number[None, :]
    inside = (head * DIM + part)[:, None] * SIZE + number[None, :]
    rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    dependent_launch(PDL)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    time = _time_steps(tl.load(dt + row * dt_stride + head).to(tl.float32), dt_scale, bias, dt_low, dt_high)
    own = xbc + row * xbc_stride
    group = HEADS * DIM + head // (HEADS // GROUPS) * SIZE
    if WIDTH > 0:
        channels: tl.constexpr = HEADS * DIM + 2 * GROUPS * SIZE
        is_first = (head % (HEADS // GROUPS) == 0) & (tl.program_id(2) == 0)  # of those with the same b and c
        x = convolve_row(
            own, inputs, slot, target, weight, channel_bias, head * DIM + part, ok, ok, channels, inputs_stride,
            WIDTH, BIASED,
        )  # fmt: skip
        b = convolve_row(
            own, inputs, slot, target, weight, channel_bias, group + number, ok_number, is_first, channels,
            inputs_stride, WIDTH, BIASED,
        )  # fmt: skip
        c = convolve_row(
            own, inputs, slot, target, weight, channel_bias, group + GROUPS * SIZE + number, ok_number, is_first,
            channels, inputs_stride, WIDTH, BIASED,
        )  # fmt: skip
    else:
        x = tl.load(own + head * DIM + part, mask=ok, other=0.0).to(tl.float32)
        b = tl.load(own + group + number, mask=ok_number, other=0.0).to(tl.float32)
        c = tl.load(own + group + GROUPS * SIZE + number, mask=ok_number, other=0.0).to(tl.float32)
    state = tl.exp(time * rate) * state + (time * x)[:, None] * b[None, :]
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0))
    y = tl.sum(state * c[None, :], 1) + skip * x
    tl.store(out + row * (HEADS * DIM) + head * DIM + part, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _mamba2_rows(
    xbc,
    dt,
    states,
    slots,
    targets,
    starts,
    a,
    d,
    dt_bias,
    out,
    dt_scale,
    dt_low,
    dt_high,
    num_rows,
    num_seqs,
    xbc_stride,
    dt_stride,
    slot_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPUTE: tl.constexpr,
    PDL: tl.constexpr,
):
    """All rows of one sequence, BLOCK rows of one head's state, CHUNK rows at a time."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    part, number = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_SIZE)
    ok, ok_number = (part < DIM)[None, :], (number < SIZE)[None, :]
    both = (part < DIM)[:, None] & ok_number
    inside = (head * DIM + part)[:, None] * SIZE + number[None, :]
    rate, skip, bias = tl.load(a + head), tl.load(d + head), tl.load(dt_bias + head)
    dependent_launch(PDL)
    begin, end, limit = load_bounds(starts, sequence, num_seqs, num_rows)
    if begin >= limit:
        return
    slot, target = tl.load(slots + sequence).to(tl.int64), tl.load(targets + sequence).to(tl.int64)
    state = tl.load(states + tl.maximum(slot, 0) * slot_stride + inside, mask=both & (slot >= 0), other=0.0)
    group = HEADS * DIM + head // (HEADS // GROUPS) * SIZE
    step = tl.arange(0, CHUNK)
    for first in range(begin, limit, CHUNK):
        rows = (first + step).to(tl.int64)
        live = rows < end
        own = xbc + rows[:, None] * xbc_stride
        x = tl.load(own + head * DIM + part[None, :], mask=live[:, None] & ok, other=0.0).to(COMPUTE)
        numbers = live[:, None] & ok_number
        b = tl.load(own + group + number[None, :], mask=numbers, other=0.0).to(COMPUTE)
        c = tl.load(own + group + GROUPS * SIZE + number[None, :], mask=numbers, other=0.0).to(COMPUTE)
        time = tl.load(dt + rows * dt_stride + head, mask=live, other=0.0).to(tl.float32)
        time = tl.where(live, _time_steps(time, dt_scale, bias, dt_low, dt_high), 0.0)
        sums, total = tl.cumsum(time * rate, 0), tl.sum(time * rate, 0)
        decays = tl.where(step[:, None] >= step[None, :], sums[:, None] - sums[None, :], float("-inf"))
        scores = tl.dot(c, tl.trans(b), input_precision="ieee") * tl.exp(decays) * time[None, :]
        y = tl.dot(c, tl.trans(state).to(COMPUTE), input_precision="ieee") * tl.exp(sums)[:, None]
        y += tl.dot(scores.to(COMPUTE), x, input_precision="ieee")
        y += skip * x.to(tl.float32)
        place = out + rows[:, None] * (HEADS * DIM) + head * DIM + part[None, :]
        tl.store(place, y.to(out.dtype.element_ty), mask=ok & (rows < limit)[:, None])
        left = tl.exp(total - sums) * time  # what is left of each row's input after the chunk
        inputs = (x.to(tl.float32) * left[:, None]).to(COMPUTE)
        state = tl.exp(total) * state + tl.dot(tl.trans(inputs), b, input_precision="ieee")
    tl.store(states + tl.maximum(target, 0) * slot_stride + inside, state, mask=both & (target >= 0) & (end > begin))


def mamba2_scan(
    xbc: Tensor,
    dt: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    num_groups: int,
    dt_scale: float = 1.0,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
    targets: Tensor | None = None,
    tiling: Tiling | None = None,
    convolution: Convolution | None = None,
) -> Tensor:
    """xbc [T, H P + 2 G N], dt [T, H]; states float32 [slots, H, P, N]; a, d, dt_bias [H]. `convolution`: xbc is what
    goes into it; `targets` are other slots then than any of `slots`."""
    if convolution is not None and not (is_step(xbc, slots) and choose.convolves(xbc.shape[0])):
        xbc, convolution = convolve(xbc, convolution.states, slots, starts, *convolution[1:], targets), None
    check_rows(xbc, dt)
    check_states(states)
    _, heads, dim, size = states.shape
    num_rows, num_seqs, device = xbc.shape[0], slots.shape[0], xbc.device
    where = sequences(slots, starts, targets, device)
    out = torch.empty((num_rows, heads * dim), dtype=xbc.dtype, device=device)
    times = float(dt_scale), float(dt_limits[0]), min(float(dt_limits[1]), _MAX_TIME)
    strides = xbc.stride(0), dt.stride(0), states.stride(0)
    constants = {
        "HEADS": heads,
        "DIM": dim,
        "SIZE": size,
        "GROUPS": num_groups,
        "BLOCK_SIZE": power_of_two(size, 16),
        "PDL": uses_pdl(device),
    }
    tiling = tiling or choose.mamba2(dim, size, num_seqs * heads, is_step(xbc, slots), device)
    grid = (num_seqs, heads, triton.cdiv(dim, tiling.block))
    constants |= {"BLOCK": tiling.block} | options(device, tiling.warps, tiling.stages)
    if is_step(xbc, slots):
        _mamba2_step[grid](
            xbc, dt, states, where.slots, where.targets, a, d, dt_bias, out, *times, *strides,
            *convolution_arguments(convolution), **convolution_constants(convolution), **constants,
        )  # fmt: skip
        return out
    compute = tl.float32 if INTERPRETED or xbc.dtype == torch.float32 else tl.bfloat16
    _mamba2_rows[grid](
        xbc, dt, states, where.slots, where.targets, where.starts, a, d, dt_bias, out, *times, num_rows, num_seqs,
        *strides, CHUNK=tiling.chunk, COMPUTE=compute, **constants,
    )  # fmt: skip
    return out
