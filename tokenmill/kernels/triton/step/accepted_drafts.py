"""The inputs of the step after one that checked drafts, worked out on the device: which drafts held, what comes next.

With them the next step can be launched before the host has seen the outcome of this one. Every sequence has a row for
its last token and one for each draft. Called by the graph executor, inside the graph.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import options, power_of_two, uses_pdl


@triton.jit(do_not_specialize=["count"])
def _follow(
    drawn,
    ids,
    positions,
    owners,
    guessed,
    given,
    count,
    given_stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < count
    first = tl.load(owners + rows, mask=ok, other=-1)
    live = ok & (first >= 0)
    held = tl.zeros([BLOCK], dtype=tl.int32)
    going = live
    for depth in tl.static_range(DEPTH):
        chosen = tl.load(drawn + first + depth, mask=live, other=-1)
        drafted = tl.load(ids + first + depth + 1, mask=live, other=-2)
        going = going & (chosen == drafted)
        held += going.to(tl.int32)
    place = rows - first
    start = tl.load(positions + first, mask=live, other=0)
    token = tl.load(drawn + first + held, mask=live, other=0)
    guess = tl.load(guessed + (first + held) * DEPTH + place - 1, mask=live & (place > 0), other=0)
    tl.store(given + rows, tl.where(place == 0, token, guess), mask=ok)
    tl.store(given + given_stride + rows, tl.where(live, start + held + 1 + place, -1), mask=ok)
    tl.store(given + 2 * given_stride + rows, tl.zeros([BLOCK], dtype=tl.int64) - 1, mask=ok)


def follow_drafts(
    drawn: Tensor, ids: Tensor, positions: Tensor, owners: Tensor, guessed: Tensor, given: Tensor
) -> None:
    """drawn, ids, positions int64 [R]: of the step that ends; owners int32 [R]: the first row of each row's sequence,
    -1 for rows of none; guessed int64 [R, depth]: what would follow each row's drawn token. Fills given [3, R]: token
    ids, positions (-1: no row), sources (-1)."""
    count = ids.shape[0]
    block = min(256, power_of_two(count))
    _follow[(triton.cdiv(count, block),)](
        drawn,
        ids,
        positions,
        owners,
        guessed,
        given,
        count,
        given.stride(0),
        DEPTH=guessed.shape[1],
        BLOCK=block,
        PDL=uses_pdl(ids.device),
        **options(ids.device, 4, 1),
    )
