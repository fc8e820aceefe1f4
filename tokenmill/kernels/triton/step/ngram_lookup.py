"""N-gram drafts on the device: where the last tokens of a sequence occurred in it before, and what followed there.

Tokens lie in pages as keys do, so the page table of a row is all that is needed to read its text. A row whose last two
or more tokens occurred before gets what came after the latest of the longest matches (up to four tokens); the others
keep the drafts of a head. The spec is runtime/speculation/ngram.py. Called inside captured steps.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl

LOOKBACK = 8192  # the last tokens, which are searched
_BLOCK = 1024
PLACES = tl.constexpr(1 << 26)  # more than a sequence has tokens: a match scores its length times this plus its place


@triton.jit
def token_at(tokens, table, places, ok, PAGE: tl.constexpr):
    """The token at places of a sequence; -1 where not ok."""
    pages = tl.load(table + places // PAGE, mask=ok, other=0).to(tl.int64)
    return tl.load(tokens + pages * PAGE + places % PAGE, mask=ok, other=-1)


@triton.jit(do_not_specialize=["table_stride"])
def _look_up(
    tokens,
    block_table,
    seq_lens,
    sampled,
    drafts,
    out,
    table_stride,
    PAGE: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    DEPTH: tl.constexpr,
    PADDED_DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOKBACK: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    row = tl.program_id(0).to(tl.int64)
    table = block_table + row * table_stride
    length = tl.load(seq_lens + row)  # tokens in pages; the sampled one comes after them
    last = tl.load(sampled + row).to(tl.int32)
    second = token_at(tokens, table, length - 1, length > 0, PAGE)
    third = token_at(tokens, table, length - 2, length > 1, PAGE)
    fourth = token_at(tokens, table, length - 3, length > 2, PAGE)
    best = tl.zeros([BLOCK], dtype=tl.int32)
    for first in range(tl.maximum(length - LOOKBACK, 1), length, BLOCK):
        ends = first + tl.arange(0, BLOCK)
        inside = ends < length
        same = inside & (token_at(tokens, table, ends, inside, PAGE) == last)
        same = same & (token_at(tokens, table, ends - 1, inside, PAGE) == second)
        score = tl.where(same, ends + PLACES * 2, 0)
        same = same & (ends > 1) & (token_at(tokens, table, ends - 2, inside & (ends > 1), PAGE) == third)
        score += same.to(tl.int32) * PLACES
        same = same & (ends > 2) & (token_at(tokens, table, ends - 3, inside & (ends > 2), PAGE) == fourth)
        score += same.to(tl.int32) * PLACES
        best = tl.maximum(best, score)
    found = tl.max(best, 0)
    end = found % PLACES
    depths = tl.arange(0, PADDED_DEPTH)
    ok = depths < DEPTH
    # From after the match to the sampled token, and round again.
    source = end + 1 + depths % tl.maximum(length - end, 1)
    looked_up = token_at(tokens, table, source, ok & (source < length) & (found > 0), PAGE)
    looked_up = tl.where(source == length, last, looked_up).to(tl.int64)
    by_head = tl.load(drafts + row * NUM_DRAFTS + tl.minimum(depths, NUM_DRAFTS - 1), mask=ok, other=0)
    tl.store(out + row * DEPTH + depths, tl.where(found > 0, looked_up, by_head), mask=ok)


def look_up_drafts(
    tokens: Tensor, block_table: Tensor, seq_lens: Tensor, sampled: Tensor, drafts: Tensor, depth: int
) -> Tensor:
    """tokens int32 [pages, page_size]; sampled int64 [R]: the token after those in pages; drafts int64 [R, D]: what a
    head drafts after it -> int64 [R, depth]. Past the head's drafts its last one is repeated."""
    rows = sampled.shape[0]
    out = torch.empty(rows, depth, dtype=torch.int64, device=sampled.device)
    _look_up[(rows,)](
        tokens,
        block_table,
        seq_lens,
        sampled,
        drafts,
        out,
        block_table.stride(0),
        PAGE=tokens.shape[1],
        NUM_DRAFTS=drafts.shape[1],
        DEPTH=depth,
        PADDED_DEPTH=power_of_two(depth),
        BLOCK=_BLOCK,
        LOOKBACK=LOOKBACK,
        PDL=uses_pdl(sampled.device),
        **options(sampled.device, 8, 1),
    )
    return out
