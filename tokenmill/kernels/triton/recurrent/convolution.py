"""The causal convolution of recurrent layers: silu of a weighted sum of each channel's last inputs.

Rows are computed in parallel: those before a sequence's first row are its state. Bound by memory: every input is read
once from it and a few times from the cache. A scan of steps can compute it on the way (`Convolution`, `convolve_row`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.recurrent.sequences import (
    check_rows,
    check_states,
    is_step,
    load_bounds,
    sequences,
)
from tokenmill.kernels.triton.shared.device import dependent_launch, find_sequence
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

_TOKENS = 32  # rows of a program


class Convolution(NamedTuple):
    """What a scan needs to convolve its rows itself, as in `convolve`."""

    states: Tensor
    weight: Tensor
    bias: Tensor | None


@triton.jit
def convolve_row(
    x,
    states,
    slot,
    target,
    weight,
    bias,
    columns,
    ok,
    is_written,
    channels,
    slot_stride,
    WIDTH: tl.constexpr,
    BIASED: tl.constexpr,
):
    """The next outputs of some channels of one sequence, float32; `x`: its row. Their new state goes to `target` where
    `is_written`; that may be `slot` only if no other program reads these channels."""
    source = states + tl.maximum(slot, 0) * slot_stride + columns
    destination = states + tl.maximum(target, 0) * slot_stride + columns
    total = tl.zeros(columns.shape, tl.float32)
    if BIASED:
        total += tl.load(bias + columns, mask=ok, other=0.0).to(tl.float32)
    for i in tl.static_range(WIDTH):
        if i < WIDTH - 1:
            value = tl.load(source + i * channels, mask=ok & (slot >= 0), other=0.0)
        else:
            value = tl.load(x + columns, mask=ok, other=0.0).to(tl.float32)
        total += value * tl.load(weight + i * channels + columns, mask=ok, other=0.0).to(tl.float32)
        if i > 0:  # what was there is loaded already, by the same thread
            tl.store(destination + (i - 1) * channels, value, mask=ok & is_written & (target >= 0))
    return total * tl.sigmoid(total)


def convolution_arguments(convolution: Convolution | None) -> tuple[Any, ...]:
    """For a scan's kernel: states, weight, bias, distance of slots; nothing without a convolution."""
    if convolution is None:
        return None, None, None, 0
    check_states(convolution.states)
    return (*convolution, convolution.states.stride(0))


def convolution_constants(convolution: Convolution | None) -> dict[str, Any]:
    if convolution is None:
        return {"WIDTH": 0, "BIASED": False}
    return {"WIDTH": convolution.weight.shape[0], "BIASED": convolution.bias is not None}


@triton.jit
def _convolve_step(
    x,
    states,
    slots,
    targets,
    weight,
    bias,
    out,
    channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of one sequence, BLOCK channels."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = columns < channels
    dependent_launch(PDL)
    slot, target = tl.load(slots + row).to(tl.int64), tl.load(targets + row).to(tl.int64)
    own = x + row * x_stride
    y = convolve_row(own, states, slot, target, weight, bias, columns, ok, ok, channels, slot_stride, WIDTH, BIASED)
    tl.store(out + row * channels + columns, y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _convolve_rows(
    x,
    states,
    slots,
    targets,
    starts,
    weight,
    bias,
    out,
    num_rows,
    num_seqs,
    channels,
    x_stride,
    slot_stride,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """TOKENS rows of one sequence, BLOCK channels; the first rows' program also writes the new state."""
    block = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dependent_launch(PDL)
    sequence = find_sequence(starts, block, num_seqs, TOKENS)
    begin, end, limit = load_bounds(starts, sequence, num_seqs, num_rows)
    first = (block - (begin // TOKENS + sequence)) * TOKENS
    if begin + first >= limit:
        return
    slot, target = tl.load(slots + sequence).to(tl.int64), tl.load(targets + sequence).to(tl.int64)
    ok = (columns < channels)[None, :]
    own = x + begin.to(tl.int64) * x_stride + columns[None, :]
    source = states + tl.maximum(slot, 0) * slot_stride + columns[None, :]
    local = first + tl.arange(0, TOKENS)
    total = tl.zeros((TOKENS, BLOCK), tl.float32)
    for i in tl.static_range(WIDTH):
        back = (local + i - (WIDTH - 1))[:, None]
        live = (begin + local < end)[:, None] & ok
        value = tl.load(own + back.to(tl.int64) * x_stride, mask=live & (back >= 0), other=0.0).to(tl.float32)
        kept = live & (back < 0) & (slot >= 0)
        value += tl.load(source + (back + WIDTH - 1) * channels, mask=kept, other=0.0)
        gain = tl.load(weight + i * channels + columns, mask=columns < channels, other=0.0).to(tl.float32)
        total += value * gain[None, :]
    if BIASED:
        total += tl.load(bias + columns, mask=columns < channels, other=0.0).to(tl.float32)[None, :]
    total *= tl.sigmoid(total)
    rows = (begin + local).to(tl.int64)[:, None]
    tl.store(out + rows * channels + columns[None, :], total.to(out.dtype.element_ty), mask=ok & (rows < limit))
    if (first == 0) & (target >= 0) & (end > begin):
        number = tl.arange(0, KEPT)[:, None]
        last = number + (end - begin) - (WIDTH - 1)  # the input that comes to this place
        is_state = (number < WIDTH - 1) & ok
        inputs = tl.load(own + last.to(tl.int64) * x_stride, mask=is_state & (last >= 0), other=0.0).to(tl.float32)
        is_old = is_state & (last < 0) & (slot >= 0)
        inputs += tl.load(source + (last + WIDTH - 1) * channels, mask=is_old, other=0.0)
        tl.debug_barrier()  # all threads have read the old state
        destination = states + target * slot_stride + columns[None, :]
        tl.store(destination + number * channels, inputs, mask=is_state)


def convolve(
    x: Tensor,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor | None = None,
) -> Tensor:
    """x [T, C], states float32 [slots, K - 1, C], weight [K, C], oldest input first."""
    check_rows(x)
    check_states(states)
    num_rows, channels = x.shape
    width, device = weight.shape[0], x.device
    where = sequences(slots, starts, targets, device)
    out = torch.empty((num_rows, channels), dtype=x.dtype, device=device)
    constants = {"WIDTH": width, "BIASED": bias is not None, "PDL": uses_pdl(device)}
    if is_step(x, slots):
        block = min(power_of_two(channels), 256)
        _convolve_step[(num_rows, triton.cdiv(channels, block))](
            x, states, where.slots, where.targets, weight, bias, out, channels, x.stride(0), states.stride(0),
            BLOCK=block, **constants, **options(device, 2, 1),
        )  # fmt: skip
        return out
    block, num_seqs = min(power_of_two(channels), 128), slots.shape[0]
    grid = (num_rows // _TOKENS + num_seqs, triton.cdiv(channels, block))
    _convolve_rows[grid](
        x, states, where.slots, where.targets, where.starts, weight, bias, out, num_rows, num_seqs, channels,
        x.stride(0), states.stride(0), KEPT=power_of_two(width - 1), TOKENS=_TOKENS, BLOCK=block, **constants,
        **options(device, 4, 1),
    )  # fmt: skip
    return out
