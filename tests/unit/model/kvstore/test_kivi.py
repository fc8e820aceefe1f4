"""KIVI's recent window: the last tokens are exact in half precision, older ones rounded, in any way of computing."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore.kivi import RECENT, Kivi2Store
from tokenmill.types import Batch

CPU = torch.device("cpu")
LAYOUT = build_layout([LayerKV("full", 2, 64)] * 2, 32)
WIDTH = 128
TABLE = [7, 2, 9, 4, 0, 5, 8, 1, 3, 6]  # pages of the sequence, in order


def values(begin: int, end: int) -> Tensor:
    """Keys (or values) of these positions: the same however they are computed."""
    return torch.stack(
        [torch.randn(WIDTH, generator=torch.Generator().manual_seed(position)) for position in range(begin, end)]
    )


def compute(store: Kivi2Store, begin: int, end: int, table: list[int] = TABLE) -> None:
    size = LAYOUT.page_size
    slots = torch.tensor([table[position // size] * size + position % size for position in range(begin, end)])
    batch = Batch(
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
    store.prepare(batch)
    for slot in range(LAYOUT.layers_per_page):
        store.write(slot, slots, values(begin, end), 2 * values(begin, end))


def stored(store: Kivi2Store, length: int, table: list[int] = TABLE) -> tuple[Tensor, Tensor]:
    k, v = store.read(1, torch.tensor(table))
    flat = [each.transpose(1, 2).reshape(-1, WIDTH)[:length] for each in (k, v)]
    return flat[0], flat[1]


def exact_tokens(store: Kivi2Store, length: int) -> Tensor:
    k, _ = stored(store, length)
    return (k - values(0, length)).abs().amax(-1) < 2e-3


def test_recent_tokens_are_exact_and_older_ones_rounded() -> None:
    store = Kivi2Store(LAYOUT, 10, CPU, sequences=1)
    compute(store, 0, 300)
    for length in range(300, 312):
        exact = exact_tokens(store, length)
        assert bool(exact[length - RECENT :].all())
        assert int(exact.sum()) <= RECENT + 2 * 32
        k, v = stored(store, length)
        expected = values(0, length)
        assert float((k - expected).norm() / expected.norm()) < 0.4
        assert float((v - 2 * expected).norm() / (2 * expected).norm()) < 0.4
        compute(store, length, length + 1)


def test_chunks_and_single_tokens_end_in_the_same_codes() -> None:
    whole, parts = (Kivi2Store(LAYOUT, 10, CPU, sequences=1) for _ in range(2))
    compute(whole, 0, 320)
    for begin, end in ((0, 5), (5, 37), (37, 200), *((at, at + 1) for at in range(200, 320))):
        compute(parts, begin, end)
    settled = 320 - RECENT - 32
    for a, b in zip(stored(whole, 320), stored(parts, 320), strict=True):
        assert torch.equal(a[settled + 32 :], b[settled + 32 :])
        assert torch.equal(a[:settled], b[:settled])


def test_places_that_run_out_round_the_oldest_page() -> None:
    store = Kivi2Store(LAYOUT, 10, CPU, sequences=1)
    other = [3, 6, 8, 1]
    compute(store, 0, 120, TABLE[:4])
    compute(store, 0, 100, other)
    k, _ = stored(store, 100, other)
    assert float((k - values(0, 100)).abs().max()) < 2e-3  # the newcomer is whole
    k, _ = stored(store, 120)
    expected = values(0, 120)
    assert 0 < float((k - expected).norm() / expected.norm()) < 0.4  # the other lost a page or two to it
    compute(store, 120, 121, TABLE[:4])  # and goes on from its codes
    assert bool(exact_tokens(store, 121)[120])


def test_a_partial_page_is_rounded_by_its_own_rows() -> None:
    store = Kivi2Store(LAYOUT, 10, CPU, sequences=1)
    compute(store, 0, 40)
    store._recent[0][:, store._buffer_of[TABLE[1]], :, 8:] = 1000.0  # what lies behind the last token must not matter
    store.export_pages([TABLE[1]])
    k, _ = stored(store, 40)
    assert float((k[32:] - values(32, 40)).norm() / values(32, 40).norm()) < 0.4


def test_a_copy_is_a_copy() -> None:
    store = Kivi2Store(LAYOUT, 10, CPU, sequences=2)
    compute(store, 0, 40)
    store.copy_pages([(TABLE[1], 6)])
    before = stored(store, 40, [TABLE[0], 6])[0].clone()
    compute(store, 40, 50)
    assert torch.equal(stored(store, 40, [TABLE[0], 6])[0], before)
    assert bool(exact_tokens(store, 50).all())
