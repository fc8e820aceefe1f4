"""The arithmetic of ranks: parts cover the whole once, heads stay with their KV head, stages are balanced."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import UserError
from tokenmill.hardware import sharding
from tokenmill.hardware.sharding import Grid, LayerTraffic

_PARTS = st.integers(1, 9)


@given(total=st.integers(0, 5000), parts=_PARTS, multiple=st.sampled_from([1, 8, 32, 64, 128, 256]))
def test_shares_tile_the_whole(total: int, parts: int, multiple: int) -> None:
    ranges = [sharding.share(total, parts, part, multiple) for part in range(parts)]
    assert list(itertools.chain(*ranges)) == list(range(total))
    assert all(cut.start % multiple == 0 for cut in ranges if len(cut))
    sizes = [-(-len(cut) // multiple) for cut in ranges]
    assert max(sizes) - min(sizes) <= 1


@given(kv=st.integers(1, 12), group=st.integers(1, 8), parts=_PARTS)
def test_every_query_head_lies_with_its_kv_head(kv: int, group: int, parts: int) -> None:
    heads = kv * group
    if sharding.heads_problem(heads, kv, parts):
        return
    shares = [sharding.heads_of(heads, kv, parts, part) for part in range(parts)]
    assert list(itertools.chain(*(share.queries for share in shares))) == list(range(heads))
    assert set(itertools.chain(*(share.kv for share in shares))) == set(range(kv))
    for share in shares:
        # Attention of a rank maps its own query heads to its own KV heads in the usual way.
        local = len(share.queries) // len(share.kv)
        for number, head in enumerate(share.queries):
            assert share.kv[number // local] == head // group


@pytest.mark.parametrize(
    ("heads", "kv", "widths", "legal"),
    [
        (9, 3, [1536], [1, 3]),  # smollm2: 9 would need copies of 3 KV heads, and 1536 does not divide by it
        (12, 2, [8960], [1, 2, 4]),
        (4, 1, [2048], [1, 2, 4]),
        (32, 8, [14336], [1, 2, 4, 8, 16]),
        (64, 8, [29568], [1, 2, 4, 8, 16]),
    ],
)
def test_legal_sizes(heads: int, kv: int, widths: list[int], legal: list[int]) -> None:
    assert sharding.legal_sizes(heads, kv, widths) == legal


@given(costs=st.lists(st.floats(0.1, 10), min_size=1, max_size=12), pp=st.integers(1, 4), edges=st.floats(0, 20))
def test_stages_cover_the_layers_and_no_other_cut_is_better(costs: list[float], pp: int, edges: float) -> None:
    if pp > len(costs):
        with pytest.raises(UserError, match="stages"):
            sharding.stages(costs, pp)
        return

    def dearest(ends: tuple[int, ...]) -> float:
        bounds = (0, *ends, len(costs))
        return max(sum(costs[a:b]) + (edges if a == 0 else 0) for a, b in itertools.pairwise(bounds))

    found = sharding.stages(costs, pp, edges)
    assert list(itertools.chain(*found)) == list(range(len(costs)))
    assert all(found)
    least = min(dearest(ends) for ends in itertools.combinations(range(1, len(costs)), pp - 1))
    assert dearest(tuple(stage.stop for stage in found[:-1])) == pytest.approx(least)


def test_ranks_of_a_grid() -> None:
    grid = Grid(2, 3)
    places = [grid.place(rank) for rank in range(6)]
    assert [place.stage for place in places] == [0, 0, 1, 1, 2, 2]
    assert [place.part for place in places] == [0, 1, 0, 1, 0, 1]
    assert places[3].team == (2, 3)
    assert [place.next_stage for place in places] == [2, 3, 4, 5, 0, 1]
    assert all(grid.place(place.next_stage).previous_stage == place.rank for place in places)
    with pytest.raises(UserError, match="ranks"):
        Grid(0, 1)


def test_traffic_of_llama_8b_as_in_the_study() -> None:
    layers = [LayerTraffic(4096, 4096, 14336)] * 32
    summed = sharding.step_traffic(layers, Grid(2), tokens=64, logit_rows=0, vocabulary=1, exact=False, item=2)
    assert summed.calls == 65
    assert summed.nbytes == 2 * 32 * 64 * 4096 * 2
    gathered = sharding.step_traffic(layers, Grid(2), tokens=64, logit_rows=0, vocabulary=1, exact=True, item=2)
    assert gathered.calls == 129
    assert gathered.nbytes / (64 * 32 * 2 * 4096 * 2) == pytest.approx(1.63, abs=0.01)
