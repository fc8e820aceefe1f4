"""Synthetic requests: lengths, prefixes, seeds."""

from __future__ import annotations

import pytest

from tokenmill.bench.prompts import longest_request, random_requests
from tokenmill.errors import UserError


def test_fixed_lengths_and_ids_in_the_vocabulary() -> None:
    requests = random_requests(50, 20, 30, 7)
    assert all(len(each.prompt_ids) == 30 and each.output_len == 7 for each in requests)
    assert {token_id for each in requests for token_id in each.prompt_ids} == set(range(50))


def test_lengths_spread_over_the_whole_range_and_no_further() -> None:
    requests = random_requests(9, 500, 10, 4, range_ratio=0.5)
    assert {len(each.prompt_ids) for each in requests} == set(range(5, 16))
    assert {each.output_len for each in requests} == set(range(2, 7))


def test_a_shared_prefix_comes_on_top_and_is_all_that_is_shared() -> None:
    first, second = random_requests(1000, 2, 16, 1, shared_prefix=8)
    assert len(first.prompt_ids) == 24
    assert first.prompt_ids[:8] == second.prompt_ids[:8]
    assert first.prompt_ids[8:] != second.prompt_ids[8:]


def test_the_seed_decides() -> None:
    assert random_requests(1000, 3, 16, 1, seed=1) == random_requests(1000, 3, 16, 1, seed=1)
    assert random_requests(1000, 3, 16, 1, seed=1) != random_requests(1000, 3, 16, 1, seed=2)


def test_the_longest_request_bounds_them_all() -> None:
    shape = {"input_len": 7, "output_len": 3, "range_ratio": 0.3, "shared_prefix": 5}
    requests = random_requests(10, 300, **shape)  # type: ignore[arg-type]
    assert max(len(each.prompt_ids) + each.output_len for each in requests) == longest_request(**shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [{"count": 0}, {"input_len": 0}, {"output_len": 0}, {"shared_prefix": -1}, {"range_ratio": 1.0}],
    ids=lambda each: next(iter(each)),
)
def test_impossible_shapes_are_refused(change: dict[str, int]) -> None:
    with pytest.raises(UserError, match="give"):
        random_requests(10, **{"count": 1, "input_len": 1, "output_len": 1, **change})
