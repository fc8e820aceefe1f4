"""TurboQuant (arXiv 2504.19874): rotate, keep the norm, round every coordinate to a fixed codebook of 2, 3 or 4 bits.

`turboquantB` is the variant of least squared error for keys and values. `turboquantB_prod` spends one of the key's bits
on the signs of a random projection of the rounding error: products with queries become unbiased, with more variance.
The rotation is a randomized Hadamard matrix. C++ reads the first, torch expands the second.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.cpu_pages import RowCode
from tokenmill.kernels.packed_pages import CODEBOOK, PackedRows
from tokenmill.model.kvstore.codebook import normal_codebook
from tokenmill.model.kvstore.packing import as_bytes, from_bytes, pack_codes, unpack_codes
from tokenmill.model.kvstore.rotation import SEED, Rotation
from tokenmill.model.kvstore.rows import RowFormat, RowStore

# An addition to the paper, in what is stored as the norm. A row of some dozen coordinates is not quite normal: codes
# for a slightly different norm may have a sixth less error, so these multiples are tried. And levels are means of their
# cells, so that decoded rows are too short (by 1 % at 4 bits, 3.5 % at 3), which hurts a model more than noise: the
# stored length corrects that.
GAINS = (0.85, 0.92, 1.0, 1.08)


class CodebookRows(RowFormat):
    """Codes of the rotated direction, then the norm in half precision."""

    def __init__(
        self,
        head_dim: int,
        bits: int,
        signed: bool = True,
        renormalize: bool = False,
        refined: bool = False,
    ) -> None:
        """`signed`: random signs before the Hadamard matrix. `renormalize`: the rounded direction is brought to length
        one before the norm is applied. `refined`: the length stored is not the norm, see GAINS."""
        super().__init__(head_dim)
        self.bits, self._renormalize, self._refined = bits, renormalize, refined
        self.rotation = Rotation(head_dim, signed)
        self._levels, self._bounds = normal_codebook(bits)

    @property
    def row_bytes(self) -> int:
        return self.head_dim * self.bits // 8 + 2

    def to_rows(self, heads: Tensor) -> Tensor:
        best: tuple[Tensor, Tensor, Tensor] | None = None  # codes, cost, norm
        for gain in GAINS if self._refined else (1.0,):
            norm = heads.norm(dim=-1, keepdim=True) * gain

            def rounder(values: Tensor, norm: Tensor = norm) -> tuple[Tensor, Tensor]:
                codes = self.nearest(values, norm)
                return codes, self.direction(codes) * norm

            codes, cost = self.round(heads, rounder)
            if best is not None:
                better = cost < best[1]
                codes, cost, norm = (
                    torch.where(better, new, old) for new, old in zip((codes, cost, norm), best, strict=True)
                )
            best = codes, cost, norm
        assert best is not None
        codes, _, length = best
        if self._refined:  # the length at which the product with the head itself is exact
            product = (heads * self.direction(codes)).sum(-1, keepdim=True)
            length = torch.where(product > 0, heads.square().sum(-1, keepdim=True) / product, length)
        return torch.cat((pack_codes(codes, self.bits), as_bytes(length.half())), -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        split = self.row_bytes - 2
        direction = self.direction(unpack_codes(rows[..., :split], self.bits))
        if self._renormalize:
            direction = direction / direction.norm(dim=-1, keepdim=True)
        return direction * from_bytes(rows[..., split:], torch.float16).float()

    def nearest(self, values: Tensor, norm: Tensor) -> Tensor:
        """Codes of rotated coordinates."""
        scaled = torch.where(norm > 0, values * (math.sqrt(self.head_dim) / norm), 0.0)
        return torch.bucketize(scaled, self._bounds.to(values.device))

    def direction(self, codes: Tensor) -> Tensor:
        """The vector of length about one that the codes represent, still rotated."""
        return self._levels.to(codes.device)[codes] / math.sqrt(self.head_dim)

    @property
    def code_bytes(self) -> int:
        return self.row_bytes - 2

    def packed(self, device: torch.device) -> PackedRows | None:
        if self.bits != 4 or self._renormalize or not self._refined:
            return None
        assert self.rotation is not None
        levels, bounds = (table.float().to(device) / math.sqrt(self.head_dim) for table in (self._levels, self._bounds))
        gains = torch.tensor(GAINS, device=device)
        return PackedRows(CODEBOOK, self.head_dim, self.rotation.matrix(device), levels, bounds, gains)

    def code(self) -> RowCode:
        return RowCode(
            "codebook",
            self.head_dim,
            self.bits,
            renormalize=self._renormalize,
            centroids=self._levels,
            bounds=self._bounds,
            gains=torch.tensor(GAINS) if self._refined else None,
        )


class ProductRows(RowFormat):
    """Codes of one bit less, the signs of S r for their error r, then the norms of the head and of r.

    <q, r> is estimated as sqrt(pi / 2) / d * |r| * <S q, signs>: linear in q, so a row can also be expanded.
    """

    def __init__(self, head_dim: int, bits: int) -> None:
        super().__init__(head_dim)
        self._rows = CodebookRows(head_dim, bits - 1)
        self.rotation = Rotation(head_dim)
        self._projection = torch.randn(head_dim, head_dim, generator=torch.Generator().manual_seed(SEED))

    @property
    def row_bytes(self) -> int:
        return self.head_dim * (self._rows.bits + 1) // 8 + 4

    def to_rows(self, heads: Tensor) -> Tensor:
        norm = heads.norm(dim=-1, keepdim=True)
        codes = self._rows.nearest(heads, norm)  # without feedback: the projection needs the actual error
        rest = torch.where(norm > 0, heads / norm, 0.0) - self._rows.direction(codes)
        signs = (rest @ self._projection.T.to(rest)) >= 0
        lengths = torch.cat((norm, rest.norm(dim=-1, keepdim=True)), -1)
        return torch.cat((pack_codes(codes, self._rows.bits), pack_codes(signs, 1), as_bytes(lengths.half())), -1)

    def from_rows(self, rows: Tensor) -> Tensor:
        first, second = self.head_dim * self._rows.bits // 8, self.row_bytes - 4
        direction = self._rows.direction(unpack_codes(rows[..., :first], self._rows.bits))
        signs = unpack_codes(rows[..., first:second], 1).float() * 2 - 1
        lengths = from_bytes(rows[..., second:], torch.float16).float()
        rest = (signs @ self._projection.to(signs)) * (math.sqrt(math.pi / 2) / self.head_dim * lengths[..., 1:])
        return (direction + rest) * lengths[..., :1]


class _TurboQuantStore(RowStore):
    bits: int

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        rows = CodebookRows(layout.head_dim, cls.bits, refined=True)
        return rows, rows


class _TurboQuantProductStore(RowStore):
    bits: int

    @classmethod
    def formats(cls, layout: KVLayout) -> tuple[RowFormat, RowFormat]:
        return ProductRows(layout.head_dim, cls.bits), CodebookRows(layout.head_dim, cls.bits, refined=True)


class TurboQuant4Store(_TurboQuantStore):
    name, bits = "turboquant4", 4
    on_gpu = True


class TurboQuant3Store(_TurboQuantStore):
    name, bits = "turboquant3", 3


class TurboQuant2Store(_TurboQuantStore):
    name, bits = "turboquant2", 2


class TurboQuant4ProductStore(_TurboQuantProductStore):
    name, bits = "turboquant4_prod", 4


class TurboQuant3ProductStore(_TurboQuantProductStore):
    name, bits = "turboquant3_prod", 3


class TurboQuant2ProductStore(_TurboQuantProductStore):
    name, bits = "turboquant2_prod", 2
