"""KVQuant pages: keys are rounded before rotary positions, the same in any steps, and pages know their places."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from tokenmill.checkpoint.description import RopeScaling
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.kernels import ref
from tokenmill.model.kvstore.choice import choose_store
from tokenmill.model.kvstore.component_codes import measured_rows, rotated_rows
from tokenmill.model.kvstore.edges import EdgeStore
from tokenmill.model.kvstore.head_sample import HeadSample
from tokenmill.model.kvstore.kvquant import KVQuant3Store
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_table
from tokenmill.types import Batch

CPU = torch.device("cpu")
HEADS, DIM, SIZE = 2, 64, 8
LAYOUT = build_layout([LayerKV("full", HEADS, DIM)] * 2, SIZE)
TABLE = [7, 2, 9, 4, 0, 5, 8, 1]  # pages of the sequence, in order
ROTARY = build_rotary_table(DIM, 64, 10_000.0, RopeScaling("default"), interleaved=False)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def keys_like(count: int, seed: int) -> Tensor:
    """[count, HEADS, DIM] before rotary positions: a large mean, and a few directions with most of what differs."""
    directions = normal(DIM, DIM, seed=1) * torch.exp(-torch.arange(DIM) / 8)[:, None]
    return normal(count, HEADS, DIM, seed=seed) @ directions + 3 * normal(HEADS, DIM, seed=2)


def sample(rotary: RotaryTable | None = ROTARY, seed: int = 3) -> HeadSample:
    keys, firsts = keys_like(600, seed), 10 * normal(HEADS, DIM, seed=4) + 0.1 * normal(40, HEADS, DIM, seed=5)
    moment = torch.eye(DIM, dtype=torch.float64).expand(HEADS, -1, -1)
    return HeadSample(keys, torch.zeros(HEADS, DIM), firsts, firsts, False, moment, rotary)


def make(seed: int = 3, rotary: RotaryTable | None = ROTARY) -> KVQuant3Store:
    store = KVQuant3Store(LAYOUT, 10, CPU)
    for slot in range(2):
        store.calibrate(0, slot, sample(rotary, seed))
    return store


def step(begin: int, end: int, table: list[int] = TABLE) -> Batch:
    slots = torch.tensor([table[position // SIZE] * SIZE + position % SIZE for position in range(begin, end)])
    return Batch(
        token_ids=torch.zeros(end - begin, dtype=torch.int64),
        positions=torch.arange(begin, end),
        query_starts=torch.tensor([0, end - begin], dtype=torch.int32),
        seq_lens=torch.tensor([end], dtype=torch.int32),
        slots=(slots,),
        block_tables=(torch.tensor([table], dtype=torch.int32),),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        max_query=end - begin,
        max_seq=end,
    )


def heads_of(count: int) -> tuple[Tensor, Tensor]:
    """Keys after rotary positions and values of a sequence, whose first token is a sink: [count, HEADS * DIM]."""
    keys, values = keys_like(count, 7), normal(count, HEADS, DIM, seed=8)
    keys[0] = values[0] = 10 * normal(HEADS, DIM, seed=4)
    positions = torch.arange(count)
    return ref.rope(keys.flatten(1), positions, ROTARY.cos, ROTARY.sin, DIM, False), values.flatten(1)


def write(store: KVQuant3Store, cuts: list[int]) -> None:
    k, v = heads_of(cuts[-1])
    for begin, end in pairwise(cuts):
        batch = step(begin, end)
        store.prepare(batch)
        for slot in range(2):
            store.write(slot, batch.slots[0], k[begin:end], v[begin:end])


def stored(store: KVQuant3Store, count: int) -> list[Tensor]:
    return [each.transpose(1, 2).flatten(0, 1)[:count].flatten(1) for each in store.read(1, torch.tensor(TABLE))]


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


def test_keys_are_read_rotated_to_their_positions() -> None:
    store = make()
    write(store, [0, 60])
    k, v = heads_of(60)
    assert error(stored(store, 60)[0], k) < 0.05
    assert error(stored(store, 60)[1][1:], v[1:]) < 0.25
    for side, expected in zip(stored(store, 60), (k, v), strict=True):
        assert error(side[0], expected[0]) < 0.01, "the first token has codes of its own"
    plain = KVQuant3Store(LAYOUT, 10, CPU)  # without statistics: as after no rotation, and with more loss
    write(plain, [0, 60])
    assert 0.1 < error(stored(plain, 60)[0], k) < 0.25


def test_codes_do_not_depend_on_how_tokens_fall_into_steps() -> None:
    whole, parts = make(), make()
    write(whole, [0, 60])
    write(parts, [0, 1, 2, 13, 16, 40, 41, 60])
    for mine, theirs in zip(whole.page_tensors(), parts.page_tensors(), strict=True):
        full = TABLE[:7]
        assert torch.equal(mine[:, full], theirs[:, full])


def test_a_page_takes_its_place_with_it() -> None:
    store, other = make(), make()
    write(store, [0, 60])
    other.import_pages([3, 6], store.export_pages([TABLE[0], TABLE[5]]).wait())
    store.copy_pages([(TABLE[5], 3)])
    for side in range(2):
        expected = store.read(1, torch.tensor([TABLE[0], TABLE[5], 3]))[side]
        assert torch.equal(other.read(1, torch.tensor([3, 6]))[side], expected[:2])
        assert torch.equal(expected[1], expected[2])


def test_meaning_covers_the_calibration() -> None:
    assert make().meaning() == make().meaning()
    assert len({make().meaning(), make(seed=9).meaning(), KVQuant3Store(LAYOUT, 1, CPU).meaning()}) == 3


def test_layers_that_share_a_slot_have_codes_of_their_own() -> None:
    layout = build_layout([LayerKV("sliding", HEADS, DIM, 16), LayerKV("full", HEADS, DIM)], SIZE)
    store = KVQuant3Store(layout, 10, CPU)
    store.calibrate(0, 0, sample(None))
    far = sample(None, seed=11)
    moved = replace(far, keys=far.keys + 50)
    store.calibrate(1, 0, moved)
    batch = step(SIZE, 2 * SIZE)
    slots = (batch.slots[0], batch.slots[0] + SIZE)
    store.prepare(Batch(**{name: getattr(batch, name) for name in batch.__slots__} | {"slots": slots}))
    k, v = keys_like(SIZE, 12), normal(SIZE, HEADS * DIM, seed=13)
    for group, shift in ((0, 0), (1, 50)):
        store.write(0, slots[group], (k + shift).flatten(1), v)
        page = torch.tensor([TABLE[1] + group])
        read = store.read(0, page)[0][0].transpose(0, 1)
        assert error(read - shift, k) < 0.05
    both = store.read(0, torch.tensor([TABLE[1], TABLE[1] + 1]))[0]  # as where a table is padded with the other's page
    for group in (0, 1):
        assert torch.equal(both[group], store.read(0, torch.tensor([TABLE[1] + group]))[0][0])


@pytest.mark.parametrize("scaled", [1.0, 1.3])
def test_a_rotation_that_scales_is_undone(scaled: float) -> None:
    table = RotaryTable(ROTARY.cos * scaled, ROTARY.sin * scaled, interleaved=True)
    store = make(rotary=table)
    keys, batch = keys_like(30, 7), step(0, 30)
    k = ref.rope(keys.flatten(1), batch.positions, table.cos, table.sin, DIM, True)
    store.prepare(batch)
    store.write(1, batch.slots[0], k, k)
    assert error(stored(store, 30)[0][1:], k[1:]) < 0.05


def test_measured_rows_put_errors_where_queries_do_not_look() -> None:
    queries = normal(500, HEADS, 6, seed=14) @ normal(6, DIM, seed=15) + 0.1 * normal(500, HEADS, DIM, seed=16)
    moment = torch.einsum("nhi,nhj->hij", queries.double(), queries.double()) / 500
    known, keys = keys_like(600, 17), keys_like(200, 18)
    center = known.mean(0)

    def score_error(rows: object) -> float:
        heads = rows.decode(rows.encode(keys)[:, :, None])[:, :, 0] - keys  # type: ignore[attr-defined]
        scores = torch.einsum("nhd,mhd->hnm", queries, heads)
        return float((scores - scores.mean(-1, keepdim=True)).square().mean())

    unit = torch.eye(DIM, dtype=torch.float64)
    measured = measured_rows(known, center, moment + 0.02 * unit, 25)
    plain = measured_rows(known, center, unit.expand(HEADS, -1, -1), 25)
    assert score_error(measured) < 0.5 * score_error(plain) < 0.25 * score_error(rotated_rows(center, 25))
    assert int(measured.bits.sum(-1).max()) == 24 * 8


def test_rows_that_are_not_finite_or_zero() -> None:
    rows = rotated_rows(torch.zeros(HEADS, DIM), 25)
    heads = torch.ones(4, HEADS, DIM)
    heads[0], heads[1, 0, 3], heads[2, 0, 3] = 0.0, torch.nan, torch.inf
    read = rows.decode(rows.encode(heads)[:, :, None])[:, :, 0]
    assert torch.equal(read[0], heads[0])
    assert bool(read[1:3, 0].isnan().all())
    assert bool(read[1:3, 1].isfinite().all())


def test_a_layer_whose_keys_are_all_zero_has_codes() -> None:
    """One that was pruned as a whole."""
    metric = torch.eye(DIM, dtype=torch.float64).expand(HEADS, -1, -1)
    rows = measured_rows(torch.zeros(100, HEADS, DIM), torch.zeros(HEADS, DIM), metric, 25)
    heads = torch.zeros(4, HEADS, DIM)
    assert torch.equal(rows.decode(rows.encode(heads)[:, :, None])[:, :, 0], heads)


def test_edge_layers_stay_native_and_the_others_are_calibrated() -> None:
    layers = [LayerKV("full", HEADS, DIM)] * 4
    layout = build_layout(layers, SIZE)
    store = choose_store("kvquant3", 1, layers, CPU).build(layout, 10, CPU, "", 1)
    assert isinstance(store, EdgeStore)
    assert store.calibrates
    before = store.meaning()
    for slot in range(4):
        store.calibrate(0, slot, sample())
    assert store.meaning() != before


def test_memory_beside_the_pages_is_what_was_promised() -> None:
    """Of a store that begins texts with a token of their own, too: of the sample nothing may be kept."""
    layers = [LayerKV("sliding", HEADS, DIM, 16)] * 3 + [LayerKV("full", HEADS, DIM)] * 2  # a slot stays empty
    layout = build_layout(layers, SIZE)
    store = KVQuant3Store(layout, 10, CPU)
    pages = 10 * store.page_bytes(layout)
    assert store.nbytes == pages
    for layer in range(5):
        store.calibrate(*layout.place(layer), replace(sample(seed=layer), begins=True))
    promised = store.fixed_bytes(layout, 1)
    assert 0.95 * promised < store.nbytes - pages <= promised
    assert promised > 5 * HEADS * 4 * DIM * DIM * 4  # two matrices of keys, two of first keys
    write(store, [0, 60])
    stored(store, 60)
    assert store.nbytes - pages <= promised


def test_native_layers_hold_nothing_beside_the_pages() -> None:
    layers = [LayerKV("full", HEADS, DIM)] * 4
    layout = build_layout(layers, SIZE)
    of = {edges: choose_store("kvquant3", edges, layers, CPU) for edges in (0, 1)}
    fixed = {edges: choice.fixed_bytes(layout, 1) for edges, choice in of.items()}
    one = (fixed[0] - fixed[1]) / 2
    assert one > HEADS * 4 * DIM * DIM * 4
    store = of[1].build(layout, 10, CPU, "", 1)
    for slot in range(4):
        store.calibrate(0, slot, sample())
    assert 0.9 * fixed[1] < store.nbytes - 10 * of[1].page_bytes(layout) <= fixed[1]


def test_latent_rows_are_declined() -> None:
    with pytest.raises(UserError, match="latent rows"):
        choose_store("kvquant3", None, [LayerKV("latent", 1, 40, value_dim=0)] * 2, CPU)
