"""Products with codebook weights, in plain torch: the input is rotated once, then multiplied by table values.

Weights are indices into a table under a scale per row, in the basis of a signed Hadamard transform (hadamard.py).
Because the transform is orthonormal, x W^T = (R x)(R W)^T: rotating the few inputs replaces unrotating the weight.
Part of the spec; chosen by ref.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.kernels.hadamard import signed_hadamard

if TYPE_CHECKING:
    from tokenmill.kernels.base import StoredWeight

PARTS = {"codes", "norms", "table"}  # and "rotation", the seed, where the rows are rotated
_TILE_VALUES = 1 << 22


class CodebookLinear:
    backend = "ref"

    def __init__(self, weight: StoredWeight) -> None:
        parts = weight.parts()
        self.codes, self.norms, self.table = parts["codes"], parts["norms"], parts["table"].float()
        self.seed = int(parts["rotation"]) if "rotation" in parts else None
        self.bias = weight.bias
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.detail = "torch, table values tile by tile" + ("" if self.seed is None else "; input rotated")

    @property
    def nbytes(self) -> int:
        return 0

    def __call__(self, x: Tensor) -> Tensor:
        rotated = x if self.seed is None else signed_hadamard(x, self.seed)
        y = x.new_empty(x.shape[0], self.out_features)
        step = max(1, _TILE_VALUES // self.in_features)
        for begin in range(0, self.out_features, step):
            end = min(begin + step, self.out_features)
            indices = unpack_indices(self.codes[begin:end], self.table.numel(), self.in_features)
            y[:, begin:end] = (rotated @ self.table[indices].T) * self.norms[begin:end].float().T
        return y if self.bias is None else y + self.bias


def unpack_indices(words: Tensor, table_size: int, count: int) -> Tensor:
    """int32 words [rows, n], each row one little-endian bit stream -> int64 indices [rows, count]."""
    bits = table_size.bit_length() - 1
    stream = words.contiguous().view(torch.uint8)
    single = (stream.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=words.device)) & 1  # [rows, bytes, 8]
    fields = single.flatten(1)[:, : count * bits].unflatten(1, (count, bits)).long()
    return (fields << torch.arange(bits, device=words.device)).sum(-1)
