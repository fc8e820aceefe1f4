"""Masks of tokens that come again, on the device: a step sends which row has which of them.

Masks are known by their identity: only those that nobody can write to are brought here. The ones that were not used for
the longest time make room. Called by logit_edits.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from tokenmill.grammar.vocabulary import Bits

_MAX_PLACES = 128  # 2 MB with 128 thousand tokens


class MaskTable:
    def __init__(self, device: torch.device, words: int, send: Callable[[np.ndarray], Tensor]) -> None:
        self._send = send  # to the device
        self.bits = torch.zeros(_MAX_PLACES, words, dtype=torch.int32, device=device)
        self._places: OrderedDict[int, tuple[Bits, int]] = OrderedDict()  # by identity of the mask, which is held

    def places(self, masks: Mapping[int, Bits]) -> dict[int, int]:
        """By row: the place of its mask in `bits`. Rows for which there is no place are missing."""
        found: dict[int, int] = {}
        used: set[int] = set()
        new: dict[int, Bits] = {}
        for row, bits in masks.items():
            known = self._places.get(id(bits))
            if known is not None:
                self._places.move_to_end(id(bits))
                place = known[1]
            else:
                free = self._free_place(used) if bits.size == self.bits.shape[1] else None
                if free is None:
                    continue
                place = free
                self._places[id(bits)] = bits, place
                new[place] = bits
            used.add(place)
            found[row] = place
        if new:  # behind the steps that still read what was there
            self.bits[self._send(np.array(list(new)))] = self._send(np.stack(list(new.values())))
        return found

    def _free_place(self, used: set[int]) -> int | None:
        if len(self._places) < len(self.bits):
            return len(self._places)
        oldest, (_, place) = next(iter(self._places.items()))
        if place in used:  # then all are
            return None
        del self._places[oldest]
        return place
