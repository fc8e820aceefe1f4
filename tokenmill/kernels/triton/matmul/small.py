"""Small matrices of few bits in bf16: reading is not what their products wait for, and unpacking only adds to it.

tuning.py says up to which size. Called by the loader for matrices that share an input, before they are joined: they are
expanded together or not at all. What was rounded at load because somebody asked for fewer bytes stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenmill.kernels.triton.matmul.expanded import expand
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GpuLinear, GroupedLinear
from tokenmill.kernels.triton.matmul.tuning import worth_expanding


def expand_small(parts: Sequence[GpuLinear]) -> list[GpuLinear]:
    """The same matrices, those of grouped codes as bf16 if all parts together are small."""
    if not worth_expanding(sum(part.rows for part in parts), parts[0].depth):
        return list(parts)
    return [_expanded(part) if isinstance(part, GroupedLinear) else part for part in parts]


def _expanded(linear: GroupedLinear) -> DenseLinear:
    return DenseLinear(expand(linear.weight), linear.bias, f"bf16, being small ({linear.detail})")
