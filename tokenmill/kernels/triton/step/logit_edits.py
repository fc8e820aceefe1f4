"""Logits of some rows changed before the draw: penalties for tokens that came before, and tokens that are impossible.

Which tokens a sequence has is a row of a table that stays on the device: a step adds one token to it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

_CHUNK = 4096  # tokens of the vocabulary per program


@triton.jit
def _penalize(logits, rows, places, factors, counts, prompts, vocab, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """factors float32 [rows, 3]: repetition, frequency, presence. counts int16 and prompts int8 [places, vocab]: how
    often the output has a token, and whether the prompt has it. rows None: all, in order; place -1: no penalty."""
    dependent_launch(PDL)
    number = tl.program_id(0)
    place = tl.load(places + number)
    if place < 0:
        return
    row = number if rows is None else tl.load(rows + number)
    repetition = tl.load(factors + number * 3)
    frequency, presence = tl.load(factors + number * 3 + 1), tl.load(factors + number * 3 + 2)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    ok = tokens < vocab
    at = logits + tl.cast(row, tl.int64) * stride + tokens
    values = tl.load(at, mask=ok, other=0.0)
    count = tl.load(counts + place.to(tl.int64) * vocab + tokens, mask=ok, other=0).to(tl.float32)
    prompted = tl.load(prompts + place.to(tl.int64) * vocab + tokens, mask=ok, other=0)
    seen = (count > 0) | (prompted != 0)
    values = tl.where(seen, tl.where(values > 0, values / repetition, values * repetition), values)
    values = tl.where(count > 0, values - frequency * count - presence, values)
    tl.store(at, values, mask=ok & seen)


@triton.jit
def _allow(logits, rows, places, bits, vocab, words, stride, CHUNK: tl.constexpr, PDL: tl.constexpr):
    """bits int32 [places, words]: a token without its bit, or after the last word, becomes impossible."""
    dependent_launch(PDL)
    number = tl.program_id(0)
    row = tl.load(rows + number)
    place = tl.load(places + number)
    tokens = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    word = tl.load(bits + place.to(tl.int64) * words + tokens // 32, mask=tokens // 32 < words, other=0)
    banned = ((word >> (tokens % 32)) & 1) == 0
    at = logits + row.to(tl.int64) * stride + tokens
    tl.store(at, tl.full([CHUNK], float("-inf"), dtype=tl.float32), mask=(tokens < vocab) & banned)


def _chunk(vocab: int) -> int:
    return min(_CHUNK, power_of_two(vocab, 256))


@triton.jit
def _count(ids, positions, places, counted, counts, num_rows, vocab, ROWS: tl.constexpr, PDL: tl.constexpr):
    """A row whose token is the next to be counted counts it; one that was counted before, by a step that was dropped
    and is run again, does not. counted int32 [places]: tokens in the tables, those of the prompt included."""
    dependent_launch(PDL)
    rows = tl.arange(0, ROWS)
    place = tl.load(places + rows, mask=rows < num_rows, other=-1)
    there = place >= 0
    position = tl.load(positions + rows, mask=there, other=0)
    next_one = there & (tl.load(counted + place, mask=there, other=-1) == position)
    at = counts + place.to(tl.int64) * vocab + tl.load(ids + rows, mask=there, other=0)
    tl.store(at, tl.load(at, mask=next_one, other=0) + 1, mask=next_one)
    tl.store(counted + place, (position + 1).to(tl.int32), mask=next_one)


def count_tokens(ids: Tensor, positions: Tensor, places: Tensor, counted: Tensor, counts: Tensor) -> None:
    """In place: each row's token (ids, positions int64 [R]) is entered in counts int16 [places, vocab], once."""
    rows = ids.numel()
    _count[(1,)](
        ids, positions, places, counted, counts, rows, counts.shape[1],
        ROWS=power_of_two(rows, 16), PDL=uses_pdl(ids.device), **options(ids.device, 4, 1),
    )  # fmt: skip


def penalize(
    logits: Tensor, rows: Tensor | None, places: Tensor, factors: Tensor, counts: Tensor, prompts: Tensor
) -> None:
    """In place: rows of logits float32 [R, vocab]; rows, places int32 [N]; the rest as in `_penalize`."""
    vocab = logits.shape[1]
    _penalize[(places.numel(), triton.cdiv(vocab, _chunk(vocab)))](
        logits, rows, places, factors, counts, prompts, vocab, logits.stride(0),
        CHUNK=_chunk(vocab), PDL=uses_pdl(logits.device), **options(logits.device, 8, 1),
    )  # fmt: skip


def allow(logits: Tensor, rows: Tensor, places: Tensor, bits: Tensor) -> None:
    """In place: rows of logits float32 [R, vocab]; rows, places int32 [N], bits int32 [places, words]."""
    vocab = logits.shape[1]
    _allow[(rows.numel(), triton.cdiv(vocab, _chunk(vocab)))](
        logits, rows, places, bits, vocab, bits.shape[1], logits.stride(0),
        CHUNK=_chunk(vocab), PDL=uses_pdl(logits.device), **options(logits.device, 8, 1),
    )  # fmt: skip
