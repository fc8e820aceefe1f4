"""The smallest logit that top-k, top-p and min-p keep, per row: searched by bisection over the bits of a float, nothing
is sorted.

One program has a row. Its first pass notes the largest logit of every 128 neighbours; these bound the answer from below
(the k-th largest of them is no larger than the k-th largest logit), so that only few neighbourhoods can hold what is
kept. Where they fit, they are loaded once and searched in registers; a row that is too flat for that (no top-k, or a
very large one) is read again for every bit.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl, workspace

_BLOCK = 8192  # logits per step of a pass over a whole row
_PART = 128  # neighbours of which the largest is noted
_HELD = 64  # such parts that are searched in registers


@triton.jit
def ordered(values):
    """float32 -> uint32 with the same order."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)


@triton.jit
def unordered(key):
    """The float32 of an ordered key."""
    return tl.where(key >= 0x80000000, key ^ 0x80000000, key ^ 0xFFFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def next_bit(found, bit, weight, wanted, top):
    """`found` with `bit` where the logits at or above that key still weigh `wanted`."""
    trial = found | bit
    # Keys of NaNs lie at both ends: above them all, nothing is kept; below, everything.
    reached = (weight >= wanted) & (trial <= ordered(top))
    return tl.where(reached | (trial < 0x00800000), trial, found)


@triton.jit
def sum_above(logits, least, top, inverse_temperature, vocab, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """How many logits are >= `least`, or (WEIGHED) the sum of their exp((logit - top) / temperature)."""
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(logits + places, mask=places < vocab, other=float("-inf")).to(tl.float32)
        weights = tl.exp((values - top) * inverse_temperature) if WEIGHED else 1.0
        total += tl.where((values >= least) & (places < vocab), weights, 0.0)
    return tl.sum(total, 0)


@triton.jit
def bisect(logits, wanted, top, inverse_temperature, vocab, BLOCK: tl.constexpr, WEIGHED: tl.constexpr):
    """The largest float32 such that the logits at or above it number or weigh at least `wanted`."""
    found = tl.zeros([], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    while bit > 0:
        weight = sum_above(logits, unordered(found | bit), top, inverse_temperature, vocab, BLOCK, WEIGHED)
        found = next_bit(found, bit, weight, wanted, top)
        bit = bit >> 1
    return unordered(found)


@triton.jit
def bisect_held(values, weights, wanted, top):
    """As `bisect`, of values in registers: the largest float32 such that those at or above it weigh `wanted`."""
    found = tl.zeros([], dtype=tl.uint32)
    bit = tl.full([], 0x80000000, dtype=tl.uint32)
    while bit > 0:
        weight = tl.sum(tl.where(values >= unordered(found | bit), weights, 0.0), 0)
        found = next_bit(found, bit, weight, wanted, top)
        bit = bit >> 1
    return unordered(found)


@triton.jit
def note_maxima(logits, maxima, vocab, BLOCK: tl.constexpr, PART: tl.constexpr):
    """Write the largest logit of every PART neighbours; the largest of all comes back."""
    PARTS: tl.constexpr = BLOCK // PART
    top = tl.full([PARTS], float("-inf"), dtype=tl.float32)
    for start in range(0, vocab, BLOCK):
        places = start + tl.arange(0, BLOCK)
        values = tl.load(logits + places, mask=places < vocab, other=float("-inf")).to(tl.float32)
        largest = tl.max(tl.reshape(values, [PARTS, PART]), 1)
        tl.store(maxima + start // PART + tl.arange(0, PARTS), largest)
        top = tl.maximum(top, largest)
    tl.debug_barrier()  # the maxima are read by other threads than those that wrote them
    return tl.max(top, 0)


@triton.jit
def gather(logits, chosen, scratch, vocab, ALL: tl.constexpr, PART: tl.constexpr, HELD: tl.constexpr):
    """The logits of the chosen parts, at most HELD of them: [HELD * PART], -inf beyond. `scratch`: float32 [HELD]."""
    slots = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(scratch + slots, tl.arange(0, ALL).to(tl.float32), mask=chosen)
    tl.debug_barrier()
    number = tl.sum(chosen.to(tl.int32), 0)
    held = tl.arange(0, HELD)
    parts = tl.load(scratch + held, mask=held < number, other=0).to(tl.int32)
    at = parts[:, None] * PART + tl.arange(0, PART)[None, :]
    values = tl.load(logits + at, mask=(held < number)[:, None] & (at < vocab), other=float("-inf"))
    return tl.reshape(values.to(tl.float32), [HELD * PART])


@triton.jit
def _threshold(
    logits,
    rows,
    maxima,
    thresholds,
    vocab,
    stride,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    ALL: tl.constexpr,
    HELD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The smallest logit that the filters keep, per row; -inf where there are none. In order: top-k, top-p, min-p."""
    dependent_launch(PDL)
    row = tl.program_id(0)
    k, p = tl.load(rows.top_k + row), tl.load(rows.top_p + row)
    least, t = tl.load(rows.min_p + row), tl.load(rows.temperature + row)
    lowest = tl.full([], float("-inf"), dtype=tl.float32)
    by_count = (k > 0) & (k < vocab)
    if (t > 0) & (by_count | (p < 1.0) | (least > 0)):
        logits += row.to(tl.int64) * stride
        maxima += row.to(tl.int64) * (PARTS + HELD)
        top = note_maxima(logits, maxima, vocab, BLOCK, PART)
        each = tl.arange(0, ALL)
        largest = tl.load(maxima + each, mask=each < PARTS, other=float("-inf"))
        wanted = k.to(tl.float32)
        # What weighs less than (1 - p) / vocab of the largest is never needed: all of it together is less than 1 - p.
        bound = top + (tl.log(1.0 - tl.minimum(p, 0.9999999)) - tl.log(vocab.to(tl.float32)) - 0.01) * t
        if by_count:
            bound = bisect_held(largest, tl.where(largest > float("-inf"), 1.0, 0.0), wanted, top)
        chosen = (largest >= bound) & (largest > float("-inf"))
        if tl.sum(chosen.to(tl.int32), 0) <= HELD:
            whole = tl.full([], 0.0, dtype=tl.float32)
            if (p < 1.0) & (by_count == 0):
                whole = sum_above(logits, lowest, top, 1.0 / t, vocab, BLOCK, True)
            values = gather(logits, chosen, maxima + PARTS, vocab, ALL, PART, HELD)
            if by_count:
                lowest = bisect_held(values, tl.where(values > float("-inf"), 1.0, 0.0), wanted, top)
            if p < 1.0:
                weights = tl.where(values >= lowest, tl.exp((values - top) * (1.0 / t)), 0.0)
                if by_count:
                    whole = tl.sum(weights, 0)
                lowest = tl.maximum(lowest, bisect_held(values, weights, p * whole, top))
        else:
            if by_count:
                lowest = bisect(logits, wanted, top, 1.0 / t, vocab, BLOCK, False)
            if p < 1.0:
                whole = sum_above(logits, lowest, top, 1.0 / t, vocab, BLOCK, True)
                lowest = tl.maximum(lowest, bisect(logits, p * whole, top, 1.0 / t, vocab, BLOCK, True))
        if least > 0:
            lowest = tl.maximum(lowest, top + tl.log(least) * t)
        lowest = tl.minimum(lowest, top)
    tl.store(thresholds + row, lowest)


class _Filters(NamedTuple):
    """What a threshold depends on, per row."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor


def search(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The smallest logit that each row keeps, float32 [R]."""
    (count, vocab), device = logits.shape, logits.device
    thresholds = torch.empty(count, dtype=torch.float32, device=device)
    block = min(_BLOCK, power_of_two(vocab, _PART))
    parts = triton.cdiv(vocab, block) * (block // _PART)
    _threshold[(count,)](
        logits,
        _Filters(temperature, top_k, top_p, min_p),
        workspace(device).partials(count * (parts + _HELD)),
        thresholds,
        vocab,
        logits.stride(0),
        BLOCK=block,
        PART=_PART,
        PARTS=parts,
        ALL=power_of_two(parts),
        HELD=_HELD,
        PDL=uses_pdl(device),
        **options(device, 16, 1),
    )
    return thresholds
