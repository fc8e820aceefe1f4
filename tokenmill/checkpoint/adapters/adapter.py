"""An adapter in memory: low-rank changes of named matrices, and matrices that it replaces whole.

One record for everything that uses adapters: serving, merging, extraction and training. Values are float32 on the CPU.
Knows no files and no model; peft.py reads it, fit.py brings it into the names and the row order of a base.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

EMBEDDING = "model.embed_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class AdapterMatrix:
    """The change of one matrix W [out, in]: W + scale * b @ a, with DoRA's magnitude each row then scaled to it.

    Of an embedding W is the table [vocab, hidden], so a row of `b` belongs to a token.
    """

    name: str  # module, without ".weight": "model.layers.3.self_attn.q_proj"
    a: Tensor  # [rank, in]
    b: Tensor  # [out, rank]
    scale: float
    magnitude: Tensor | None = None  # [out], DoRA

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the matrix it changes."""
        return int(self.b.shape[0]), int(self.a.shape[1])

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.a, self.b, self.magnitude) if each is not None)

    def delta(self, begin: int = 0, end: int | None = None) -> Tensor:
        """Rows [begin, end) of scale * b @ a, without DoRA's magnitude."""
        return (self.b[begin:end] @ self.a) * self.scale

    def apply(self, weight: Tensor, begin: int = 0, end: int | None = None, strength: float = 1.0) -> Tensor:
        """Rows [begin, end) of the changed matrix, given those of W in float32. `strength`: 0 gives W, 1 the adapter's
        own result; with DoRA the difference between the two is scaled."""
        if self.magnitude is None:
            return weight + strength * self.delta(begin, end)
        moved = weight + self.delta(begin, end)
        norm = torch.linalg.vector_norm(moved, dim=1, keepdim=True)
        result = moved * (self.magnitude[begin:end, None] / norm)
        return result if strength == 1.0 else weight + strength * (result - weight)


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    name: str
    matrices: dict[str, AdapterMatrix]  # by module name
    saved: dict[str, Tensor] = field(default_factory=dict)  # modules_to_save, by tensor name: "lm_head.weight"
    base_name: str = ""  # what it was trained on, as its config says
    base_hash: str = ""  # sha256 of the base's files, where the adapter states one
    hash: str = ""  # sha256 of the adapter's files

    @property
    def max_rank(self) -> int:
        return max((matrix.rank for matrix in self.matrices.values()), default=0)

    @property
    def nbytes(self) -> int:
        whole = sum(each.numel() * each.element_size() for each in self.saved.values())
        return whole + sum(matrix.nbytes for matrix in self.matrices.values())
