"""Triton over quantized KV pages against the stores' torch twins: what is written, and attention over what is there."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.kernels import ref
from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.triton.attention.packed import packed_attention
from tokenmill.kernels.triton.fused.rotary_packed import rope_store_packed
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.conditioning import KeyConditioning

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAGE = 16
STORES = ["int8", "int8_per_token_head", "int4", "int4_per_token_head", "turboquant4"]
ERROR = 6e-3  # of bf16 in and out, weights included; codes are exact


def make(name: str, kv_heads: int, dim: int, num_pages: int) -> tuple[Any, PackedPages]:
    store = KV_STORES.get(name)(build_layout([LayerKV("full", kv_heads, dim)], PAGE), num_pages, DEVICE, "triton")
    for tensor in store.page_tensors():
        tensor.fill_(0xFF)  # scales that nobody wrote are NaN
    pages = store.packed_pages(0)
    assert pages is not None
    return store, pages


def attention(name: str, counts: list[int], lengths: list[int], kv_heads: int = 2, group: int = 3, dim: int = 64,
              window: int = 0, cap: float = 0.0) -> tuple[Tensor, Tensor]:  # fmt: skip
    """By the kernel, and token by token in float64 over what the twin reads."""
    sizes = [-(-length // PAGE) for length in lengths]
    store, pages = make(name, kv_heads, dim, sum(sizes) + 1)
    table = torch.full((len(sizes), max(sizes)), -1, dtype=torch.int32)
    for row, ids in enumerate(torch.randperm(sum(sizes)).int().split(sizes)):
        table[row, : len(ids)] = ids
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        slots = (table[row, at // PAGE].long() * PAGE + at % PAGE).to(DEVICE)
        k, v = (torch.randn(length, kv_heads * dim, device=DEVICE) for _ in range(2))
        store.write(0, slots, k + 1.0, v)  # keys off center: zero points matter
    k_all, v_all = (each.double().cpu() for each in store.read(0, torch.arange(sum(sizes), device=DEVICE)))
    q = torch.randn(sum(counts), kv_heads * group * dim).bfloat16()
    wanted, token = torch.zeros(q.shape, dtype=torch.float64), 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        for position in range(length - count, length):
            at = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
            place = table[row, at // PAGE].long(), slice(None), at % PAGE
            query = q[token].double().view(kv_heads, group, dim)
            scores = torch.einsum("hgd,khd->hgk", query, k_all[place]) * dim**-0.5
            scores = torch.tanh(scores / cap) * cap if cap else scores
            wanted[token] = torch.einsum("hgk,khd->hgd", scores.softmax(-1), v_all[place]).reshape(-1)
            token += 1
    if window:  # pages that left every token's window are given back
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            table[row, : max(0, length - count - window + 1) // PAGE] = -1
    queries = q.to(DEVICE)
    if pages.rows.turn is not None:
        turned = queries.float().view(-1, dim) @ pages.rows.turn.float() * dim**-0.5
        queries = turned.view_as(queries).bfloat16()
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
    out = torch.full_like(queries, float("nan"))
    ends = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    packed_attention(queries, pages, table.to(DEVICE), starts, ends, dim**-0.5, window, cap, out=out)
    return out.cpu(), wanted


def check(*args: Any, **options: Any) -> None:
    got, wanted = attention(*args, **options)
    assert not got.isnan().any(), "a row was not written, or something outside was read"
    assert float((got.double() - wanted).norm() / wanted.norm()) < ERROR


@pytest.mark.parametrize("name", STORES)
def test_decode(name: str) -> None:
    check(name, [1, 1, 1], [33, 1, 300])


@pytest.mark.parametrize(
    ("name", "kv_heads", "group", "dim"), [("int4", 1, 5, 128), ("int8", 1, 1, 40), ("int4", 3, 1, 48)]
)
def test_decode_of_other_shapes(name: str, kv_heads: int, group: int, dim: int) -> None:
    check(name, [1, 1], [70, 17], kv_heads, group, dim)


@pytest.mark.parametrize(
    ("name", "window", "cap"), [("int8", 0, 0.0), ("int4", 0, 20.0), ("int4", 9, 0.0), ("int8", 70, 0.0)]
)
def test_mixed_step(name: str, window: int, cap: float) -> None:
    check(name, [1, 5, 40, 1], [133, 5, 90, 1], kv_heads=1, window=window, cap=cap)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(("interleaved", "normed", "dim"), [(False, False, 64), (True, True, 40)])
def test_what_is_written_is_what_the_twin_writes(name: str, interleaved: bool, normed: bool, dim: int) -> None:
    tokens, heads, kv_heads = 5, 3, 2
    store, pages = make(name, kv_heads, dim, 4)
    twin, twin_pages = make(name, kv_heads, dim, 4)
    qkv = (torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE) * 3).bfloat16()
    positions = torch.tensor([0, 7, 3, 11, 20], device=DEVICE)
    slots = torch.tensor([17, 3, -1, 40, 0], device=DEVICE)
    angles = torch.outer(torch.arange(32.0), 1.0 / 100 ** (torch.arange(dim // 2) / (dim // 2))).to(DEVICE)
    cos, sin = angles.cos().contiguous(), angles.sin().contiguous()
    norms = (torch.rand(dim, device=DEVICE) + 0.5, torch.rand(dim, device=DEVICE) + 0.5) if normed else None
    queries = rope_store_packed(
        qkv, heads, pages, positions, slots, cos, sin, interleaved, norms=norms, eps=1e-5 if normed else 0.0
    )
    parts = qkv.float().split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q, k, v = (each.contiguous() for each in parts)
    if norms is not None:
        q, k = ref.rms_norm(q, norms[0], 1e-5, dim), ref.rms_norm(k, norms[1], 1e-5, dim)
    q, k = (ref.rope(each, positions, cos, sin, dim, interleaved) for each in (q, k))
    if pages.rows.turn is not None:
        q = (q.reshape(-1, dim) @ pages.rows.turn.float() * dim**-0.5).view_as(q)
    assert float((queries.float() - q).norm() / q.norm()) < 4e-3
    kept = slots >= 0
    twin.write(0, slots[kept], k[kept], v[kept])
    for mine, theirs in zip((pages.k, pages.v), (twin_pages.k, twin_pages.v), strict=True):
        assert (mine != theirs).float().mean() < 0.01  # a value between two codes may fall either way
    pages_written = torch.unique(slots[kept] // PAGE)
    for mine, theirs in zip(store.read(0, pages_written), twin.read(0, pages_written), strict=True):
        written = ~theirs.isnan()
        assert bool((mine.isnan() == theirs.isnan()).all())
        assert float((mine - theirs)[written].norm() / theirs[written].norm()) < 0.02


@pytest.mark.parametrize(
    ("name", "dim", "interleaved"), [("int4", 64, False), ("int4_per_token_head", 40, True), ("turboquant4", 64, False)]
)
def test_conditioned_keys(name: str, dim: int, interleaved: bool) -> None:
    """Centered and scaled keys: written as the twin writes them, and attended to as the keys they stand for."""
    tokens, heads, kv_heads = 20, 6, 2
    (store, plain), (twin, _) = make(name, kv_heads, dim, 2), make(name, kv_heads, dim, 2)
    assert store.conditions_keys
    assert plain.keys is None
    made_up = torch.Generator().manual_seed(3)
    center, noise = (torch.randn(kv_heads, dim, generator=made_up) for _ in range(2))
    before = store.meaning()
    for each in (store, twin):
        each.condition_keys(0, KeyConditioning(3 * center, (noise / 2).exp(), torch.eye(dim).double()[None]))
    assert store.meaning() == twin.meaning() != before
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device=DEVICE)
    keys = slice(heads * dim, (heads + kv_heads) * dim)
    qkv[:, keys] += 3 * center.flatten().to(DEVICE)
    qkv = qkv.bfloat16()
    places = torch.arange(tokens, device=DEVICE)
    angles = torch.outer(torch.arange(float(tokens)), 0.1 ** torch.arange(dim // 2)).to(DEVICE)
    rotary = (angles.cos().contiguous(), angles.sin().contiguous())
    queries = rope_store_packed(qkv, heads, store.packed_pages(0), places, places, *rotary, interleaved)
    parts = qkv.float().split([heads * dim, kv_heads * dim, kv_heads * dim], 1)
    q, k, v = (each.contiguous() for each in parts)
    q, k = (ref.rope(each, places, *rotary, dim, interleaved) for each in (q, k))
    twin.write(0, places, k, v)
    mine, theirs = (each.read(0, torch.arange(2, device=DEVICE)) for each in (store, twin))
    for got, wanted in zip(mine, theirs, strict=True):
        written = ~wanted.isnan()
        assert float((got - wanted)[written].norm() / wanted[written].norm()) < 0.02
    table, lengths = torch.arange(2, dtype=torch.int32)[None], torch.tensor([tokens], dtype=torch.int32)
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    batch = [each.to(DEVICE) for each in (table, starts, lengths)]
    out = packed_attention(queries, store.packed_pages(0), *batch, dim**-0.5)
    pages = [each.nan_to_num(0.0).cpu() for each in mine]
    wanted = ref.attention(q.cpu(), *pages, table, starts, lengths, dim**-0.5, 0, 0.0)
    assert float((out.float().cpu() - wanted).norm() / wanted.norm()) < 2 * ERROR  # queries are rounded once more


def test_keys_of_int8_are_not_conditioned() -> None:
    store, _ = make("int8", 1, 64, 1)  # values are not rotated there, and the kernel rotates both or none
    assert not store.conditions_keys


@pytest.mark.parametrize("name", STORES)
def test_a_row_that_is_not_finite_cannot_hide(name: str) -> None:
    dim = 64
    store, pages = make(name, 1, dim, 1)
    qkv = torch.randn(2, 3 * dim, device=DEVICE).bfloat16()
    qkv[0, dim + 5], qkv[1, 2 * dim + 9] = float("nan"), float("inf")  # the key of one token, the value of the other
    angles = torch.zeros(4, dim // 2, device=DEVICE)
    places = torch.tensor([0, 1], device=DEVICE)
    rope_store_packed(qkv, 1, pages, places, places, angles.cos(), angles.sin(), False)
    k, v = (each[0, 0].isnan().any(-1) for each in store.read(0, torch.tensor([0], device=DEVICE)))
    assert k[:2].tolist() == [True, False]
    assert v[:2].tolist() == [False, True]
