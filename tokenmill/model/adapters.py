"""Adapters on a loaded model: slots that rows of a step name, each with the weights of one adapter ready to multiply.

Each product of the model (one `linear` call) has a site that holds what adapters do to it, in the form of its kernels;
the embedding is a site of its own. An adapter is taken apart here: scales folded, DoRA's norms computed from the base's
own dequantized rows, modules that cannot take an adapter refused by name. `prepare` may run in any thread; `load` and
`clear` belong between two steps. Owned by an executor; knows nothing of requests or of who holds a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import HEAD, check_rank
from tokenmill.errors import UserError
from tokenmill.kernels.ref_adapters import (
    RANK_BLOCK,
    AdaptedPart,
    EmbeddingPart,
    Parts,
    embed_adapted,
    padded_rank,
)
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.linear_groups import adaptable_groups
from tokenmill.model.loader import LoadedModel

_NORM_VALUES = 1 << 22  # of the base, dequantized at a time for DoRA's norms


class AdapterSite(Protocol):
    """What adapters do to one product, for one backend; kernels/ref_adapters.py has the plain one."""

    backend: str

    @property
    def nbytes(self) -> int: ...

    def pack(self, parts: Parts) -> Any:
        """The weights as the kernels read them. Any thread."""
        ...

    def packed_bytes(self, packed: Any) -> int: ...

    def set(self, slot: int, packed: Any) -> None: ...

    def clear(self, slot: int) -> None: ...

    def adapt(self, x: Tensor, slots: Tensor, outputs: Sequence[Tensor]) -> None:
        """Change the rows of the products with x, in place."""
        ...

    def adapt_joined(self, x: Tensor, slots: Tensor, y: Tensor) -> None:
        """The same where the products lie side by side."""
        ...


# Of the weights of one product, for so many slots of at most that rank
SiteMaker = Callable[[Sequence[LinearWeight], int, int], AdapterSite]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """An adapter as the sites of one bank hold it: loading it copies at most, and computes nothing."""

    name: str
    packed: dict[int, Any]  # by number of the site
    embedding: EmbeddingPart | None
    replaces: bool  # has whole matrices or changes the embedding
    nbytes: int


class AdapterBank:
    def __init__(self, model: LoadedModel, num_slots: int, max_rank: int, make_site: SiteMaker) -> None:
        """`num_slots`: adapters that steps can use, in slots 1 to num_slots."""
        self.num_slots, self.max_rank, self._device = num_slots, max_rank, model.device
        groups = adaptable_groups(model.decoder)
        self._groups = groups
        self.sites = [make_site(group, num_slots, max_rank) for group in groups]
        self._site_of = {id(group[0]): site for group, site in zip(groups, self.sites, strict=True)}
        head = model.decoder.head
        names = {id(weight): name for name, weight in model.weights.items()}
        names[id(head)] = HEAD  # a tied head is the embedding's matrix under another name
        # By name: the number of its site and its place among the matrices of that product.
        self._places = {
            names[id(weight)]: (number, place)
            for number, group in enumerate(groups)
            for place, weight in enumerate(group)
        }
        self._held: dict[int, PreparedAdapter] = {}
        self._embeddings: dict[int, EmbeddingPart] = {}
        self._tell: Callable[[int, EmbeddingPart | None], None] = lambda _slot, _part: None

    @property
    def nbytes(self) -> int:
        return sum(site.nbytes for site in self.sites) + sum(part.nbytes for part in self._embeddings.values())

    @property
    def embeddings(self) -> dict[int, EmbeddingPart]:
        """By slot, where an adapter changes the embedding."""
        return self._embeddings

    def site(self, weights: Sequence[LinearWeight]) -> AdapterSite | None:
        """That of a product with these weights; None where none can be adapted."""
        return self._site_of.get(id(weights[0]))

    def replaces(self, slot: int) -> bool:
        """Whether the adapter in a slot replaces whole matrices or changes the embedding."""
        held = self._held.get(slot)
        return held is not None and held.replaces

    def prepare(self, adapter: Adapter) -> PreparedAdapter:
        """`adapter` is in the names and the row order of the base (checkpoint/adapters/fit.py)."""
        check_rank(adapter, self.max_rank)
        parts: dict[int, list[AdaptedPart | None]] = {}
        embedding: EmbeddingPart | None = None
        for name, matrix in adapter.matrices.items():
            if name == EMBEDDING:
                embedding = EmbeddingPart(matrix.a * matrix.scale, matrix.b).to(self._device)
            elif (found := self._place(adapter, name)) is not None:
                number, place = found
                self._parts_of(parts, number)[place] = self.make_part(matrix, self._groups[number][place])
        for tensor_name, tensor in adapter.saved.items():
            name = tensor_name.removesuffix(".weight")
            if name == EMBEDDING:
                embedding = EmbeddingPart(whole=tensor.float()).to(self._device)
            elif (found := self._place(adapter, name)) is not None:
                number, place = found
                self._parts_of(parts, number)[place] = self.make_whole(tensor.float(), self._groups[number][place])
        packed = {number: self.sites[number].pack(tuple(each)) for number, each in parts.items()}
        nbytes = sum(self.sites[number].packed_bytes(each) for number, each in packed.items())
        nbytes += 0 if embedding is None else embedding.nbytes
        return PreparedAdapter(adapter.name, packed, embedding, bool(adapter.saved) or embedding is not None, nbytes)

    def load(self, slot: int, adapter: Adapter | PreparedAdapter) -> None:
        prepared = self.prepare(adapter) if isinstance(adapter, Adapter) else adapter
        self.clear(slot)
        for number, packed in prepared.packed.items():
            self.sites[number].set(slot, packed)
        if prepared.embedding is not None:
            self._embeddings[slot] = prepared.embedding
            self._tell(slot, prepared.embedding)
        self._held[slot] = prepared

    def clear(self, slot: int) -> None:
        assert 1 <= slot <= self.num_slots, f"slot {slot} of {self.num_slots}"
        held = self._held.pop(slot, None)
        for number in () if held is None else held.packed:
            self.sites[number].clear(slot)
        if self._embeddings.pop(slot, None) is not None:
            self._tell(slot, None)

    def watch_embeddings(self, tell: Callable[[int, EmbeddingPart | None], None]) -> None:
        """`tell` learns of every slot whose adapter changes the embedding; None: it no longer does."""
        self._tell = tell

    def embed(self, token_ids: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        """Unscaled rows of the base's embedding, as the adapters change them."""
        return embed_adapted(self._embeddings, token_ids, slots, rows) if self._embeddings else rows

    def make_part(self, matrix: AdapterMatrix, weight: LinearWeight) -> AdaptedPart:
        """What the adapter of one matrix does to its product."""
        return adapted_part(matrix, weight)

    def make_whole(self, matrix: Tensor, weight: LinearWeight) -> AdaptedPart:
        """The same of a matrix that replaces the base's."""
        return AdaptedPart(whole=matrix, bias=weight.bias)

    @property
    def names(self) -> list[str]:
        """The matrices that can take an adapter, besides the embedding."""
        return list(self._places)

    def _is_elsewhere(self, name: str) -> bool:  # noqa: ARG002
        """Whether another rank has this matrix."""
        return False

    def _parts_of(self, parts: dict[int, list[AdaptedPart | None]], number: int) -> list[AdaptedPart | None]:
        return parts.setdefault(number, [None] * len(self._groups[number]))

    def _place(self, adapter: Adapter, name: str) -> tuple[int, int] | None:
        """None: another rank has it."""
        place = self._places.get(name)
        if place is None and not self._is_elsewhere(name):
            what = "an expert or its router" if ".mlp." in name else "not one of the products that can take one"
            raise UserError(
                f"adapter '{adapter.name}' changes {name}, which is {what} in this engine",
                "merge the adapter into the base: tokenmill convert BASE OUT --adapter DIR",
            )
        return place


def slot_bytes(model: LoadedModel, max_rank: int) -> int:
    """Memory that one adapter of this rank takes that changes every product: on a GPU reserved for each slot, on a CPU
    taken by adapters of quantized bases, by what they change (of float bases four times that)."""
    on_gpu, blocks, total = model.table is not None, -(-max_rank // RANK_BLOCK), 0
    for group in adaptable_groups(model.decoder):
        outputs = sum(weight.out_features for weight in group)
        values = len(group) * group[0].in_features + outputs
        vectors = 4 * outputs * (2 if any(weight.bias is not None for weight in group) else 1)
        total += 2 * padded_rank(max_rank) * values + vectors if on_gpu else blocks * RANK_BLOCK * values
    return total


def adapted_part(matrix: AdapterMatrix, weight: LinearWeight) -> AdaptedPart:
    """The scale goes into b, and so does DoRA's gain: magnitude over the norm of each changed row of the base."""
    b = matrix.b * matrix.scale
    if matrix.magnitude is None:
        return _checked(matrix.name, AdaptedPart(matrix.a, b))
    gain = matrix.magnitude / _row_norms(matrix, weight)
    shift = None if weight.bias is None else (1 - gain) * weight.bias.to(gain.device)
    return _checked(matrix.name, AdaptedPart(matrix.a, b * gain[:, None], gain, shift))


def _checked(name: str, part: AdaptedPart) -> AdaptedPart:
    """Finite in a file is not finite here: scales multiply, and DoRA divides by the norms of rows that may be zero."""
    assert part.a is not None
    assert part.b is not None
    product = part.a.abs().max() * part.b.abs().max()  # rounded factors carry it
    if not all(bool(torch.isfinite(each).all()) for each in (product, *part.tensors)):
        raise UserError(
            f"the adapter of {name} has no finite values with this base", "the training failed: use another"
        )
    return part


def _row_norms(matrix: AdapterMatrix, weight: LinearWeight) -> Tensor:
    norms = torch.empty(weight.out_features)
    step = max(1, _NORM_VALUES // weight.in_features)
    for begin in range(0, weight.out_features, step):
        end = min(begin + step, weight.out_features)
        rows = weight.dequantize(begin, end).float().cpu()
        norms[begin:end] = torch.linalg.vector_norm(rows + matrix.delta(begin, end), dim=1)
    return norms
