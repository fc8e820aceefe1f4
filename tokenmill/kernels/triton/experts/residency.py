"""Which experts of a layer lie in the GPU's slots, and which of them make room for others. No tensors here.

An expert that many tokens go to stays: uses are counted and forgotten again step by step, and the least used one is
evicted. A step that needs more experts than there are slots is computed in rounds. Used by host.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

_KEPT = 0.98  # of the count of uses after each step: half of it is forgotten in 34


class Residency:
    """Slot of each expert that is on the GPU, and counts of what happened."""

    def __init__(self, num_experts: int, num_slots: int) -> None:
        self.num_slots = num_slots
        self.slots: dict[int, int] = {}  # expert -> slot
        self.hits = 0  # experts that a step found on the GPU
        self.fetched = 0
        self.evicted = 0
        self.computed_on_host = 0
        self._uses = [0.0] * num_experts
        self._free = list(reversed(range(num_slots)))

    def count(self, tokens: Mapping[int, int]) -> None:
        """A step sends so many tokens to each of these experts."""
        self._uses = [_KEPT * uses for uses in self._uses]
        for expert, number in tokens.items():
            self._uses[expert] += number
            self.hits += expert in self.slots

    def rounds(self, needed: Collection[int]) -> Iterator[list[int]]:
        """Experts to be computed together: first those on the GPU with as many others as fit, then half the slots at a
        time, so that the most used ones stay. Each round must be placed before the next is asked for."""
        present = [expert for expert in needed if expert in self.slots]
        # The most used come last: they are still there in the next step.
        missing = sorted((expert for expert in needed if expert not in self.slots), key=self._uses.__getitem__)
        first, at_once = self.num_slots - len(present), max(1, self.num_slots // 2)
        if present or first >= len(missing):
            yield [*present, *missing[:first]]
            missing = missing[first:]
        for begin in range(0, len(missing), at_once):
            yield missing[begin : begin + at_once]

    def place(self, wanted: Collection[int]) -> list[tuple[int, int]]:
        """Give every wanted expert a slot; returns (expert, slot) of those that have to be copied there."""
        assert len(wanted) <= self.num_slots
        kept, copies = set(wanted), []
        victims = sorted((each for each in self.slots if each not in kept), key=self._uses.__getitem__, reverse=True)
        for expert in wanted:
            if expert in self.slots:
                continue
            if self._free:
                slot = self._free.pop()
            else:
                slot = self.slots.pop(victims.pop())
                self.evicted += 1
            self.slots[expert] = slot
            self.fetched += 1
            copies.append((expert, slot))
        return copies
