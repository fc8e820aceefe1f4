"""Bytes of every store, computed by hand; and what they mean under a fixed budget."""

from __future__ import annotations

import pytest
import torch

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.hardware.memory import kv_bytes_per_token, plan_kv
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.choice import choose_store, page_multiple

CPU = torch.device("cpu")
SMOLLM2 = [LayerKV("full", 3, 64)] * 30
QWEN = [LayerKV("full", 2, 128)] * 28

PAGE_BYTES = {"kvquant_k3v4": 4, "kvquant3": 4}  # of a page of all layers, beside its rows
# Bytes of one token's key and value of one KV head, for heads of 64 and of 128 values.
BY_HAND = {
    "float32": (2 * 64 * 4, 2 * 128 * 4),
    "float16": (2 * 64 * 2, 2 * 128 * 2),
    "bfloat16": (2 * 64 * 2, 2 * 128 * 2),
    "fp8": (128, 256),
    "fp8_e4m3": (128, 256),
    "fp8_e5m2": (128, 256),
    "fp8_per_token_head": (2 * (64 + 4), 2 * (128 + 4)),
    "int8": (2 * (64 + 2), 2 * (128 + 2)),
    "int8_per_token_head": (2 * (64 + 4), 2 * (128 + 4)),
    "int4": (2 * (32 + 4), 2 * (64 + 4)),
    "int4_per_token_head": (2 * (32 + 4), 2 * (64 + 4)),
    # step and least value, two bytes each: of a channel for 32 tokens (keys), of 32 channels (values)
    "kivi4": (32 + 64 * 4 // 32 + 32 + 2 * 4, 64 + 128 * 4 // 32 + 64 + 4 * 4),
    "kivi2": (16 + 64 * 4 // 32 + 16 + 2 * 4, 32 + 128 * 4 // 32 + 32 + 4 * 4),
    # a byte for the gain of each
    "kvquant_k3v4": (24 + 1 + 32 + 1, 48 + 1 + 64 + 1),
    "kvquant3": (2 * (24 + 1), 2 * (48 + 1)),
    "turboquant4": (2 * (32 + 2), 2 * (64 + 2)),
    "turboquant3": (2 * (24 + 2), 2 * (48 + 2)),
    "turboquant2": (2 * (16 + 2), 2 * (32 + 2)),
    "turboquant4_prod": (32 + 4 + 32 + 2, 64 + 4 + 64 + 2),
    "turboquant3_prod": (24 + 4 + 24 + 2, 48 + 4 + 48 + 2),
    "turboquant2_prod": (16 + 4 + 16 + 2, 32 + 4 + 32 + 2),
    "turboquant_k8v4": (64 + 32 + 4, 196),
    "turboquant_4bit_nc": (32 + 2 + 32 + 4, 134),
    "turboquant_k3v4_nc": (24 + 2 + 32 + 4, 118),
    "turboquant_3bit_nc": (24 + 2 + 24 + 4, 102),
}


def layout_for(name: str, layers: list[LayerKV]) -> KVLayout:
    return build_layout(layers, max(8, KV_STORES.get(name).page_multiple))


@pytest.mark.parametrize("name", list(KV_STORES))
def test_bytes_per_token(name: str) -> None:
    for layers, expected in ((SMOLLM2, BY_HAND[name][0] * 3 * 30), (QWEN, BY_HAND[name][1] * 2 * 28)):
        layout = layout_for(name, layers)
        choice = choose_store(name, 0, layers, CPU)
        more = PAGE_BYTES.get(name, 0) / layout.page_size
        assert kv_bytes_per_token(layout, choice.page_bytes(layout)) == expected + more


def test_native_layers_count_their_own_bytes() -> None:
    layout = build_layout(SMOLLM2, 8)
    by_default = choose_store("turboquant_4bit_nc", None, SMOLLM2, CPU)
    assert by_default.edge_layers == 2
    assert kv_bytes_per_token(layout, by_default.page_bytes(layout)) == 3 * (4 * 256 + 26 * 70)
    assert choose_store("int4", None, SMOLLM2, CPU).edge_layers == 0
    assert choose_store("float16", 3, SMOLLM2, CPU).edge_layers == 0
    with pytest.raises(UserError, match="leave none"):
        choose_store("int4", 15, SMOLLM2, CPU)


@pytest.mark.parametrize("layers", [SMOLLM2, QWEN], ids=["smollm2", "qwen"])
@pytest.mark.parametrize(
    ("name", "ratio"), [("fp8", 1.9), ("int8", 1.9), ("int4", 3.5), ("turboquant4", 3.5), ("turboquant4_prod", 3.5)]
)
def test_tokens_that_fit_in_a_fixed_budget(name: str, ratio: float, layers: list[LayerKV]) -> None:
    def tokens(dtype: str) -> int:
        layout = build_layout(layers, 8)
        page_bytes = choose_store(dtype, None, layers, CPU).page_bytes(layout)
        return plan_kv(layout, page_bytes, 1024, 1000, memory=256 << 20, available=0).num_pages * layout.page_size

    assert tokens(name) >= ratio * tokens("float16")


def test_a_store_says_how_many_tokens_its_pages_group() -> None:
    assert (page_multiple("kivi2"), page_multiple("int8")) == (32, 1)


def test_a_store_says_why_gpu_kernels_do_not_read_it() -> None:
    """It is held on a GPU all the same, and read by the torch spec."""
    choice = choose_store("turboquant3", None, SMOLLM2, torch.device("cuda"))
    layout = build_layout(SMOLLM2, 16)
    store = choice.build(layout, 1, torch.device("cpu"), "", 1)
    reasons = {store.gpu_declines(slot) for slot in range(layout.layers_per_page)}
    assert any(reason is not None and "turboquant3" in reason for reason in reasons)


def test_heads_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(UserError, match="float16"):
        choose_store("int4", None, SMOLLM2, CPU).page_bytes(build_layout([LayerKV("full", 1, 12)] * 2, 8))
