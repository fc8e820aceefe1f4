"""Conditioned keys: scores by them are far closer to the true ones, and attention over them is the same attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tokenmill.checkpoint.description import RopeScaling
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import LayerKV, build_layout
from tokenmill.kernels import cpu, ref
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.conditioning import KeyConditioning
from tokenmill.model.kvstore.int4 import HiddenZeroRows
from tokenmill.model.layers.rotary import build_rotary_table
from tokenmill.model.loader import load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.observation.key_conditioning import _over_positions, find_conditioning, query_moment

CPU = torch.device("cpu")


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made_up(heads: int, dim: int) -> KeyConditioning:
    factor = normal(heads, dim, dim, seed=1).double()
    return KeyConditioning(
        3 * normal(heads, dim, seed=2), normal(heads, dim, seed=3).exp(), factor @ factor.transpose(1, 2)
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_moments_are_those_of_rotated_vectors(interleaved: bool) -> None:
    """The closed form against the mean over the positions themselves, with channels that are not rotated."""
    table = build_rotary_table(8, 4096, 10_000.0, RopeScaling("default"), interleaved)
    queries = normal(5, 2, 3, 12, seed=4)
    positions = torch.arange(0, 4096, 8)

    def rotated(x: Tensor) -> Tensor:  # [heads, 12] -> [positions, heads, 12]
        rows = x[:, :8].flatten().expand(len(positions), -1).contiguous()
        turned = ref.rope(rows, positions, table.cos, table.sin, 8, interleaved).view(-1, x.shape[0], 8)
        return torch.cat((turned, x[:, 8:].expand(len(positions), -1, -1)), -1)

    mean = queries[0, :, 0]
    torch.testing.assert_close(_over_positions(mean, table), rotated(mean).mean(0), rtol=1e-4, atol=1e-5)
    everywhere = torch.stack([rotated(each) for token in queries for each in token.transpose(0, 1)]).double()
    expected = torch.einsum("nphi,nphj->hij", everywhere, everywhere) / (15 * len(positions))
    expected[:, :8, 8:] = expected[:, 8:, :8] = 0
    torch.testing.assert_close(query_moment(queries, table), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(_over_positions(mean, None), mean)


def test_feedback_lowers_the_error_of_scores() -> None:
    """Queries of few directions: rounding errors go where they do not look."""
    dim, heads = 64, 2
    queries = normal(500, heads, 6, seed=5) @ normal(6, dim, seed=6) + 0.1 * normal(500, heads, dim, seed=7)
    moment = torch.einsum("nhi,nhj->hij", queries.double(), queries.double()) / 500
    keys = normal(300, heads, dim, seed=8) + 2.0

    def score_error(conditioning: KeyConditioning | None) -> float:
        rows = HiddenZeroRows(dim) if conditioning is None else HiddenZeroRows(dim).conditioned(conditioning)
        error = rows.decode(rows.encode(keys)[:, :, None])[:, :, 0] - keys
        scores = torch.einsum("nhd,mhd->hnm", queries, error)
        return float((scores - scores.mean(-1, keepdim=True)).square().mean())

    ones = torch.ones(heads, dim)
    centered = KeyConditioning(keys.mean(0), ones, torch.eye(dim).double().expand(heads, dim, dim))
    assert score_error(centered) < 0.5 * score_error(None)
    assert score_error(KeyConditioning(keys.mean(0), ones, moment)) < 0.5 * score_error(centered)


@pytest.mark.skipif(cpu.unavailable(CPU) is not None, reason="no C++ kernels")
@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "fp8_per_token_head", "int8", "int4", "turboquant3"])
def test_cpp_does_as_torch(name: str) -> None:
    """The same codes, and the same attention, whose queries C++ turns instead of the keys."""
    dim, heads, size = 48, 2, 8
    layout = build_layout([LayerKV("full", heads, dim)], size)
    fast, plain = (KV_STORES.get(name)(layout, 6, CPU, kernels) for kernels in ("", "ref"))
    assert fast.conditions_keys
    before = fast.meaning()
    k, v = normal(40, heads * dim, seed=9), normal(40, heads * dim, seed=10)
    for store in (fast, plain):
        store.condition_keys(0, made_up(heads, dim))
        store.write(0, torch.arange(40), k, v)
    assert fast.meaning() == plain.meaning() != before
    mine, theirs = fast.pages(0)[0][:5], plain.pages(0)[0][:5]
    assert float((mine - theirs).norm() / theirs.norm()) < 0.02  # a last bit may turn a code, and those after it
    pages = fast.kernel_pages(0)
    assert pages is not None
    q = normal(2, 3 * heads * dim, seed=11)
    table, starts = torch.tensor([[0, 1, 2, 3, 4]], dtype=torch.int32), torch.tensor([0, 2], dtype=torch.int32)
    lengths = torch.tensor([40], dtype=torch.int32)
    actual = pages.attention(q, table, starts, lengths, 0.2, 0, 0.0)
    expected = ref.attention(q, *(each.nan_to_num(0) for each in fast.pages(0)), table, starts, lengths, 0.2, 0, 0.0)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_a_model_is_measured_as_its_text_would_be(model_path: Callable[[str], Path]) -> None:
    """stories15m: real queries and keys, errors of scores by int4 keys with and without what was measured."""
    model = load_model(open_checkpoint(model_path("stories15m")), CPU, 256)
    found = find_conditioning(model, resolve(EngineConfig()), 256)
    again = find_conditioning(model, resolve(EngineConfig()), 200)
    assert set(found) == set(range(6))
    assert all(torch.equal(found[layer].center, again[layer].center) for layer in found)
    for conditioning in found.values():
        assert conditioning.center.shape == conditioning.scale.shape == (6, 48)
        logs = conditioning.scale.log().mean(-1)
        torch.testing.assert_close(logs, torch.zeros_like(logs), rtol=0, atol=0.05)
        assert float(torch.linalg.eigvalsh(conditioning.query_moment).min()) > -1e-6
        assert math.isfinite(float(conditioning.center.sum()))
