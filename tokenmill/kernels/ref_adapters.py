"""What adapters (LoRA, DoRA) add to a product, as plain torch: the spec of the kernels that do it.

A product multiplies one input by one or several matrices. Rows of a step name the slot of their adapter (0: none), and
rows of different adapters stand in any order. An adapter has at most one part for each matrix; scales are folded into
the factors when the parts are made (model/adapters.py). Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedPart:
    """y of one matrix becomes gain * y + shift + x a^T b^T, all float32; with `whole`, the product with that matrix."""

    a: Tensor | None = None  # [rank, in]
    b: Tensor | None = None  # [out, rank]
    gain: Tensor | None = None  # [out]: DoRA
    shift: Tensor | None = None  # [out]: what a gain must not scale
    whole: Tensor | None = None  # [out, in], instead of all others
    bias: Tensor | None = None  # [out], of the base: added to the product with `whole`
    # [out] int64: which outputs of b or `whole` these are, where a rank multiplies by all of them for the bits that one
    # process has, and keeps its own. The plain spec alone.
    kept: Tensor | None = None

    @property
    def rank(self) -> int:
        return 0 if self.a is None else self.a.shape[0]

    @property
    def tensors(self) -> list[Tensor]:
        every = self._fields()
        return [each for each in every if each is not None]

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self.tensors)

    def to(self, device: torch.device) -> AdaptedPart:
        moved = (None if each is None else each.to(device) for each in self._fields())
        return AdaptedPart(*moved)

    def _fields(self) -> tuple[Tensor | None, ...]:
        return self.a, self.b, self.gain, self.shift, self.whole, self.bias, self.kept


Parts = tuple[AdaptedPart | None, ...]  # of one adapter, by matrix of the product
RANK_BLOCK = 16  # ranks that kernels multiply at a time


def padded_rank(rank: int) -> int:
    """Ranks of a slot of fixed size: a power of two, at least a block."""
    return max(RANK_BLOCK, 1 << (rank - 1).bit_length())


class RefSite:
    """The adapters of one product, by slot. `pack` may run in any thread; the others between two steps."""

    backend = "ref"

    def __init__(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        """`shapes`: (out, in) of each matrix."""
        self.shapes, self._device = tuple(shapes), device
        self._parts: dict[int, Parts] = {}

    @property
    def nbytes(self) -> int:
        return sum(self.packed_bytes(parts) for parts in self._parts.values())

    def pack(self, parts: Parts) -> Parts:
        return tuple(None if part is None else part.to(self._device) for part in parts)

    @staticmethod
    def packed_bytes(packed: Parts) -> int:
        return sum(part.nbytes for part in packed if part is not None)

    def set(self, slot: int, packed: Parts) -> None:
        self._parts[slot] = packed

    def clear(self, slot: int) -> None:
        self._parts.pop(slot, None)

    def adapt(self, x: Tensor, slots: Tensor, outputs: Sequence[Tensor]) -> None:
        """Change the rows of `outputs` ([T, out] of each matrix), which are the products with x [T, in]."""
        for slot, parts in self._parts.items():
            rows = (slots == slot).nonzero().flatten()
            if not rows.numel():
                continue
            inputs = x[rows].float()
            for part, y in zip(parts, outputs, strict=True):
                if part is not None:
                    y[rows] = adapted(part, inputs, y[rows].float()).to(y.dtype)

    def adapt_joined(self, x: Tensor, slots: Tensor, y: Tensor) -> None:
        self.adapt(x, slots, y.split([out for out, _ in self.shapes], dim=1))


def adapted(part: AdaptedPart, x: Tensor, y: Tensor) -> Tensor:
    """What `part` makes of the product y of some rows x."""
    if part.whole is not None:
        y = _kept(part, x @ part.whole.T)
        return y if part.bias is None else y + part.bias
    if part.gain is not None:
        y = y * part.gain
    if part.shift is not None:
        y = y + part.shift
    if part.a is not None and part.b is not None:
        y = y + _kept(part, (x @ part.a.T) @ part.b.T)
    return y


def _kept(part: AdaptedPart, y: Tensor) -> Tensor:
    return y if part.kept is None else y[:, part.kept]


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingPart:
    """Rows of the embedding: table[id] + b[id] a, or rows of another table."""

    a: Tensor | None = None  # [rank, hidden]
    b: Tensor | None = None  # [vocabulary, rank]
    whole: Tensor | None = None  # [vocabulary, hidden]

    @property
    def nbytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in (self.a, self.b, self.whole) if each is not None)

    def to(self, device: torch.device) -> EmbeddingPart:
        a, b, whole = (None if each is None else each.to(device) for each in (self.a, self.b, self.whole))
        return EmbeddingPart(a, b, whole)

    def rows(self, token_ids: Tensor, base: Tensor) -> Tensor:
        """The unscaled rows of these tokens, given those of the base."""
        if self.whole is not None:
            return self.whole[token_ids]
        assert self.a is not None
        assert self.b is not None
        return base + self.b[token_ids] @ self.a


def embed_adapted(parts: dict[int, EmbeddingPart], token_ids: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Rows [T, hidden] of the base's embedding as the adapters of the tokens change them. Safe to capture."""
    for slot, part in parts.items():
        changed = part.rows(token_ids, rows.float()).to(rows.dtype)
        rows = torch.where((slots == slot).unsqueeze(1), changed, rows)
    return rows
