"""A base with adapters merged into it, for `convert`: the same tensors, with other values.

Several adapters add up: each contributes the difference it makes to the base, times its weight, so that their order
does not matter (DoRA and whole matrices included). A base whose head is its embedding gets a head of its own where an
adapter changes one of the two. Reads through ConvertSource, some rows at a time. Used by merge.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter
from tokenmill.checkpoint.adapters.fit import HEAD, check_base
from tokenmill.checkpoint.gguf_recurrent import has_offset
from tokenmill.checkpoint.identity import model_hash
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.convert_source import ConvertSource


@dataclass(frozen=True, slots=True, eq=False)
class WeightedAdapter:
    adapter: Adapter
    weight: float = 1.0


class MergedSource(ConvertSource):
    changed = True

    def __init__(self, path: Path, adapters: Sequence[WeightedAdapter]) -> None:
        super().__init__(path)
        states_base = any(each.adapter.base_hash for each in adapters)
        base_hash = model_hash(path) if states_base else ""
        self._adapters = [replace(each, adapter=self._fitted(each.adapter, base_hash)) for each in adapters]
        if self.description.tie_embeddings and any(map(_changes_edge, self._adapters)):
            self._weights[HEAD] = self._weights[EMBEDDING]
            self._parts[HEAD] = self._parts[EMBEDDING]
            self.matrices.append(HEAD)
            self.description = replace(self.description, tie_embeddings=False)

    def _fitted(self, adapter: Adapter, base_hash: str) -> Adapter:
        """In Hugging Face's row order, in which `floats` gives the base."""
        named = replace(self.description, name=self.description.name or self.checkpoint.path.name)
        return check_base(adapter, named, base_hash)

    @property
    def num_changed(self) -> int:
        """Matrices and vectors that differ from the base."""
        return len({name for each in self._adapters for name in (*each.adapter.matrices, *each.adapter.saved)})

    def scheme(self, prefix: str) -> Scheme | None:
        """Everything is written as floats: codes are those of the base."""
        del prefix
        return None

    def floats(self, prefix: str, begin: int, end: int) -> Tensor:
        rows = super().floats(prefix, begin, end)
        results = []
        for each in self._adapters:
            matrix, whole = each.adapter.matrices.get(prefix), each.adapter.saved.get(f"{prefix}.weight")
            if matrix is not None:
                results.append(matrix.apply(rows, begin, end, each.weight))
            elif whole is not None:
                results.append(_towards(rows, whole[begin:end], each.weight))
        return _added(rows, results)

    def vector(self, name: str) -> Tensor:
        value = super().vector(name)
        found = [(each.adapter.saved[name], each.weight) for each in self._adapters if name in each.adapter.saved]
        return _added(value, [_towards(value, whole, weight) for whole, weight in found])

    def as_used(self, name: str) -> Tensor:
        if not any(name in each.adapter.saved for each in self._adapters):
            return super().as_used(name)
        return self.vector(name) + (self.description.norm_offset if has_offset(name) else 0.0)


def _changes_edge(each: WeightedAdapter) -> bool:
    names = {*each.adapter.matrices, *(name.removesuffix(".weight") for name in each.adapter.saved)}
    return bool(names & {EMBEDDING, HEAD})


def _towards(base: Tensor, whole: Tensor, weight: float) -> Tensor:
    return whole if weight == 1.0 else base + weight * (whole - base)


def _added(base: Tensor, results: Sequence[Tensor]) -> Tensor:
    """The base plus the difference that each result makes; exactly the result where there is one."""
    if len(results) == 1:
        return results[0]
    total = base
    for result in results:
        total = total + (result - base)
    return total
