"""Which drafts of a step were accepted, and the inputs of the next step that follow from it, computed on the device.

With them the next step can be launched before the host has seen the outcome of this one. Every sequence has a row for
its last token and one for each draft; drafts are accepted as long as each equals the token sampled in its place. Called
by the graph executor, inside the graph.
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
    sampled,
    ids,
    positions,
    owners,
    drafts,
    next_inputs,
    count,
    next_stride,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    dependent_launch(PDL)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = rows < count
    first = tl.load(owners + rows, mask=ok, other=-1)
    live = ok & (first >= 0)
    accepted = tl.zeros([BLOCK], dtype=tl.int32)
    matching = live
    for depth in tl.static_range(DEPTH):
        token = tl.load(sampled + first + depth, mask=live, other=-1)
        draft = tl.load(ids + first + depth + 1, mask=live, other=-2)
        matching = matching & (token == draft)
        accepted += matching.to(tl.int32)
    place = rows - first
    start = tl.load(positions + first, mask=live, other=0)
    last = tl.load(sampled + first + accepted, mask=live, other=0)
    draft = tl.load(drafts + (first + accepted) * DEPTH + place - 1, mask=live & (place > 0), other=0)
    tl.store(next_inputs + rows, tl.where(place == 0, last, draft), mask=ok)
    tl.store(next_inputs + next_stride + rows, tl.where(live, start + accepted + 1 + place, -1), mask=ok)
    tl.store(next_inputs + 2 * next_stride + rows, tl.zeros([BLOCK], dtype=tl.int64) - 1, mask=ok)


def follow_drafts(
    sampled: Tensor, ids: Tensor, positions: Tensor, owners: Tensor, drafts: Tensor, next_inputs: Tensor
) -> None:
    """sampled, ids, positions int64 [R]: of the step that ends; owners int32 [R]: the first row of each row's sequence,
    -1 for padding rows; drafts int64 [R, depth]: the drafts that would follow each row's sampled token. Fills
    next_inputs [3, R] as `begin_step` reads them: token ids, positions (PADDING_POSITION: no row), sources (-1)."""
    count = ids.shape[0]
    block = min(256, power_of_two(count))
    _follow[(triton.cdiv(count, block),)](
        sampled,
        ids,
        positions,
        owners,
        drafts,
        next_inputs,
        count,
        next_inputs.stride(0),
        DEPTH=drafts.shape[1],
        BLOCK=block,
        PDL=uses_pdl(ids.device),
        **options(ids.device, 4, 1),
    )
