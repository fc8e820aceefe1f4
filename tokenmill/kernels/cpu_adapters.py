"""What adapters add to a product, in C++ (csrc/cpu/adapters.h): factors packed once, multiplied beside the base.

Where the base is quantized the factors are int8, which costs a quarter of float32's bytes and rounds less than the base
does; where it is float they stay float32. The recorded executor puts packed adapters into its program; `adapt` is the
same work by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels.cpu_module import pool
from tokenmill.kernels.native import module
from tokenmill.kernels.ref_adapters import AdaptedPart, EmbeddingPart, Parts


class CpuSite:
    """The adapters of one product, by slot: see kernels/ref_adapters.py."""

    backend = "cpu"

    def __init__(self, shapes: Sequence[tuple[int, int]], exact: bool) -> None:
        """`exact`: keep the factors in float32."""
        self.shapes, self._exact = tuple(shapes), exact
        self._packed: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(map(self.packed_bytes, self._packed.values()))

    def pack(self, parts: Parts) -> Any:
        outputs = [out for out, _ in self.shapes]
        return module().pack_adapter(self.shapes[0][1], outputs, [_numbers(part) for part in parts], self._exact)

    @staticmethod
    def packed_bytes(packed: Any) -> int:
        size: int = packed.nbytes
        return size

    def set(self, slot: int, packed: Any) -> None:
        self._packed[slot] = packed

    def clear(self, slot: int) -> None:
        self._packed.pop(slot, None)

    def adapt(self, x: Tensor, slots: Tensor, outputs: Sequence[Tensor]) -> None:
        last = max(self._packed, default=0)
        by_slot = [self._packed.get(slot) for slot in range(1, last + 1)]
        slots = torch.where(slots <= last, slots, 0)  # an adapter in a later slot changes nothing here
        module().adapt(pool(), x.contiguous(), slots, by_slot, list(outputs))

    def adapt_joined(self, x: Tensor, slots: Tensor, y: Tensor) -> None:
        parts = [part.contiguous() for part in y.split([out for out, _ in self.shapes], dim=1)]
        self.adapt(x, slots, parts)
        y.copy_(torch.cat(parts, dim=1))


class RecordedSite(CpuSite):
    """The same inside a recorded program."""

    def __init__(self, program: Any, product: int, shapes: Sequence[tuple[int, int]], exact: bool) -> None:
        """`product`: the number of the product in the program."""
        super().__init__(shapes, exact)
        self._program, self._product = program, product

    def set(self, slot: int, packed: Any) -> None:
        super().set(slot, packed)
        self._program.set_adapter(self._product, slot, packed)

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self._program.set_adapter(self._product, slot, None)


def pack_embedding(part: EmbeddingPart) -> Any:
    return module().pack_embedding(*(_plain(each) for each in (part.a, part.b, part.whole)))


def _numbers(part: AdaptedPart | None) -> tuple[Tensor | None, ...] | None:
    if part is None:
        return None
    return tuple(_plain(each) for each in (part.a, part.b, part.gain, part.shift, part.whole, part.bias))


def _plain(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.to("cpu", torch.float32).contiguous()
