"""What latent attention (DeepSeek's MLA) needs besides the batch: the shape of a layer and its projections by head.

A token keeps one row, its latent and one rotated key that all heads share. Absorbed, the heads' key projections are
applied to the queries and the value projections to the result: one KV head as wide as the row, whose value is the
row's beginning, so that every attention kernel of one KV head serves. Expanded, keys and values of all heads are
computed from the rows first: less arithmetic where many queries read the same rows. Used by layers/latent_attention.py
and by the implementations of Ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.kernels.base import Choice
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.formats.base import LinearWeight

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class LatentSpec:
    layer: int
    num_heads: int
    rank: int  # of the latent: the leading numbers of a row
    nope_dim: int  # of a head's query and key, not rotated
    rope_dim: int  # the rest of them, rotated
    value_dim: int
    scale: float  # multiplies q.k

    @property
    def absorbed(self) -> AttentionSpec:
        """The same attention over the rows themselves."""
        return AttentionSpec(self.layer, self.num_heads, 1, self.rank + self.rope_dim, self.scale)

    @property
    def max_absorbed(self) -> int:
        """Up to so many queries of a sequence the absorbed form takes less arithmetic, whatever the context."""
        from tokenmill.kernels import ref_latent

        return ref_latent.max_absorbed(self.rank, self.nope_dim, self.value_dim)


class HeadProjections:
    """The key and value projections of each head: `keys` [heads, nope_dim, rank], `values` [heads, value_dim, rank].

    Kept as floats, since the absorbed form multiplies by the transpose of what a file quantizes. `stored` is one matrix
    whose rows are, head by head, those of the keys and then of the values (Hugging Face), or two: [heads * rank,
    nope_dim] and [heads * value_dim, rank] (GGUF).
    """

    backend = "ref"

    def __init__(self, stored: Sequence[LinearWeight], spec: LatentSpec) -> None:
        self.stored = tuple(stored)
        self._spec = spec
        import torch

        self.keys = self.values = torch.empty(0)

    @property
    def detail(self) -> str:
        return f"projections by head, {str(self.keys.dtype).removeprefix('torch.')}"

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.keys, self.values))

    def place(self, upload: Callable[[LinearWeight], LinearWeight], dtype: torch.dtype) -> None:
        """Fill `keys` and `values`; `upload` moves a weight to the device."""
        keys, values = self.read([upload(weight) for weight in self.stored])
        self.keys, self.values = keys.to(dtype).contiguous(), values.to(dtype).contiguous()
        self.attach()

    def attach(self) -> None:
        """Be the kernel of the stored matrices."""
        for weight in self.stored:
            weight.kernel = Choice("linear", self.backend, self)

    def read(self, stored: Sequence[LinearWeight]) -> tuple[Tensor, Tensor]:
        """Keys and values of these matrices in float32."""
        return self.split([weight.dequantize(0, weight.out_features) for weight in stored])

    def split(self, matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of the values of the stored matrices."""
        s = self._spec
        if len(matrices) == 1:
            heads = matrices[0].view(s.num_heads, s.nope_dim + s.value_dim, s.rank)
            return heads[:, : s.nope_dim], heads[:, s.nope_dim :]
        keys = matrices[0].view(s.num_heads, s.rank, s.nope_dim).transpose(1, 2)
        return keys, matrices[1].view(s.num_heads, s.value_dim, s.rank)

    def __call__(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [T, heads, nope_dim] and values [T, heads, value_dim] of latents [T, rank]."""
        from tokenmill.kernels import ref_latent

        return ref_latent.expand(latents, self.keys, self.values)
