"""The KV layout: the plain cases to the number, and models whose layers keep different things."""

from __future__ import annotations

import random
from math import ceil

import pytest

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVGroup, KVLayout, LayerKV, LayerState, build_layout
from tokenmill.hardware.memory import KVBudget, plan_kv

FULL, SLIDING = LayerKV("full", 2, 8), LayerKV("sliding", 2, 8, 6)
WIDE, NARROW = LayerKV("full", 8, 128), LayerKV("sliding", 4, 64, 512)
LATENT = LayerKV("latent", 1, 576, value_dim=0)
STATE = LayerKV("recurrent", states=((10, 20), (50,)))


@pytest.mark.parametrize(
    ("layers", "size", "groups"),
    [
        ([FULL] * 3, 3, [("full", (0, 1, 2))]),
        (
            [SLIDING, SLIDING, FULL, SLIDING],
            1,
            [("sliding", (0,)), ("sliding", (1,)), ("full", (2,)), ("sliding", (3,))],
        ),
        ([FULL, SLIDING] * 2 + [SLIDING], 2, [("full", (0, 2)), ("sliding", (1, 3)), ("sliding", (4,))]),
    ],
)
def test_layers_of_one_shape(layers: list[LayerKV], size: int, groups: list[tuple[str, tuple[int, ...]]]) -> None:
    """The smallest kind sets the size of a group; groups are in the order of their first layer."""
    layout = build_layout(layers, 16)
    windows = {"full": 0, "sliding": 6}
    expected = tuple(KVGroup(kind, windows[kind], numbers) for kind, numbers in groups)
    assert layout == KVLayout(16, size, 2, 8, expected)
    assert layout.values_per_page == 2 * size * 16 * 2 * 8
    assert not layout.features()


def test_pages_of_layers_with_different_shapes_are_equally_large() -> None:
    """6 wide layers of 2,048 numbers a token, 12 narrow ones of 512: four narrow layers lie where one wide one does."""
    layout = build_layout([WIDE] * 6 + [NARROW] * 12, 16)
    assert layout.padding == 0
    assert [len(group.layers) for group in layout.groups] == [3, 3, 12]
    assert layout.values_per_page == 16 * 3 * 2048
    assert (layout.place(4), layout.place(7)) == ((1, 1), (2, 1))
    assert layout.features() == ("layers of different KV shapes",)


def test_any_mix_of_shapes() -> None:
    """Every layer has its place, no page is overfull, and no other page size would leave less padding."""
    draw = random.Random(5)
    for _ in range(300):
        kinds = [LayerKV("full", draw.randint(1, 8), 16 * draw.randint(1, 8)) for _ in range(draw.randint(2, 4))]
        layers = [draw.choice(kinds) for _ in range(draw.randint(2, 40))]
        layout = build_layout(layers, 4)
        assert sorted(layer for group in layout.groups for layer in group.layers) == list(range(len(layers)))
        for number, layer in enumerate(layers):
            group, slot = layout.place(number)
            assert layout.groups[group].layers[slot] == number
            assert layout.groups[group].shape in (layer, None)
        assert all(0 < layout.filled(group) <= 1 for group in layout.groups)
        if not layout.row_values:
            continue
        counts = {kind: layers.count(kind) for kind in set(layers)}
        chosen = len(layout.groups) * layout.row_values
        for row in range(max(k.values_per_token for k in counts), 4 * layout.row_values, 16):
            other = row * sum(ceil(n / (row // k.values_per_token)) for k, n in counts.items())
            assert chosen <= other


def test_latent_rows_have_no_values_of_their_own() -> None:
    layout = build_layout([LATENT] * 3, 16)
    assert layout.values_per_page == 3 * 16 * 576
    assert [layout.group_pages(layout.groups[0], tokens) for tokens in (1, 16, 17)] == [1, 1, 2]
    assert layout.features() == ("latent rows",)


def test_states_are_beside_the_pages() -> None:
    layout = build_layout([STATE, FULL, STATE, FULL], 16)
    assert [group.layers for group in layout.groups] == [(1, 3)]
    assert layout.states == (LayerState(0, STATE.states), LayerState(2, STATE.states))
    assert layout.state_bytes == 2000
    both = build_layout([LayerKV("full", 2, 8, states=((16,),))] * 2, 16)  # attention beside a recurrence
    assert (both.groups[0].layers, both.state_bytes) == ((0, 1), 128)


def test_a_model_without_pages_still_has_sequences() -> None:
    layout = build_layout([STATE] * 4, 16)
    assert layout.values_per_page == 0
    assert [layout.peak_pages(tokens) for tokens in (1, 100, 10_000)] == [1, 2, 2]
    assert layout.state_bytes == 4000


def test_a_layer_that_reads_another_has_its_place() -> None:
    layout = build_layout([FULL, SLIDING, LayerKV("none", source=0), LayerKV("none", source=1)], 16)
    assert (layout.place(2), layout.place(3)) == (layout.place(0), layout.place(1))
    assert sum(len(group.layers) for group in layout.groups) == 2


def test_memory_for_states_comes_first() -> None:
    layout = build_layout([STATE, FULL], 16)
    pages = layout.peak_pages(64)
    budget = plan_kv(layout, 100, context=64, concurrency=3, memory=3 * 1000 + 2 * pages * 100, available=0)
    assert (budget.num_pages, budget.state_bytes) == (2 * pages, 3000)
    assert budget.nbytes == 3000 + 2 * pages * 100
    with pytest.raises(UserError, match="lower --context"):
        plan_kv(layout, 100, context=64, concurrency=3, memory=3000, available=0)
    free = plan_kv(build_layout([STATE], 16), 0, context=64, concurrency=3, memory=3000, available=0)
    assert free.nbytes == 3000
    assert free.num_pages == 3 * 4  # pages without a byte cost nothing: enough to name all prefixes
    with pytest.raises(UserError, match="lower --concurrency"):
        plan_kv(layout, 100, context=64, concurrency=30, memory=0, available=10_000)


def test_what_a_store_holds_beside_its_pages_is_taken_off() -> None:
    layout = build_layout([FULL], 16)
    pages = layout.peak_pages(64)

    def budget(memory: int, available: int = 0, **options: int) -> KVBudget:
        return plan_kv(layout, 100, 64, 3, memory, available, **options)

    stated = budget(2 * pages * 100 + 700, fixed_bytes=700)
    assert (stated.num_pages, stated.nbytes) == (2 * pages, 2 * pages * 100 + 700)
    assert budget(2 * pages * 100 + 699, fixed_bytes=700).num_pages == 2 * pages - 1
    shared = budget(0, 4 * 2 * pages * 100 + 700, fixed_bytes=700)  # a quarter of what is left then
    assert (shared.num_pages, shared.fixed_bytes) == (2 * pages, 700)
    with pytest.raises(UserError, match=r"needs 2\.0 MiB of KV cache, memory allows 1\.0 MiB"):
        budget(1 << 20, fixed_bytes=2 << 20)


def test_snapshots_of_states_are_bounded() -> None:
    layout = build_layout([STATE, FULL], 16)

    def budget(memory: int, caching: bool = True) -> KVBudget:
        return plan_kv(layout, 100, 64, 3, memory, available=0, prefix_caching=caching)

    assert budget(1 << 30).num_state_slots == 3 + 4 * 3
    assert budget(1 << 30, caching=False).num_state_slots == 3
    assert budget(3000 + 12_000).num_state_slots == 3 + 3  # a quarter of what the running sequences leave
    assert budget(3000 + 12_000).nbytes <= 15_000
    assert budget(3000 + 3000).num_state_slots == 3


def test_spare_states_leave_room_for_a_request() -> None:
    layout = build_layout([STATE, FULL], 16)
    pages = layout.peak_pages(64) * 100

    def budget(memory: int, **options: bool) -> KVBudget:
        return plan_kv(layout, 100, 64, 3, memory, available=0, queues_steps=True, **options)

    plenty = budget(1 << 30, prefix_caching=True)
    assert (plenty.num_state_slots, plenty.num_spare_states, plenty.state_bytes) == (3 + 4 * 3, 3, 18_000)
    assert budget(3000 + pages + 4000).num_spare_states == 2  # a half of what sequences and one request leave
    assert budget(3000 + pages).num_spare_states == 0
    assert plan_kv(build_layout([FULL], 16), 100, 64, 3, 1 << 30, 0, queues_steps=True).num_spare_states == 0
