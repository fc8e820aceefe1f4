"""Logits -> token ids on the device: temperature, top-k, top-p, min-p, one random draw per row. Only ids leave.

Rows with filters first get a threshold (thresholds.py); then every row is the argmax of logit / temperature plus Gumbel
noise over the tokens at or above it. Noise is a hash of (seed,
sibling, position, token): a request draws the same tokens in any batch. Tokens that tie with the last kept one stay.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace
from tokenmill.kernels.triton.step.thresholds import search

_CHUNK = 4096  # tokens of the vocabulary per program


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Per row, on the device. temperature float32 (0: greedy), top_k int32 (0: off), top_p float32 (1: off), min_p
    float32 (0: off), seeds int64 (already mixed per request and sibling, see `mix_seed`), positions int64."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    positions: Tensor
    filtered: bool = True  # False: no row has a filter, so no threshold is searched


@triton.jit
def mix32(value):
    """A bijection of 32 bits in which every input bit reaches every output bit (uint32)."""
    value = (value ^ (value >> 16)) * 0x7FEB352D
    value = (value ^ (value >> 15)) * 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def fast_log(value, INTERPRET: tl.constexpr):
    """The logarithm as the hardware has it, good to 2^-22: noise needs no more, and a row takes two for every token."""
    if INTERPRET:
        return tl.log(value)
    else:
        binary = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [value], tl.float32, True, 1)
        return binary * 0.6931471805599453


@triton.jit
def exponential(seed, position, token, INTERPRET: tl.constexpr):
    """A draw from Exp(1) for a token, exact also where it is very small: the winners have small ones."""
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    key = mix32(mix32(low ^ position.to(tl.uint32) * 0x9E3779B9) ^ high)
    bits = mix32(mix32(token.to(tl.uint32) * 0x85EBCA6B ^ key) + key)
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # (0, 1]
    v = tl.minimum(v, 0.99999994)
    series = v * (1.0 + v * (0.5 + v * (0.3333333333333333 + v * 0.25)))
    return tl.where(v < 0.004, series, -fast_log(1.0 - v, INTERPRET))


@triton.jit
def _draw(
    logits,
    rows,
    thresholds,
    best_value,
    best_token,
    counter,
    out,
    ring,
    vocab,
    stride,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    PADDED_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """The best of a chunk of a row; the last chunk to finish compares them and writes the id. First of equals wins."""
    dependent_launch(PDL)
    row, chunk = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = tokens < vocab
    values = tl.load(logits + row.to(tl.int64) * stride + tokens, mask=ok, other=float("-inf")).to(tl.float32)
    if rows is not None:
        t = tl.load(rows.temperature + row)
        arrival = exponential(tl.load(rows.seeds + row), tl.load(rows.positions + row), tokens, INTERPRET)
        drawn = values * (1.0 / tl.where(t > 0, t, 1.0)) - fast_log(arrival, INTERPRET)
        if thresholds is not None:
            drawn = tl.where(values >= tl.load(thresholds + row), drawn, float("-inf"))
        values = tl.where(ok, tl.where(t > 0, drawn, values), float("-inf"))
    value = tl.max(values, 0)
    token = tl.min(tl.where((values == value) & ok, tokens, 2147483647), 0)
    tl.store(best_value + row * CHUNKS + chunk, value)
    tl.store(best_token + row * CHUNKS + chunk, token)
    if arrive_last(counter + row, CHUNKS):
        tl.store(counter + row, 0)
        chunks = tl.arange(0, PADDED_CHUNKS)
        inside = chunks < CHUNKS
        found = tl.load(best_value + row * CHUNKS + chunks, mask=inside, other=float("-inf"), cache_modifier=".cg")
        chunk_tokens = tl.load(best_token + row * CHUNKS + chunks, mask=inside, other=2147483647, cache_modifier=".cg")
        winner = tl.min(tl.where((found == tl.max(found, 0)) & inside, chunk_tokens, 2147483647), 0)
        tl.store(out + row, winner.to(out.dtype.element_ty))
        if ring is not None:
            tl.store(ring.ids + tl.load(ring.slot) * ring.stride + row, winner.to(ring.ids.dtype.element_ty))


def mix_seed(seed: int, index: int) -> int:
    """The 64-bit seed of sibling `index` of a request, as a signed number that fits an int64 tensor."""
    mask = (1 << 64) - 1
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    value ^= value >> 31
    return value - (1 << 64) if value >> 63 else value


def _chunk(vocab: int) -> int:
    return min(_CHUNK, power_of_two(vocab, 256))


@dataclass(frozen=True, slots=True)
class TokenRing:
    """A ring of pinned buffers that token ids are also written to, for the host: ids int64 [slots, max rows]; `index`
    int32 [1] on the device is the slot of the current step (`begin_step` advances it)."""

    ids: Tensor
    index: Tensor


class _Rows(NamedTuple):
    """What a random draw reads, per row."""

    temperature: Tensor
    seeds: Tensor
    positions: Tensor


class _Ring(NamedTuple):
    ids: Tensor
    slot: Tensor
    stride: int


def _pick(
    logits: Tensor,
    rows: SamplingTensors | None,
    thresholds: Tensor | None,
    out: Tensor | None,
    ring: TokenRing | None = None,
) -> Tensor:
    count, vocab = logits.shape
    out = torch.empty(count, dtype=torch.int64, device=logits.device) if out is None else out
    chunks = triton.cdiv(vocab, _chunk(vocab))
    scratch = workspace(logits.device)
    values = scratch.partials(2 * count * chunks)
    _draw[(count, chunks)](
        logits,
        None if rows is None else _Rows(rows.temperature, rows.seeds, rows.positions),
        thresholds,
        values,
        values[count * chunks :].view(torch.int32),
        scratch.counters(count),
        out,
        None if ring is None else _Ring(ring.ids, ring.index, ring.ids.stride(0)),
        vocab,
        logits.stride(0),
        CHUNK=_chunk(vocab),
        CHUNKS=chunks,
        PADDED_CHUNKS=power_of_two(chunks),
        PDL=uses_pdl(logits.device),
        INTERPRET=INTERPRETED,
        **options(logits.device, 8, 1),
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row; the first of equals."""
    return _pick(logits, None, None, None)


def sample(logits: Tensor, rows: SamplingTensors, out: Tensor | None = None, ring: TokenRing | None = None) -> Tensor:
    """One token id per row of logits [R, vocab] (float32 or bf16) -> int64 [R]."""
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    thresholds = search(logits, *filters) if rows.filtered else None
    return _pick(logits, rows, thresholds, out, ring)
