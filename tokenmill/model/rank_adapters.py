"""Adapters on a rank: the part of each that belongs to the rank's part of the model.

What an adapter does is done to the rank's own product, before ranks exchange it: of rows of a matrix the same rows of
b, of columns ("sum") the same columns of a. In exact mode all outputs of b are multiplied and the rank's own kept: a
product with fewer of them may round otherwise. Every rank is given the whole adapter and cuts it here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import HEAD
from tokenmill.errors import UserError
from tokenmill.hardware.sharding import Place
from tokenmill.kernels.ref_adapters import AdaptedPart
from tokenmill.model.adapters import AdapterBank, PreparedAdapter, SiteMaker, adapted_part
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.slices import pick
from tokenmill.model.loader import LoadedModel


class RankAdapterBank(AdapterBank):
    def __init__(
        self, model: LoadedModel, num_slots: int, max_rank: int, make_site: SiteMaker, place: Place, exact: bool
    ) -> None:
        super().__init__(model, num_slots, max_rank, make_site)
        self._rank, self._exact = place, exact
        self._elsewhere: frozenset[str] = frozenset()
        if place.stage:  # the first stage has the head
            self._places.pop(HEAD, None)

    def know(self, names: Iterable[str]) -> None:
        """The matrices that can take an adapter on any rank: rank 0 refuses all others for everybody."""
        self._elsewhere = frozenset(names) - self._places.keys()

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        if self._rank.stage:
            matrices = {name: matrix for name, matrix in adapter.matrices.items() if name != EMBEDDING}
            saved = {name: each for name, each in adapter.saved.items() if name != f"{EMBEDDING}.weight"}
            adapter = replace(adapter, matrices=matrices, saved=saved)
        return super().prepare(adapter)

    def _is_elsewhere(self, name: str) -> bool:
        return self._rank.rank != 0 or name in self._elsewhere

    def make_part(self, matrix: AdapterMatrix, weight: LinearWeight) -> AdaptedPart:
        if not weight.own:
            return super().make_part(matrix, weight)
        if weight.split == "sum":
            if matrix.magnitude is not None:
                raise UserError(
                    f"the norms of {matrix.name} (DoRA) need whole rows, of which each rank has some columns",
                    "use --exact-ranks, or merge the adapter into the base",
                )
            return adapted_part(replace(matrix, a=_columns(matrix.a, weight)), weight)
        magnitude = None if matrix.magnitude is None else pick(matrix.magnitude, weight.own)
        part = adapted_part(replace(matrix, b=pick(matrix.b, weight.own), magnitude=magnitude), weight)
        if not self._exact:
            return part
        kept, b = _numbers(weight), matrix.b * matrix.scale
        assert part.b is not None
        b[kept] = part.b
        return replace(part, b=b, kept=kept)

    def make_whole(self, matrix: Tensor, weight: LinearWeight) -> AdaptedPart:
        if not weight.own:
            return super().make_whole(matrix, weight)
        if weight.split == "sum":
            return AdaptedPart(whole=_columns(matrix, weight), bias=weight.bias)
        if self._exact:
            return AdaptedPart(whole=matrix, bias=weight.bias, kept=_numbers(weight))
        return AdaptedPart(whole=pick(matrix, weight.own).contiguous(), bias=weight.bias)


def _columns(values: Tensor, weight: LinearWeight) -> Tensor:
    return pick(values.T, weight.own).T.contiguous()


def _numbers(weight: LinearWeight) -> Tensor:
    return torch.cat([torch.arange(rows.start, rows.stop) for rows in weight.own])
