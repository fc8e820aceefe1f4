"""Recurrent states of decode steps: a step reads the present states and writes the next ones to spare places.

If a queued step is what the scheduler plans next, its places become those of the sequences and the old ones are spare;
if it is dropped, nothing has happened. At most one step is queued. A step that is planned moves its states at once, so
that no kernel writes a state that another program still reads; where there are too few spare places, states change in
place and nothing is queued. Used by the graph executor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenmill.model.state.store import StateStore

Places = tuple[list[int], list[int]]  # by row: where the state is read, where it is written


class QueuedStates:
    def __init__(self, states: StateStore) -> None:
        self._states = states
        self._pending: dict[int, int] = {}  # by slot: where the queued step writes its state

    @property
    def num_spares(self) -> int:
        """Rows of a step that moves its states, at most."""
        return len(self._states.spares) + len(self._pending)

    def advance(self, slots: Sequence[int]) -> Places:
        """Of a step that was planned."""
        present = [self._states.places[slot] for slot in slots]
        if len(slots) > self.num_spares:
            return present, present
        places = self.queue(slots)
        assert places is not None
        self.settle(set(slots))
        return places

    def queue(self, slots: Sequence[int]) -> Places | None:
        """Of a step that may be dropped; None if there are too few spare places."""
        assert not self._pending
        if len(slots) > len(self._states.spares):
            return None
        self._pending = {slot: self._states.spares.pop() for slot in slots}
        return [self._states.places[slot] for slot in slots], list(self._pending.values())

    def is_queued(self, slot: int) -> bool:
        return slot in self._pending

    def settle(self, kept: Collection[int] = ()) -> None:
        """Keep what the queued step, if there is one, wrote for these slots; forget the rest."""
        places, spares = self._states.places, self._states.spares
        for slot, spare in self._pending.items():
            if slot in kept:
                places[slot], spare = spare, places[slot]
            spares.append(spare)
        self._pending = {}
