"""Log-probabilities that requests asked for: of the token that a row drew, its rank, and of the likeliest tokens.

One launch behind a step: programs take chunks of the vocabulary and keep the best of each, the last one of a row
compares them. What leaves the device is a few numbers of each row instead of all its logits.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import arrive_last, dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl, workspace

_CHUNK = 4096  # tokens of the vocabulary per program
NO_TOKEN = tl.constexpr(2147483647)  # where fewer tokens are left than were asked for
_HEAD = tl.constexpr(3)  # of a chunk and of a result, before its tokens: see `_report`


@triton.jit
def _take_best(values, tokens, left):
    """The largest of those that are left, the lower token of equals; and what is left then."""
    value = tl.max(tl.where(left, values, float("-inf")), 0)
    token = tl.min(tl.where(left & (values == value), tokens, NO_TOKEN), 0)
    return value, token, left & (tokens != token)


@triton.jit
def _report(
    logits, rows, chosen, partial, counter, out, vocab, stride,
    TOP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, PADDED: tl.constexpr, PADDED_CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out int32 [N, 3 + 2 * TOP]: the chosen token, its log-probability (the bits of a float32), how many tokens are
    likelier; then pairs of token and log-probability. A chunk leaves the same in `partial`: its largest logit, the sum
    of exponentials below it, how many are larger than the chosen one, pairs."""
    dependent_launch(PDL)
    number, chunk = tl.program_id(0), tl.program_id(1)
    width: tl.constexpr = _HEAD + 2 * TOP
    row = tl.load(rows + number).to(tl.int64)
    token = tl.load(chosen + row)
    own = tl.load(logits + row * stride + token).to(tl.float32)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    left = tokens < vocab
    values = tl.load(logits + row * stride + tokens, mask=left, other=float("-inf")).to(tl.float32)
    largest = tl.max(values, 0)
    safe = tl.where(largest == float("-inf"), 0.0, largest)
    mine = partial + (number * CHUNKS + chunk) * width
    tl.store(mine, largest)
    tl.store(mine + 1, tl.sum(tl.exp(values - safe), 0))
    tl.store(mine + 2, tl.sum(tl.where(values > own, 1.0, 0.0), 0))
    for place in range(TOP):
        value, best, left = _take_best(values, tokens, left)
        tl.store(mine + _HEAD + 2 * place, best.to(tl.float32, bitcast=True))
        tl.store(mine + _HEAD + 2 * place + 1, value)
    if arrive_last(counter + number, CHUNKS):
        tl.store(counter + number, 0)
        base = partial + number * CHUNKS * width
        chunks = tl.arange(0, PADDED_CHUNKS)
        inside = chunks < CHUNKS
        maxima = tl.load(base + chunks * width, mask=inside, other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(base + chunks * width + 1, mask=inside, other=0.0, cache_modifier=".cg")
        larger = tl.load(base + chunks * width + 2, mask=inside, other=0.0, cache_modifier=".cg")
        top = tl.max(maxima, 0)
        shift = tl.log(tl.sum(tl.where(inside, sums * tl.exp(maxima - top), 0.0), 0)) + top
        result = out + number * width
        tl.store(result, token.to(tl.int32))
        tl.store(result + 1, (own - shift).to(tl.int32, bitcast=True))
        tl.store(result + 2, tl.sum(larger, 0).to(tl.int32))
        if TOP > 0:
            pairs = tl.arange(0, PADDED)
            at = base + (pairs // TOP) * width + _HEAD + 2 * (pairs % TOP)
            there = pairs < CHUNKS * TOP
            found = tl.load(at, mask=there, other=0.0, cache_modifier=".cg").to(tl.int32, bitcast=True)
            found = tl.where(there, found, NO_TOKEN)
            values_found = tl.load(at + 1, mask=there, other=float("-inf"), cache_modifier=".cg")
            remain = found != NO_TOKEN
            for place in range(TOP):
                value, best, remain = _take_best(values_found, found, remain)
                tl.store(result + _HEAD + 2 * place, best)
                tl.store(result + _HEAD + 2 * place + 1, (value - shift).to(tl.int32, bitcast=True))


def token_reports(logits: Tensor, rows: Tensor, chosen: Tensor, top: int) -> Tensor:
    """Of some rows (int32 [N]) of logits [R, vocab] with their chosen tokens (int64 [R]) -> int32 [N, 3 + 2 * top]."""
    count, vocab = rows.numel(), logits.shape[1]
    chunk = min(_CHUNK, power_of_two(vocab, 256))
    chunks, width = triton.cdiv(vocab, chunk), 3 + 2 * top
    scratch = workspace(logits.device)
    out = torch.empty(count, width, dtype=torch.int32, device=logits.device)
    _report[(count, chunks)](
        logits, rows, chosen, scratch.partials(count * chunks * width), scratch.counters(count), out, vocab,
        logits.stride(0), TOP=top, CHUNK=chunk, CHUNKS=chunks, PADDED=power_of_two(chunks * max(top, 1)),
        PADDED_CHUNKS=power_of_two(chunks), PDL=uses_pdl(logits.device), **options(logits.device, 8, 1),
    )  # fmt: skip
    return out
