"""Which experts stay in the GPU's slots."""

from __future__ import annotations

import random

import pytest

from tokenmill.kernels.triton.experts.residency import Residency


def test_the_least_used_makes_room() -> None:
    table = Residency(6, 3)
    table.count({0: 5, 1: 1, 2: 3})
    assert table.place([0, 1, 2]) == [(0, 0), (1, 1), (2, 2)]
    table.count({3: 2})
    assert table.place([3]) == [(3, 1)]
    assert table.slots == {0: 0, 2: 2, 3: 1}
    assert (table.hits, table.fetched, table.evicted) == (0, 4, 1)


def test_old_uses_are_forgotten() -> None:
    table = Residency(4, 2)
    table.count({0: 100, 1: 1})
    table.place([0, 1])
    for _ in range(300):
        table.count({1: 1})
    assert table.hits == 300
    table.place([2])
    assert set(table.slots) == {1, 2}


def test_wanted_experts_do_not_evict_each_other() -> None:
    table = Residency(6, 3)
    table.count({0: 1, 1: 9, 2: 9})
    table.place([0, 1, 2])
    table.place([0, 3, 4])
    assert set(table.slots) == {0, 3, 4}


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 16])
def test_rounds_cover_what_is_needed_once_and_fit(slots: int) -> None:
    draw, table = random.Random(slots), Residency(16, slots)
    for _ in range(200):
        needed = draw.sample(range(16), draw.randint(1, 16))
        table.count(dict.fromkeys(needed, 1))
        present, seen = set(table.slots) & set(needed), []
        for number, experts in enumerate(table.rounds(needed)):
            assert present <= set(experts) or number > 0
            copies = table.place(experts)
            assert all(table.slots[expert] == slot for expert, slot in copies)
            assert set(experts) <= set(table.slots)
            seen += experts
        assert sorted(seen) == sorted(needed)
        assert sorted(table.slots.values()) == sorted(set(table.slots.values()))
        assert table.fetched == table.evicted + len(table.slots)


def test_the_most_used_survive_a_step_that_needs_all() -> None:
    table = Residency(16, 4)
    table.count({0: 1000, 1: 1000})
    table.place([0, 1])
    table.count(dict.fromkeys(range(16), 1))
    for experts in table.rounds(range(16)):
        table.place(experts)
    assert {0, 1} <= set(table.slots)
