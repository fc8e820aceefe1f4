"""KVQuant (arXiv 2401.18079): keys rounded before rotary positions, by what was measured of each head.

Keys are turned to components without correlation, which get bits by what queries see of them; values are rotated, and
all have nearly the same bits; a byte per row holds its gain. The first token of a sequence, an attention sink unlike
all others, has codes of its own instead of KVQuant's 16 bits. A page knows its place in the sequence, so that keys can
be rotated when they are read; torch does that before attention. Where this differs from the paper: docs/kv_cache.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from typing import ClassVar

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels import ref
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.component_codes import (
    ComponentRows,
    held_bytes,
    measured_rows,
    rotated_rows,
    row_bytes,
    shared_bytes,
)
from tokenmill.model.kvstore.head_sample import HeadSample
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.types import Batch

_PLACE_BYTES = 4  # of a page
# Regularization, relative to mean energies: few tokens were measured, and others must not be beyond all codes.
_QUERY_RIDGE = 0.02
_KEY_RIDGE = 0.001


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """Keys or values of a layer."""

    rest: ComponentRows
    first: ComponentRows  # of the first token of a sequence

    def encode(self, heads: Tensor, positions: Tensor) -> Tensor:
        rows = self.rest.encode(heads)
        first = positions == 0
        if bool(first.any()):
            rows[first] = self.first.encode(heads[first])
        return rows

    def decode(self, rows: Tensor, begins: Tensor) -> Tensor:
        """rows [pages, ...]; begins [pages]: whether these are the first of their sequence."""
        heads = self.rest.decode(rows)
        if bool(begins.any()):
            heads[begins, :, 0] = self.first.decode(rows[begins, :, :1])[:, :, 0]
        return heads


@dataclass(frozen=True, slots=True, eq=False)
class _LayerCodes:
    keys: _Side
    values: _Side
    rotary: RotaryTable | None = None

    @property
    def rows(self) -> list[ComponentRows]:
        return [rows for side in (self.keys, self.values) for rows in (side.rest, side.first)]


class _KVQuantStore(KVStore):
    is_coded = True
    key_bits: ClassVar[float]  # for each value, without the gain
    value_bits: ClassVar[float]

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, kernels: str = "", sequences: int = 1
    ) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        shape = (layout.layers_per_page, num_pages, layout.num_kv_heads, layout.page_size)
        sizes = self._row_bytes(layout)
        # Not zeroed on purpose: the operating system allocates memory only for pages that are written.
        self._rows = [torch.empty(*shape, size, dtype=torch.uint8, device=device) for size in sizes]
        # Of each page: its number in the sequence, times the number of groups, plus its group.
        self._places = torch.zeros(1, num_pages, 1, dtype=torch.int32, device=device)
        center = torch.zeros(layout.num_kv_heads, layout.head_dim, device=device)
        sides = [rotated_rows(center, size) for size in sizes]
        self._unmeasured = _LayerCodes(_Side(sides[0], sides[0]), _Side(sides[1], sides[1]))
        self._codes: dict[tuple[int, int], _LayerCodes] = {}  # by group and slot

    @classmethod
    def _row_bytes(cls, layout: KVLayout) -> tuple[int, int]:
        return row_bytes(layout.head_dim, cls.key_bits), row_bytes(layout.head_dim, cls.value_bits)

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        rows = layout.layers_per_page * layout.page_size * layout.num_kv_heads
        return rows * sum(cls._row_bytes(layout)) + _PLACE_BYTES

    @classmethod
    def fixed_bytes(cls, layout: KVLayout, sequences: int) -> int:  # noqa: ARG003
        """Of the codes of every layer: keys and values, each of first tokens too."""
        rows = [held_bytes(layout.num_kv_heads, layout.head_dim, measured) for measured in (True, False)]
        return 2 * sum(rows) * sum(len(group.layers) for group in layout.groups) + shared_bytes(layout.head_dim)

    @property
    def calibrates(self) -> bool:
        return True

    def calibrate(self, group: int, slot: int, sample: HeadSample) -> None:
        key_bytes, value_bytes = self._row_bytes(self.layout)
        energy = sample.query_moment.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp(min=1e-12)
        unit = torch.eye(self.layout.head_dim, dtype=torch.float64)
        metric = sample.query_moment / energy + _QUERY_RIDGE * unit
        keys = [
            measured_rows(_spread_out(heads, center), center, metric, key_bytes).moved(self.device)
            for heads, center in (
                (sample.keys, sample.keys.mean(0)),
                (sample.first_keys, _first_center(sample.first_keys, sample.begins)),
            )
        ]
        values = [
            rotated_rows(center.to(self.device), value_bytes)
            for center in (sample.value_mean, _first_center(sample.first_values, sample.begins))
        ]
        self._codes[group, slot] = _LayerCodes(_Side(*keys), _Side(*values), sample.rotary)

    def meaning(self) -> str:
        digest = sha256()
        for place, codes in sorted(self._codes.items()):
            digest.update(repr(place).encode())
            for tensor in [each for rows in codes.rows for each in rows.constants()]:
                digest.update(tensor.float().cpu().numpy().tobytes())
        return f"{self.name}-{digest.hexdigest()[:16]}"

    def prepare(self, batch: Batch) -> None:
        """Pages that this step writes are told their places."""
        size, groups = self.layout.page_size, len(self.layout.groups)
        for group, slots in enumerate(batch.slots):
            self._places[0, slots // size, 0] = (batch.positions // size * groups + group).to(torch.int32)

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        size = self.layout.page_size
        page, offset = token_slots // size, token_slots % size
        number, codes = self._located(slot, page)
        positions = number * size + offset
        keys, values = (rows.float().view(rows.shape[0], self.layout.num_kv_heads, -1) for rows in (k, v))
        if codes.rotary is not None:
            keys = _rotated_back(keys, positions, codes.rotary)
        for heads, side, rows in zip((keys, values), (codes.keys, codes.values), self._rows, strict=True):
            rows[slot, page, :, offset] = side.encode(heads, positions)

    def read(self, slot: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Pages of another group are read with the codes of their own: a padded table names page 0, whose it may be."""
        places, groups = self._places[0, pages.long(), 0].long(), len(self.layout.groups)
        found = (places % groups).unique().tolist() if groups > 1 else [0]
        if len(found) < 2:
            return self._read(slot, pages, places // groups, found[0] if found else 0)
        shape = (len(pages), self.layout.num_kv_heads, self.layout.page_size, self.layout.head_dim)
        k, v = (torch.empty(shape, device=self.device) for _ in range(2))
        for group in found:
            mine = places % groups == group
            k[mine], v[mine] = self._read(slot, pages[mine], places[mine] // groups, group)
        return k, v

    def _read(self, slot: int, pages: Tensor, number: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Pages of one group, by their numbers in their sequences."""
        size, codes = self.layout.page_size, self._codes.get((group, slot), self._unmeasured)
        sides = (codes.keys, codes.values)
        k, v = (side.decode(rows[slot, pages], number == 0) for side, rows in zip(sides, self._rows, strict=True))
        if codes.rotary is not None:
            positions = (number[:, None] * size + torch.arange(size, device=self.device)).flatten()
            # The last page of a context may end behind it.
            turned = _rotated(
                k.transpose(1, 2).flatten(0, 1), positions.clamp(max=len(codes.rotary.cos) - 1), codes.rotary
            )
            k = turned.unflatten(0, (len(pages), size)).transpose(1, 2).contiguous()
        return k, v

    def _located(self, slot: int, pages: Tensor) -> tuple[Tensor, _LayerCodes]:
        """Of pages that are written, which are all of one group: their numbers in their sequences, and how that group
        is coded in this slot."""
        places, groups = self._places[0, pages.long(), 0].long(), len(self.layout.groups)
        group = int(places[0]) % groups if len(places) and groups > 1 else 0
        return places // groups, self._codes.get((group, slot), self._unmeasured)

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.read(slot, torch.arange(self.num_pages, device=self.device))

    def page_tensors(self) -> list[Tensor]:
        return [*self._rows, self._places]

    @property
    def nbytes(self) -> int:
        held = [each for codes in self._codes.values() for rows in codes.rows for each in rows.held()]
        # Of memory, because a tensor may be shared, or a part of a larger one that stays with it
        memory = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in held}
        return sum(tensor.nbytes for tensor in self.page_tensors()) + sum(memory.values())


def _first_center(heads: Tensor, begins: bool) -> Tensor:
    """Of first tokens: the one that begins every text, where there is one."""
    return heads[0].clone() if begins else heads.mean(0)  # a copy, as a row would keep the whole sample


def _spread_out(heads: Tensor, center: Tensor) -> Tensor:
    """With a few heads more that lie around `center` in every direction, with a small part of the energy."""
    size = heads.shape[-1]
    energy = heads.square().mean((0, 2))[:, None]  # [kv_heads, 1]
    away = (_KEY_RIDGE * len(heads) * energy).sqrt()[None] * torch.eye(size)[:, None]
    return torch.cat((heads, center + away))


def _rotated(heads: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """[T, kv_heads, head_dim]"""
    rows = ref.rope(heads.flatten(1), positions, table.cos, table.sin, heads.shape[-1], table.interleaved)
    return rows.view_as(heads)


def _rotated_back(heads: Tensor, positions: Tensor, table: RotaryTable) -> Tensor:
    """What `_rotated` makes into these; a table may scale too."""
    cos, sin = table.cos[positions], table.sin[positions]
    square = cos.square() + sin.square()
    own = RotaryTable(cos / square, -sin / square, table.interleaved)
    return _rotated(heads, torch.arange(len(heads), device=heads.device), own)


class KVQuantK3V4Store(_KVQuantStore):
    name, key_bits, value_bits = "kvquant_k3v4", 3.0, 4.0


class KVQuant3Store(_KVQuantStore):
    name, key_bits, value_bits = "kvquant3", 3.0, 3.0
