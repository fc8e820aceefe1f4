"""Triton's latent attention against its torch spec: decode, prompts, mixed steps, splits; bf16, float32, FP8."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.interpreter import slow_interpreted
from tokenmill.kernels import ref, ref_latent
from tokenmill.kernels.triton.attention.latent import latent_inputs, latent_paged_attention
from tokenmill.kernels.triton.attention.latent_expanded import prompts_to_expand

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_PAGE, _NOPE, _ROPE, _VALUE = 16, 24, 8, 20
_FP8 = torch.float8_e4m3fn


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def _table(lengths: list[int]) -> Tensor:
    pages = [-(-length // _PAGE) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)).int().split(pages)
    table = torch.full((len(pages), max(pages)), -1, dtype=torch.int32)
    for row, ids in enumerate(order):
        table[row, : len(ids)] = ids
    return table.to(DEVICE)


@pytest.mark.parametrize(
    ("counts", "lengths"),
    [([1, 1, 1], [1, 40, 300]), ([1], [700]), ([37, 1, 5, 1], [37, 90, 64, 2]), ([70], [150])],
)
@pytest.mark.parametrize(("heads", "rank"), [(4, 32), (20, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=slow_interpreted), _FP8])
def test_attention(dtype: torch.dtype, heads: int, rank: int, counts: list[int], lengths: list[int]) -> None:
    keys, values = _random(heads, _NOPE, rank) * 0.2, _random(heads, _VALUE, rank, seed=1)
    table = _table(lengths)
    scale = torch.full((1,), 0.5 if dtype == _FP8 else 1.0, device=DEVICE)
    pages = (_random(int(table.max()) + 1, 1, _PAGE, rank + _ROPE, seed=2) / scale).to(dtype)
    q = _random(sum(counts), heads * (_NOPE + _ROPE), seed=3)
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tails = q.view(len(q), heads, -1)[..., _NOPE:].flatten(1).contiguous()
    kind = torch.float32 if dtype == torch.float32 else torch.bfloat16
    q, keys, values, tails = (each.to(kind) for each in (q, keys, values, tails))
    got = latent_paged_attention(
        q, tails, keys, values, pages, table, starts, seq_lens, 0.2, max_query=max(counts), max_seq=max(lengths),
        row_scale=scale if dtype == _FP8 else None,
    )  # fmt: skip
    floats = pages.float() * scale
    expected = ref_latent.latent_attention(
        q.float(), floats, table, starts.cpu(), seq_lens.cpu(), keys.float(), values.float(), 0.2
    )
    error = (got.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 and DEVICE.type == "cpu" else 1e-2)


@pytest.mark.parametrize(("counts", "lengths"), [([90, 80], [90, 200]), ([1, 90, 1], [40, 130, 17])])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, _FP8])
def test_long_prompts_expanded(dtype: torch.dtype, counts: list[int], lengths: list[int]) -> None:
    heads, rank = 4, 32
    keys, values = _random(heads, _NOPE, rank) * 0.2, _random(heads, _VALUE, rank, seed=1)
    table = _table(lengths)
    scale = torch.full((1,), 0.5 if dtype == _FP8 else 1.0, device=DEVICE)
    pages = (_random(int(table.max()) + 1, 1, _PAGE, rank + _ROPE, seed=2) / scale).to(dtype)
    q = _random(sum(counts), heads * (_NOPE + _ROPE), seed=3)
    starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    tails = q.view(len(q), heads, -1)[..., _NOPE:].flatten(1).contiguous()
    kind = torch.float32 if dtype == torch.float32 else torch.bfloat16
    q, keys, values, tails = (each.to(kind) for each in (q, keys, values, tails))
    prompts = prompts_to_expand(starts.tolist(), lengths, keys, values)
    assert [prompt.sequence for prompt in prompts] == [n for n, count in enumerate(counts) if count > 1]
    got = latent_paged_attention(
        q, tails, keys, values, pages, table, starts, seq_lens, 0.2, max_query=max(counts), max_seq=max(lengths),
        row_scale=scale if dtype == _FP8 else None, prompts=prompts,
    )  # fmt: skip
    expected = ref_latent.latent_attention(
        q.float(), pages.float() * scale, table, starts.cpu(), seq_lens.cpu(), keys.float(), values.float(), 0.2
    )
    assert (got.float() - expected).norm() / expected.norm() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_prompts_stay_absorbed_where_one_is_short() -> None:
    keys, values = _random(4, _NOPE, 32), _random(4, _VALUE, 32)
    assert prompts_to_expand([0, 90, 100], [90, 10], keys, values) == []
    assert prompts_to_expand([0, 1, 2], [90, 10], keys, values) == []


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, _FP8])
def test_inputs(dtype: torch.dtype, interleaved: bool) -> None:
    heads, rank, tokens = 20, 48, 5
    q, kv = _random(tokens, heads * (_NOPE + _ROPE)), _random(tokens, rank + _ROPE, seed=1)
    norm = _random(rank, seed=2)
    angles = torch.outer(torch.arange(30.0), torch.rand(_ROPE // 2, generator=torch.Generator().manual_seed(4)))
    positions = torch.tensor([0, 7, 29, 3, 3], device=DEVICE)
    turn = (positions, angles.cos().to(DEVICE), angles.sin().to(DEVICE))
    slots = torch.tensor([5, 40, -1, 0, 17], device=DEVICE)  # the third is padding
    pages = torch.zeros(4, 1, _PAGE, rank + _ROPE, device=DEVICE).to(dtype)
    scale = torch.full((1,), 0.25, device=DEVICE) if dtype == _FP8 else None
    tails = latent_inputs(q, kv, norm, 1e-6, pages, positions, slots, *turn[1:], interleaved, heads, scale)
    rotated = ref_latent.rotate_tails(q, *turn, _NOPE + _ROPE, interleaved)
    torch.testing.assert_close(tails, rotated.view(tokens, heads, -1)[..., _NOPE:].flatten(1), rtol=1e-4, atol=1e-4)
    rows = ref_latent.latent_rows(kv, norm, 1e-6, *turn, interleaved) / (1.0 if scale is None else scale)
    expected, kept = torch.zeros(pages.shape, device=DEVICE), slots >= 0
    ref.store_kv(rows[kept], expected, slots[kept])
    # By the norm: the interpreter rounds a rare FP8 value to half of it.
    error = (pages.float() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-4, torch.bfloat16: 1e-2, _FP8: 0.06}[dtype]
