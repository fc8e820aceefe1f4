"""State slots and snapshots of recurrent layers: who makes room, what a copy is worth, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.unit.engine.building import compute, make_request
from tokenmill.engine.kv.budget.enforcer import BudgetEnforcer
from tokenmill.engine.kv.manager import KVManager
from tokenmill.engine.kv.policy.lru import LeastRecentlyUsed
from tokenmill.engine.kv.states import NO_STATE, StateSlots
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.types import CacheControl, SamplingParams

HYBRID = [LayerKV("recurrent", states=((4,),)), LayerKV("full", 1, 8)]


@dataclass(eq=False)
class Owner:
    snapshot: int = NO_STATE
    promised: bool = False


def _kv(num_state_slots: int = 8) -> KVManager:
    return KVManager(build_layout(HYBRID, 4), 64, True, LeastRecentlyUsed(), num_state_slots=num_state_slots)


def test_the_oldest_unpromised_snapshot_makes_room() -> None:
    slots = StateSlots(4, lambda owner: isinstance(owner, Owner) and owner.promised)
    running, owners = slots.allocate(), [Owner(promised=True), Owner(), Owner()]
    for owner in owners:
        slots.take_snapshot(running, owner)
    slots.allocate(owners[1].snapshot)  # used: now the youngest, so that the third makes room
    assert [owner.snapshot != NO_STATE for owner in owners] == [True, True, False]


def test_a_snapshot_that_makes_room_for_its_own_reader_needs_no_copy() -> None:
    slots, owner = StateSlots(2), Owner()
    slots.take_snapshot(slots.allocate(), owner)
    slot = owner.snapshot
    slots.take_copies()
    assert slots.allocate(slot) == slot
    assert slots.take_copies() == []
    assert owner.snapshot == NO_STATE


def test_no_snapshot_takes_the_slot_of_a_running_sequence() -> None:
    slots, owner = StateSlots(1), Owner()
    slots.take_snapshot(slots.allocate(), owner)
    assert owner.snapshot == NO_STATE
    with pytest.raises(AssertionError, match="more sequences run"):
        slots.allocate()


def test_only_snapshots_that_were_read_outlive_the_next_one() -> None:
    slots = StateSlots(5)
    running, read, unread = slots.allocate(), Owner(), Owner()
    for owner in (read, unread):
        slots.take_snapshot(running, owner)
    slots.release(slots.allocate(read.snapshot))
    for owner in (read, unread):
        slots.drop_unread(owner)
    assert (read.snapshot != NO_STATE, unread.snapshot) == (True, NO_STATE)


def test_a_hit_goes_as_far_as_the_last_snapshot() -> None:
    kv = _kv()
    first = make_request(list(range(10)), "first")
    compute(kv, first, 8)  # rows end at the last page end before the last token
    compute(kv, first)
    kv.release(first)
    assert kv.match(make_request(list(range(10)), "same")).num_tokens == 8
    other = make_request([*range(6), 90, 91, 92], "other")  # parts from it after one page: no snapshot there
    match = kv.match(other)
    assert (match.num_tokens, match.branch) == (0, 4)
    reservation = kv.reserve(other, 9, match)
    assert reservation.num_tokens == 4  # its row ends there, so that there is one for the next


def test_an_evicted_page_takes_its_snapshot_along() -> None:
    kv = _kv()
    request = make_request(list(range(9)), "r")
    compute(kv, request, 8)
    kv.release(request)
    kv.clear()
    kv.check()
    assert kv.match(make_request(list(range(9)), "again")).num_tokens == 0


def test_a_budget_is_refused() -> None:
    budgets = BudgetEnforcer(build_layout(HYBRID, 4))
    with pytest.raises(UserError, match="recurrent layers"):
        budgets.check(SamplingParams(cache=CacheControl(policy="streaming_llm", budget=64)))
