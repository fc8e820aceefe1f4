"""The slots that recurrent states live in: one slot holds the states of all recurrent layers for one sequence.

Which sequence has which slot, and which slots are snapshots, is decided by engine/kv/states.py; this file only holds,
clears and copies them. States are float32 on the model's device. Owned by the KV store; read by executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.kernels.host import Device, empty, on_host

if TYPE_CHECKING:
    from torch import Tensor

_ALIGNMENT = 64  # numbers: every array of a slot begins at a multiple of 256 bytes


class StateStore:
    def __init__(
        self, layout: KVLayout, num_slots: int, device: Device, num_spares: int = 0, joined: bool | None = None
    ) -> None:
        """`num_spares`: places beyond those of slots, for executors that write a state elsewhere than they read it.
        `joined`: all states of a slot lie in one piece, so that clearing or copying a slot is one launch. None: on a
        GPU; the C++ kernels want the slots of an array side by side."""
        self.num_slots = num_slots
        self.places = list(range(num_slots))  # by slot, in the arrays; changed by those who use the spares
        self.spares = list(range(num_slots, num_slots + num_spares))
        num_places = num_slots + num_spares
        joined = bool(layout.states) and (device.type != "cpu" if joined is None else joined)
        # By layer number: its arrays, each [places, ...]. Not zeroed: a sequence's slot is cleared when it begins.
        self._arrays: dict[int, tuple[Tensor, ...]] = {}
        self._pieces: list[Tensor] = []  # [places, ...]: what is cleared and copied
        if joined:
            widths = [-(-prod(shape) // _ALIGNMENT) * _ALIGNMENT for state in layout.states for shape in state.shapes]
            self._pieces = [_floats((num_places, sum(widths)), device)]
            parts = iter(self._pieces[0].split(widths, dim=1))
        for state in layout.states:
            if joined:
                arrays = tuple(next(parts)[:, : prod(shape)].unflatten(1, shape) for shape in state.shapes)
            else:
                arrays = tuple(_floats((num_places, *shape), device) for shape in state.shapes)
                self._pieces += arrays
            self._arrays[state.layer] = arrays

    def array(self, layer: int, number: int) -> Tensor:
        """[places, ...]: one of the arrays of a layer (`ScanSpec.array`)."""
        return self._arrays[layer][number]

    def clear(self, slots: Sequence[int]) -> None:
        """The state before the first token."""
        for slot in slots:
            for piece in self._pieces:
                piece[self.places[slot]] = 0.0

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy slots (source, destination), in order: a later pair may read what an earlier one wrote."""
        for source, destination in pairs:
            for piece in self._pieces:
                piece[self.places[destination]] = piece[self.places[source]]

    @property
    def pieces(self) -> list[Tensor]:
        """All memory of the states."""
        return self._pieces

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self._pieces)


def _floats(shape: tuple[int, ...], device: Device) -> Any:
    if on_host(device):
        return empty(shape)
    import torch

    return torch.empty(shape, device=device)
