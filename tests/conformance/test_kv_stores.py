"""Every KV store: what is written can be read back within its precision, copies are copies, bytes are as promised."""

from __future__ import annotations

import pytest
import torch

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.model.attention import choose_attention
from tokenmill.model.kvstore import KV_STORES

_WHERE = torch.device("cpu")
_LAYERS = [LayerKV("sliding", 2, 16, 8)] * 4 + [LayerKV("full", 2, 16)] * 2


@pytest.mark.parametrize("name", list(KV_STORES))
def test_store(name: str) -> None:
    layout = build_layout(_LAYERS, page_size=4)
    store = KV_STORES.get(name)(layout, 6, _WHERE)
    assert store.nbytes == 6 * store.page_bytes(layout)
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(5, 32, generator=generator) for _ in range(2))
    slots = torch.tensor([4, 5, 6, 7, 20])
    for slot in range(layout.layers_per_page):
        store.write(slot, slots, k, v)
    store.copy_pages([(1, 3), (3, 0)])
    close = 0.07 if name == "fp8" else 0.01  # three bits of mantissa
    for slot in range(layout.layers_per_page):
        for pages, rows in zip(store.pages(slot), (k, v), strict=True):
            for page in (1, 3, 0):
                stored = pages[page].float().transpose(0, 1).reshape(4, 32)
                torch.testing.assert_close(stored, rows[:4], rtol=close, atol=0.01)
            torch.testing.assert_close(pages[5, :, 0].float().reshape(32), rows[4], rtol=close, atol=0.01)
    assert choose_attention(store).declines(store) is None
