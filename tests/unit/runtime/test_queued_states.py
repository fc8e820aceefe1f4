"""State slots and the spare places of queued steps: what is kept is what a step wrote, what is dropped never was."""

from __future__ import annotations

import pytest
import torch

from tokenmill.hardware.kv_layout import KVLayout, LayerState
from tokenmill.model.state.store import StateStore
from tokenmill.runtime.executors.cuda.queued_states import QueuedStates

_LAYOUT = KVLayout(16, 1, 0, 0, (), states=(LayerState(1, ((3, 5), (2, 7))), LayerState(4, ((3, 5), (2, 7)))))


def _store(num_slots: int = 4, num_spares: int = 0, joined: bool = False) -> StateStore:
    store = StateStore(_LAYOUT, num_slots, torch.device("cpu"), num_spares, joined)
    for slot in range(num_slots):
        _write(store, store.places[slot], float(slot + 1))
    return store


def _write(store: StateStore, place: int, value: float) -> None:
    for layer in (1, 4):
        for number in (0, 1):
            store.array(layer, number)[place] = value


def _values(store: StateStore, slot: int) -> set[float]:
    place = store.places[slot]
    return {
        value for layer in (1, 4) for number in (0, 1) for value in store.array(layer, number)[place].unique().tolist()
    }


@pytest.mark.parametrize("joined", [False, True])
def test_slots_are_cleared_and_copied_whole_and_in_order(joined: bool) -> None:
    store = _store(joined=joined)
    assert store.array(4, 1).shape == (4, 2, 7)
    store.clear([2])
    store.copy([(0, 3), (3, 1)])
    assert [_values(store, slot) for slot in range(4)] == [{1.0}, {1.0}, {0.0}, {1.0}]


@pytest.mark.parametrize("joined", [False, True])
def test_a_queued_step_that_is_used_moves_the_states(joined: bool) -> None:
    store = _store(num_spares=2, joined=joined)
    queued = QueuedStates(store)
    places = queued.queue([3, 1])
    assert places is not None
    assert queued.is_queued(1)
    assert not queued.is_queued(0)
    sources, targets = places
    assert sources == [3, 1]
    assert sorted(targets) == [4, 5]
    for target in targets:
        _write(store, target, 9.0)
    store.copy([(3, 0)])  # a snapshot of what was before the queued step
    queued.settle({3})
    assert [_values(store, slot) for slot in range(4)] == [{4.0}, {2.0}, {3.0}, {9.0}]
    assert sorted(store.spares) == sorted([3, targets[1]])


def test_a_planned_step_moves_its_states_where_it_can() -> None:
    store = _store(num_spares=2)
    queued = QueuedStates(store)
    assert queued.num_spares == 2
    sources, targets = queued.advance([3, 1])
    assert sources == [3, 1]
    assert [store.places[3], store.places[1]] == targets
    assert set(targets) == {4, 5}
    assert sorted(store.spares) == [1, 3]
    assert queued.advance([0, 1, 2]) == ([0, store.places[1], 2],) * 2, "three sequences, two spare places"
    assert queued.num_spares == 2


def test_a_dropped_step_leaves_nothing_behind() -> None:
    store = _store(num_spares=1)
    queued = QueuedStates(store)
    for _ in range(3):
        places = queued.queue([2])
        assert places is not None
        _write(store, places[1][0], 9.0)
        queued.settle()
    assert _values(store, 2) == {3.0}
    assert queued.queue([0, 1]) is None, "two sequences, one spare place"
    assert store.spares == [4]
