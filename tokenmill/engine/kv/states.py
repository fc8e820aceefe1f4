"""State slots of models with recurrent layers: one for each running sequence, the others for snapshots.

A state cannot be cut at a token, so the prefix cache keeps snapshots of it: copies of a sequence's slot, made where a
row ends at a page end, and owned by the node of the prefix tree at that page. A request that finds one begins with a
copy of it; nobody ever writes into a snapshot. Any snapshot can be dropped at any moment, so their number is what is
left of the slots, and a running sequence always gets one. Copies are listed in the order in which they are decided and
made in that order before the next step: a slot may be dropped and given away while a copy from it is still pending.
The KV manager owns it; knows no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

NO_STATE = -1


class SnapshotOwner(Protocol):
    snapshot: int  # slot of the snapshot, or NO_STATE


class StateSlots:
    def __init__(self, num_slots: int, is_promised: Callable[[SnapshotOwner], bool] = lambda _: False) -> None:
        """`is_promised`: snapshots of these owners are dropped last."""
        self.num_slots = num_slots
        self.num_snapshots_dropped = 0
        self._is_promised = is_promised
        self._free = list(range(num_slots - 1, -1, -1))
        self._running: set[int] = set()
        self._owners: OrderedDict[int, SnapshotOwner] = OrderedDict()  # by slot, the least recently used first
        self._unread: set[int] = set()  # snapshots that no request has begun with
        self._copies: list[tuple[int, int]] = []

    @property
    def num_snapshots(self) -> int:
        return len(self._owners)

    def allocate(self, source: int = NO_STATE) -> int:
        """A slot for a sequence that begins to run, with a copy of the snapshot `source` if there is one."""
        if source != NO_STATE:
            self._owners.move_to_end(source)
            self._unread.discard(source)
        slot = self._take()
        assert slot is not None, "more sequences run than there are state slots"
        self._running.add(slot)
        if source not in (NO_STATE, slot):  # where the snapshot itself had to make room, it is there already
            self._copies.append((source, slot))
        return slot

    def release(self, slot: int) -> None:
        """The sequence no longer runs."""
        self._running.remove(slot)
        self._free.append(slot)

    def take_snapshot(self, slot: int, owner: SnapshotOwner) -> None:
        """Keep a copy of a running sequence's state, if there is a slot to be had."""
        assert owner.snapshot == NO_STATE
        copy = self._take()
        if copy is not None:
            self._copies.append((slot, copy))
            self._owners[copy] = owner
            self._unread.add(copy)
            owner.snapshot = copy

    def drop(self, owner: SnapshotOwner) -> None:
        """Forget the snapshot of an owner, if it has one."""
        if owner.snapshot != NO_STATE:
            self._owners.pop(owner.snapshot)
            self._unread.discard(owner.snapshot)
            self._free.append(owner.snapshot)
            owner.snapshot = NO_STATE

    def drop_unread(self, owner: SnapshotOwner) -> None:
        """The same, unless a request has begun with it."""
        if owner.snapshot in self._unread:
            self.drop(owner)

    def take_copies(self) -> list[tuple[int, int]]:
        """(source, destination) slots to copy before the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def check(self, running: list[int], owners: list[SnapshotOwner]) -> None:
        """Raise AssertionError unless every slot is free, a running sequence's, or the snapshot of one owner."""
        assert sorted(running) == sorted(self._running), "slots of running sequences differ from holdings"
        assert {owner.snapshot for owner in owners} == self._owners.keys(), "snapshots differ from their owners"
        assert len(owners) == len(self._owners), "two owners of one snapshot"
        assert all(self._owners[owner.snapshot] is owner for owner in owners), "a snapshot has another owner"
        assert self._unread <= self._owners.keys()
        slots = [*self._free, *self._running, *self._owners]
        assert sorted(slots) == list(range(self.num_slots)), "state slots are lost or have two uses"

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._owners:
            return None
        oldest = next(iter(self._owners.values()))
        victim = next((owner for owner in self._owners.values() if not self._is_promised(owner)), oldest)
        slot = victim.snapshot
        self.drop(victim)
        self.num_snapshots_dropped += 1
        self._free.remove(slot)
        return slot
