"""The slots that recurrent states live in: one slot holds the states of all recurrent layers for one sequence.

Which sequence has which slot, and which slots are snapshots, is decided by engine/kv/states.py; this file only holds,
clears and copies them. States are float32 on the model's device. Owned by the KV store; read by executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout

_ALIGNMENT = 64  # numbers: every array of a slot begins at a multiple of 256 bytes


class StateStore:
    def __init__(self, layout: KVLayout, num_slots: int, device: torch.device, joined: bool | None = None) -> None:
        """`joined`: all states of a slot lie in one piece, so that clearing or copying a slot is one launch. None: on a
        GPU; the C++ kernels want the slots of an array side by side."""
        self.num_slots = num_slots
        joined = bool(layout.states) and (device.type != "cpu" if joined is None else joined)
        # By layer number: its arrays, each [slots, ...]. Not zeroed: a sequence's slot is cleared when it begins.
        self._arrays: dict[int, tuple[Tensor, ...]] = {}
        self._pieces: list[Tensor] = []  # [slots, ...]: what is cleared and copied
        if joined:
            widths = [-(-prod(shape) // _ALIGNMENT) * _ALIGNMENT for state in layout.states for shape in state.shapes]
            self._pieces = [torch.empty((num_slots, sum(widths)), device=device)]
            parts = iter(self._pieces[0].split(widths, dim=1))
        for state in layout.states:
            if joined:
                arrays = tuple(next(parts)[:, : prod(shape)].unflatten(1, shape) for shape in state.shapes)
            else:
                arrays = tuple(torch.empty((num_slots, *shape), device=device) for shape in state.shapes)
                self._pieces += arrays
            self._arrays[state.layer] = arrays

    def array(self, layer: int, number: int) -> Tensor:
        """[slots, ...]: one of the arrays of a layer (`ScanSpec.array`)."""
        return self._arrays[layer][number]

    def clear(self, slots: Sequence[int]) -> None:
        """The state before the first token."""
        for slot in slots:
            for piece in self._pieces:
                piece[slot] = 0.0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, destination), in order: a later pair may read what an earlier one wrote."""
        for source, destination in pairs:
            for piece in self._pieces:
                piece[destination] = piece[source]

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() * piece.element_size() for piece in self._pieces)
