"""Device functions that kernels of several rooms call; each is inlined into its caller.

Dependent launch, sums over programs that split one tile, the sequence of a token block, rotation of rows. Knows no
tensor layout beyond its arguments. The Gluon twins of some are in gluon_device.py.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dependent_launch(PDL: tl.constexpr):
    """Let the next kernel of the stream start, then wait until everything earlier kernels wrote is visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def arrive_last(counter, splits):
    """True for the last of `splits` programs to arrive; it may read what the others stored before they arrived."""
    tl.debug_barrier()  # all threads have stored before one of them counts
    arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    return arrived == splits - 1


@triton.jit
def sum_partials(partial, tile, num_tiles, inside, splits, SIZE: tl.constexpr):
    """The partial results of a tile, partial [splits, num_tiles, SIZE], summed over the splits. Four loads are in
    flight at a time: one by one their latencies would add up."""
    total = tl.load(partial + tile * SIZE + inside, cache_modifier=".cg")
    for first in range(1, splits, 4):
        for ahead in tl.static_range(4):
            place = partial + ((first + ahead) * num_tiles + tile) * SIZE + inside
            total += tl.load(place, mask=(inside >= 0) & (first + ahead < splits), other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def find_sequence(query_starts, block, num_seqs, TOKENS: tl.constexpr):
    """The sequence that token block `block` belongs to, by binary search. Sequence s owns the blocks from
    query_starts[s] // TOKENS + s on: enough for its tokens, sometimes one more, and known without a prefix sum."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        first_block = tl.load(query_starts + middle) // TOKENS + middle
        if first_block <= block:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def rotate_rows(
    x, matrix, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, COMPUTE: tl.constexpr, INVERSE: tl.constexpr
):
    """Rows [R, PADDED_DIM] @ matrix / sqrt(HEAD_DIM), or (INVERSE) its transpose, where matrix [HEAD_DIM, HEAD_DIM] is
    orthogonal up to that factor. Rows are normalized to a maximum of one first, so that half precision holds them."""
    rows, columns = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM)
    ok = (rows < HEAD_DIM)[:, None] & (columns < HEAD_DIM)[None, :]
    place = columns[None, :] * HEAD_DIM + rows[:, None] if INVERSE else rows[:, None] * HEAD_DIM + columns[None, :]
    operand = tl.load(matrix + place, mask=ok, other=0.0).to(COMPUTE)
    row_max = tl.maximum(tl.max(tl.abs(x), 1), 1e-30)
    inverse_root: tl.constexpr = HEAD_DIM**-0.5
    rotated = tl.dot((x / row_max[:, None]).to(COMPUTE), operand, input_precision="ieee")
    return rotated * (row_max * inverse_root)[:, None]
