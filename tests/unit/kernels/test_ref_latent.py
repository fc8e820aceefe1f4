"""Latent attention: both forms are plain attention over the keys and values that the rows stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tokenmill.kernels import ref, ref_latent

_HEADS, _RANK, _NOPE, _ROPE, _VALUE, _SIZE = 3, 24, 10, 6, 14, 4


def _random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def _expected(q: Tensor, rows: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """Token by token and head by head, of one sequence."""
    out = torch.empty(q.shape[0], _HEADS, _VALUE)
    for token, head in torch.cartesian_prod(torch.arange(q.shape[0]), torch.arange(_HEADS)).tolist():
        visible = rows[: rows.shape[0] - q.shape[0] + token + 1]
        k = torch.cat((visible[:, :_RANK] @ keys[head].T, visible[:, _RANK:]), 1)
        weights = (k @ q[token].view(_HEADS, -1)[head] * scale).softmax(0)
        out[token, head] = weights @ (visible[:, :_RANK] @ values[head].T)
    return out.flatten(1)


def test_every_sequence_in_its_own_form() -> None:
    counts, lengths = [1, 30, 7, 12], [18, 30, 50, 12]
    most = ref_latent.max_absorbed(_RANK, _NOPE, _VALUE)
    assert min(counts) <= most < max(counts)
    keys, values = _random(_HEADS, _NOPE, _RANK), _random(_HEADS, _VALUE, _RANK, seed=1)
    pages = torch.full((64, 1, _SIZE, _RANK + _ROPE), float("nan"))
    table = torch.randperm(64, generator=torch.Generator().manual_seed(2))[:52].view(4, 13).int()
    q = _random(sum(counts), _HEADS * (_NOPE + _ROPE), seed=3)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    expected = []
    for number, length in enumerate(lengths):
        rows = _random(length, _RANK + _ROPE, seed=number)
        slots = torch.tensor([int(table[number, at // _SIZE]) * _SIZE + at % _SIZE for at in range(length)])
        ref.store_kv(rows, pages, slots)
        expected.append(_expected(q[starts[number] : starts[number + 1]], rows, keys, values, 0.3))
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    pages = pages.nan_to_num(0.0)  # of a page's end that was never written
    got = ref_latent.latent_attention(q, pages, table, starts, seq_lens, keys, values, 0.3)
    torch.testing.assert_close(got, torch.cat(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 5, 20])
def test_absorbed_is_expanded(count: int) -> None:
    keys, values = _random(_HEADS, _NOPE, _RANK), _random(_HEADS, _VALUE, _RANK, seed=1)
    pages = _random(6, 1, _SIZE, _RANK + _ROPE, seed=2)
    arguments = (
        _random(count, _HEADS * (_NOPE + _ROPE), seed=3),
        pages,
        torch.tensor([[4, 0, 5, 1, 2]], dtype=torch.int32),
        torch.tensor([20], dtype=torch.int32),
        keys,
        values,
        0.3,
    )
    torch.testing.assert_close(
        ref_latent.attend_absorbed(*arguments), ref_latent.attend_expanded(*arguments), rtol=1e-4, atol=1e-5
    )


def test_rows_are_normed_and_rotated_in_their_own_parts() -> None:
    kv, norm = _random(4, _RANK + _ROPE), _random(_RANK, seed=1)
    angles = torch.outer(torch.arange(9.0), _random(_ROPE // 2, seed=2))
    turn = (torch.tensor([0, 3, 8, 1]), angles.cos(), angles.sin())
    rows = ref_latent.latent_rows(kv, norm, 1e-6, *turn, True)
    torch.testing.assert_close(rows[:, :_RANK], ref.rms_norm(kv[:, :_RANK], norm, 1e-6))
    torch.testing.assert_close(rows[:, _RANK:], ref.rope(kv[:, _RANK:].contiguous(), *turn, _ROPE, True))
    q = _random(4, 2 * (_NOPE + _ROPE), seed=3)
    heads, rotated = q.view(4, 2, -1), ref_latent.rotate_tails(q, *turn, _NOPE + _ROPE, True).view(4, 2, -1)
    assert torch.equal(rotated[..., :_NOPE], heads[..., :_NOPE])
    torch.testing.assert_close(rotated[:, 1, _NOPE:], ref.rope(heads[:, 1, _NOPE:].contiguous(), *turn, _ROPE, True))
