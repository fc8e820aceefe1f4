"""Every KV store: what is written can be read back within its precision, copies are copies, bytes are as promised,
pages can leave and come back, and attention over its pages is attention over what they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.devices import CPU, DEVICES, device_name
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.kernels import cpu, ref
from tokenmill.model.attention import choose_attention
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.transfer import gather
from tokenmill.types import Batch

_LAYERS = [LayerKV("sliding", 2, 16, 8)] * 4 + [LayerKV("full", 2, 16)] * 2
# Relative error of a normal vector by bits: what theory says and a little more.
_CLOSE = {"16": 0.004, "8": 0.03, "5": 0.06, "4": 0.15, "3": 0.25, "2": 0.45}
_LOSSY = {
    "float32": "16",
    "float16": "16",
    "bfloat16": "16",
    "fp8_e5m2": "5",
    "int4": "4",
    "int4_per_token_head": "4",
    "kivi4": "4",
    "kivi2": "2",
    "kvquant_k3v4": "3",
    "kvquant3": "3",
    "turboquant4": "4",
    "turboquant3": "3",
    "turboquant2": "2",
    "turboquant_k8v4": "4",
    "turboquant_4bit_nc": "4",
    "turboquant_k3v4_nc": "3",
    "turboquant_3bit_nc": "2",
}
_PRODUCTS = ("turboquant4_prod", "turboquant3_prod", "turboquant2_prod")  # unbiased, not close: see test_turboquant.py


def make(
    name: str, layers: list[LayerKV], num_pages: int, device: torch.device = CPU, kernels: str = ""
) -> tuple[KVStore, KVLayout]:
    store_class = KV_STORES.get(name)
    layout = build_layout(layers, page_size=max(4, store_class.page_multiple))
    return store_class(layout, num_pages, device, kernels), layout


def rows(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


_ON_EACH_DEVICE = pytest.mark.parametrize("device", DEVICES, ids=device_name)


@_ON_EACH_DEVICE
@pytest.mark.parametrize("name", list(KV_STORES))
def test_store(name: str, device: torch.device) -> None:
    store, layout = make(name, _LAYERS, 6, device)
    size = layout.page_size
    fixed = 0 if store.calibrates else store.fixed_bytes(layout, 1)  # codes: test_kvquant.py
    assert store.nbytes == 6 * store.page_bytes(layout) + fixed
    assert sum(tensor.nbytes for tensor in store.page_tensors()) == 6 * store.page_bytes(layout)
    k, v = rows(size + 1, 32, 0).to(device), rows(size + 1, 32, 1).to(device)
    slots = torch.tensor([*range(size, 2 * size), 5 * size], device=device)
    for slot in range(layout.layers_per_page):
        store.write(slot, slots, k, v)
    store.copy_pages([(1, 3), (3, 0)])
    bound = 1.0 if name in _PRODUCTS else _CLOSE[_LOSSY.get(name, "8")]
    for slot in range(layout.layers_per_page):
        for pages, expected in zip(store.pages(slot), (k, v), strict=True):
            for page in (1, 3, 0):
                stored = pages[page].float().transpose(0, 1).reshape(size, 32)
                assert distance(stored, expected[:size]) < bound
            assert distance(pages[5, :, 0].float().reshape(32), expected[size]) < bound
        some = torch.tensor([3, 1], device=device)
        for part, whole in zip(store.read(slot, some), store.pages(slot), strict=True):
            if device.type == "cpu":
                assert torch.equal(part, whole[some])
            else:  # a rotation of other rows beside them may be another kernel
                torch.testing.assert_close(part, whole[some], rtol=1e-4, atol=1e-4)
    assert choose_attention(store).declines(store) is None


@_ON_EACH_DEVICE
@pytest.mark.parametrize("name", list(KV_STORES))
def test_a_page_leaves_and_comes_back(name: str, device: torch.device) -> None:
    store, layout = make(name, _LAYERS, 4, device)
    size = layout.page_size
    for slot in range(layout.layers_per_page):
        k, v = rows(2 * size, 32, slot).to(device), rows(2 * size, 32, slot + 9).to(device)
        store.write(slot, torch.arange(2 * size, device=device), k, v)
    exported = store.export_pages([1, 0]).wait()
    assert {len(each) for each in exported} == {store.stored_page_bytes} == {store.page_bytes(layout)}
    batch = gather(store.page_tensors(), torch.tensor([1, 0], device=device))  # what a GPU sends in one go
    assert [bytes(row.cpu().numpy().data) for row in batch] == [bytes(each) for each in exported]
    other, _ = make(name, _LAYERS, 4, device)
    other.import_pages([2, 3], exported)
    for slot in range(layout.layers_per_page):
        for mine, theirs in zip(store.pages(slot), other.pages(slot), strict=True):
            assert torch.equal(mine[1], theirs[2])
            assert torch.equal(mine[0], theirs[3])


_LATENT = [LayerKV("latent", 1, 40, value_dim=0)] * 3
_LATENT_STORES = [name for name in KV_STORES if "latent rows" in KV_STORES.get(name).supports]


@_ON_EACH_DEVICE
@pytest.mark.parametrize("name", _LATENT_STORES)
def test_latent_rows(name: str, device: torch.device) -> None:
    """One row per token, read as key and as value: stored once, copied, sent away and back."""
    store, layout = make(name, _LATENT, 6, device)
    size = layout.page_size
    assert store.nbytes == 6 * store.page_bytes(layout)
    assert sum(tensor.nbytes for tensor in store.page_tensors()) == store.nbytes
    written = rows(size, 40, 0).to(device)
    for slot in range(3):
        store.write(slot, torch.arange(size, 2 * size, device=device), written, written)
    store.copy_pages([(1, 3)])
    other, _ = make(name, _LATENT, 6, device)
    other.import_pages([5], store.export_pages([3]).wait())
    for slot in range(3):
        k, v = store.pages(slot)
        assert torch.equal(k[3].float(), v[3].float())
        assert distance(k[3, 0].float(), written) < _CLOSE[_LOSSY.get(name, "8")]
        assert torch.equal(other.read(slot, torch.tensor([5], device=device))[1][0], v[3])


def step(
    layout: KVLayout, counts: list[int], lengths: list[int], device: torch.device
) -> tuple[Batch, list[list[int]]]:
    """Sequences whose pages lie scattered; every sequence brings its last `count` tokens."""
    size = layout.page_size
    width = -(-max(lengths) // size)
    order = torch.randperm(len(counts) * width, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [order[number * width : (number + 1) * width] for number in range(len(counts))]
    starts = torch.tensor([0, *counts]).cumsum(0)
    slots = [
        tables[number][position // size] * size + position % size
        for number, (count, length) in enumerate(zip(counts, lengths, strict=True))
        for position in range(length - count, length)
    ]
    table = torch.tensor(tables, dtype=torch.int32, device=device)
    total = sum(counts)
    batch = Batch(
        token_ids=torch.zeros(total, dtype=torch.int64, device=device),
        positions=torch.zeros(total, dtype=torch.int64, device=device),
        query_starts=starts.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=(table,),
        slots=(torch.tensor(slots, device=device),),
        logit_rows=torch.zeros(0, dtype=torch.int64, device=device),
        max_query=max(counts),
        max_seq=max(lengths),
    )
    return batch, tables


@_ON_EACH_DEVICE
@pytest.mark.parametrize("head_dim", [16, 48, 64, 256])
@pytest.mark.parametrize("name", list(KV_STORES))
def test_attention(name: str, head_dim: int, device: torch.device) -> None:
    """Prompts, then a step of single tokens beside a chunk; against the spec on the pages expanded by torch. On a GPU
    by the reference: its own kernels read pages in test_triton_attention.py and test_triton_packed.py."""
    kernels = "" if device.type == "cpu" else "ref"
    store, layout = make(name, [LayerKV("full", 2, head_dim)] * 2, 3 * 40, device, kernels)
    backend = choose_attention(store, kernels)
    spec = AttentionSpec(0, 6, 2, head_dim, head_dim**-0.5, window=0, softcap=0.0)
    for number, (counts, lengths) in enumerate((([70, 3, 40], [70, 3, 40]), ([1, 9, 1], [71, 12, 41]))):
        batch, _ = step(layout, counts, lengths, device)
        total = sum(counts)
        store.prepare(batch)
        k_new, v_new = (rows(total, 2 * head_dim, number + extra).to(device) for extra in (0, 5))
        store.write(1, batch.slots[0], k_new, v_new)
        q = rows(total, 6 * head_dim, 77).to(device)
        actual = backend.attend(q, 1, batch.block_tables[0], batch, spec)
        k, v = (each.float().nan_to_num(0) for each in store.pages(1))  # pages never written hold anything
        expected = ref.attention(
            q, k, v, batch.block_tables[0], batch.query_starts, batch.seq_lens, spec.scale, spec.window, spec.softcap
        )
        halves = name == "float16" and cpu.unavailable(device) is None and cpu.multiplies_halves(head_dim)
        close = 5e-3 if halves else 1e-4
        torch.testing.assert_close(actual, expected, rtol=close, atol=close)


@pytest.mark.skipif(cpu.unavailable(CPU) is not None, reason="no C++ kernels")
@pytest.mark.parametrize("head_dim", [48, 64, 128])
@pytest.mark.parametrize("name", list(KV_STORES))
def test_both_kernels_write_the_same(name: str, head_dim: int) -> None:
    """Up to codes at a tie, which a last bit may turn either way."""
    layers = [LayerKV("full", 3, head_dim)]
    (fast, layout), (plain, _) = make(name, layers, 10), make(name, layers, 10, kernels="ref")
    if fast.is_coded and plain.kernel_pages(0) is not None:
        pytest.fail("kernels=ref must not write by C++")
    count = 4 * layout.page_size
    k = rows(count, 3 * head_dim, 1) * torch.exp(rows(1, 3 * head_dim, 2))  # some channels are much larger
    v = rows(count, 3 * head_dim, 3)
    k[0], v[1] = 0.0, 1e-9
    for store in (fast, plain):
        store.write(0, torch.arange(count), k, v)
    for mine, theirs in zip(fast.pages(0), plain.pages(0), strict=True):
        mine, theirs = mine[:4].float(), theirs[:4].float()
        assert distance(mine, theirs) < 0.005
        assert float(((mine - theirs).abs() > 1e-5 * theirs.abs().max()).float().mean()) < 0.01
