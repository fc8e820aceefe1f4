"""The slots that recurrent states live in: one slot holds the states of all recurrent layers for one sequence.

Which sequence has which slot, and which slots are snapshots, is decided by engine/kv/states.py; this file only holds,
clears and copies them. States are float32 on the model's device. Owned by the KV store; read by executors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout


class StateStore:
    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        # By layer number: its arrays, each [slots, ...]. Not zeroed: a sequence's slot is cleared when it begins.
        self._arrays = {
            state.layer: tuple(torch.empty((num_slots, *shape), device=device) for shape in state.shapes)
            for state in layout.states
        }

    def array(self, layer: int, number: int) -> Tensor:
        """[slots, ...]: one of the arrays of a layer (`ScanSpec.array`)."""
        return self._arrays[layer][number]

    def clear(self, slots: Sequence[int]) -> None:
        """The state before the first token."""
        if slots:
            for array in self._all():
                array[list(slots)] = 0.0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, destination), in order: a later pair may read what an earlier one wrote."""
        for source, destination in pairs:
            for array in self._all():
                array[destination] = array[source]

    @property
    def nbytes(self) -> int:
        return sum(array.numel() * array.element_size() for array in self._all())

    def _all(self) -> list[Tensor]:
        return [array for arrays in self._arrays.values() for array in arrays]
