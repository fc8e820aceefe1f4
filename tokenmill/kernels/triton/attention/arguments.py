"""The argument bundles that the attention kernels take: tensors with their strides, and compile-time geometry.

Triton takes a NamedTuple of tensors and numbers as one argument (fields are read by name in the kernel) and a
NamedTuple of constants as one `tl.constexpr`. Two of its rules decide what goes where: every number inside a tuple is
specialized (1, multiples of 16), so numbers that change from step to step stay arguments of their own; and a field of a
constexpr tuple must be named (`X: tl.constexpr = GEOMETRY.x`) before it is a shape or the end of a static_range: read
in place it is a plain number, which Triton 3.6 does not take there.
No field may be called `values` or `type`: Triton's own tuple has these.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tokenmill.kernels.triton.shared.launch import power_of_two

LOG2_E = 1.4426950408889634  # scores are in base 2


class Batch(NamedTuple):
    """Which keys belong to which rows of a step."""

    block_table: Tensor  # int32 [S, max_pages]; the stride is an argument of its own
    query_starts: Tensor  # int32 [S + 1]: first row of each sequence
    seq_lens: Tensor  # int32 [S]: stored tokens, this step's included


class Partials(NamedTuple):
    """Outputs of programs that saw a part of the keys, before they are merged."""

    outputs: Tensor  # float32 [slots, T, heads, head_dim]
    logs: Tensor | None  # float32 [slots, T, heads]: log2 of the softmax sum, -inf where no key was seen
    counters: Tensor | None = None  # int32 [S, kv_heads], zero between launches: who arrives last merges


class Geometry(NamedTuple):
    """Heads and pages, all compile-time. Padded sizes are powers of two, since tiles are."""

    heads: int  # query heads
    group: int  # query heads that read one KV head
    padded_group: int
    head_dim: int
    padded_dim: int
    elements: int  # of a row in a page: head_dim, or half of it where an element holds two values
    padded_elements: int
    page_size: int


def make_geometry(heads: int, kv_heads: int, head_dim: int, page_size: int, per_element: int = 1) -> Geometry:
    """`per_element`: values that one element of a page holds."""
    group, elements = heads // kv_heads, head_dim // per_element
    padded = power_of_two(elements, 16)
    return Geometry(
        heads, group, power_of_two(group), head_dim, power_of_two(head_dim, 16), elements, padded, page_size
    )
