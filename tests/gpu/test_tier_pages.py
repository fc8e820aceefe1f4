"""Pages that leave a GPU in batches through pinned memory are the bytes that leave it one by one, in every KV dtype."""

from __future__ import annotations

import threading

import pytest
import torch

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.kvstore import KV_STORES, transfer
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.choice import choose_store

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

_LAYERS = [LayerKV("full", 2, 16)] * 4
_NUM_PAGES = 12


def filled(store: KVStore, seed: int) -> None:
    """Random bytes in every page tensor."""
    random = torch.Generator(store.device).manual_seed(seed)
    for tensor in store.page_tensors():
        octets = tensor.view(torch.uint8)
        octets.copy_(torch.randint(256, octets.shape, generator=random, device=store.device, dtype=torch.uint8))


def make(name: str, edge_layers: int = 0) -> KVStore:
    device = torch.device("cuda")
    size = max(16, KV_STORES.get(name).page_multiple)
    if edge_layers:
        return choose_store(name, edge_layers, _LAYERS, device).build(
            build_layout(_LAYERS, size), _NUM_PAGES, device, "", 1
        )
    return KV_STORES.get(name)(build_layout(_LAYERS, size), _NUM_PAGES, device)


@pytest.mark.parametrize(
    ("name", "edge_layers"), [*((name, 0) for name in KV_STORES), ("turboquant2", 1)], ids=lambda value: str(value)
)
def test_a_batch_is_the_same_bytes_as_page_by_page(
    name: str, edge_layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(name, edge_layers), make(name, edge_layers)
    monkeypatch.setattr(transfer, "_STAGING_BYTES", 3 * source.stored_page_bytes)  # several batches
    filled(source, 1)
    filled(target, 2)
    pages = [7, 0, 11, 3, 4, 9, 1]
    expected = [bytes(transfer.copy_out(source.page_tensors(), page)) for page in pages]
    export = source.export_pages(pages)
    filled(source, 3)  # the pages are overwritten at once: the copies must not notice
    found = export.wait()
    assert [bytes(page) for page in found] == expected
    elsewhere = [2, 5, 6, 8, 10, 0, 1]
    kept = [bytes(transfer.copy_out(target.page_tensors(), page)) for page in (3, 4, 7, 9, 11)]
    target.import_pages(elsewhere, found)
    assert [bytes(transfer.copy_out(target.page_tensors(), page)) for page in elsewhere] == expected
    assert [bytes(transfer.copy_out(target.page_tensors(), page)) for page in (3, 4, 7, 9, 11)] == kept


def test_another_thread_waits_for_the_copy() -> None:
    store = make("bfloat16")
    filled(store, 1)
    expected = bytes(transfer.copy_out(store.page_tensors(), 5))
    export = store.export_pages([5])
    assert isinstance(export, transfer.PagesOnTheWay)
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.extend(map(bytes, export.wait())))
    thread.start()
    thread.join()
    assert found == [expected]
