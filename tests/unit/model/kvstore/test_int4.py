"""Two scales in the bytes of one: what they gain, and that neither half hides what is wrong in the other."""

from __future__ import annotations

import pytest
import torch

from tokenmill.model.kvstore.int4 import HiddenZeroRows, PairedZeroRows


@pytest.mark.parametrize("dim", [64, 128])
def test_two_scales_err_less_in_the_same_bytes(dim: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(500, 2, dim)
    errors = []
    for rows in (HiddenZeroRows(dim), PairedZeroRows(dim)):
        packed = rows.encode(heads)
        assert packed.shape == (500, 2, dim // 2 + 4)
        back = rows.decode(packed[None].transpose(1, 2))[0].transpose(0, 1)
        errors.append(float((back - heads).square().mean()))
    assert errors[1] < 0.85 * errors[0]


def test_halves_have_their_own_range() -> None:
    """Small even values keep their precision beside large odd ones."""
    rows = PairedZeroRows(16)
    heads = torch.full((1, 1, 16), 1.0)
    heads[..., 0::2] = torch.linspace(0.0, 0.015, 8)
    back = rows.from_rows(rows.to_rows(heads)[None])
    assert float((back[0, 0] - heads[0, 0])[..., 0::2].abs().max()) < 0.001
    assert float((back[0, 0] - heads[0, 0])[..., 1::2].abs().max()) < 0.04


def test_what_is_not_finite_shows_in_both_halves() -> None:
    rows = PairedZeroRows(16)
    heads = torch.ones(1, 1, 16)
    heads[0, 0, 3] = float("inf")
    assert rows.from_rows(rows.to_rows(heads)[None]).isnan().all()
