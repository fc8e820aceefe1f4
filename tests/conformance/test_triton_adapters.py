"""Triton's products with adapters against the torch spec: mixtures, ranks, gains, tiles of tokens and columns."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tokenmill.kernels.ref_adapters import AdaptedPart, Parts, RefSite
from tokenmill.kernels.triton.adapters import products
from tokenmill.kernels.triton.adapters.site import GpuSite

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 0.02  # of what is added: bf16 factors and sums in between; the interpreter cuts off instead of rounding
Shapes = list[tuple[int, int]]
SHAPES: list[Shapes] = [[(96, 64)], [(64, 80), (40, 80), (40, 80)]]
MIXTURES = [[0, 1, 2, 3, 0, 4, 1, 3, 3], [3] * 20, [0, 0], [2], [1, 2] * 36]


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part(shape: tuple[int, int], rank: int, seed: int, gain: bool = False) -> AdaptedPart:
    a, b = _random(rank, shape[1], seed=seed), _random(shape[0], rank, seed=seed + 1)
    if not gain:
        return AdaptedPart(a, b)
    return AdaptedPart(a, b, 1 + 0.3 * _random(shape[0], seed=seed + 2), _random(shape[0], seed=seed + 3))


def adapters(shapes: Shapes) -> dict[int, Parts]:
    return {
        1: tuple(part(shape, 4, 10 * n) for n, shape in enumerate(shapes)),
        2: (*(None for _ in shapes[1:]), part(shapes[-1], 16, 50)),
        3: tuple(part(shape, 17, 90 * n, gain=True) for n, shape in enumerate(shapes)),
        4: (part(shapes[0], 32, 70), *(None for _ in shapes[1:])),
    }


def sites(shapes: Shapes) -> tuple[GpuSite, RefSite]:
    own, spec = GpuSite(shapes, 5, 32, True, DEVICE), RefSite(shapes, DEVICE)
    for slot, parts in adapters(shapes).items():
        own.set(slot, own.pack(parts))
        spec.set(slot, spec.pack(parts))
    return own, spec


def inputs(shapes: Shapes, slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    x = _random(len(slots), shapes[0][1], seed=1).to(DEVICE, torch.bfloat16)
    y = _random(len(slots), sum(out for out, _ in shapes), seed=2).to(DEVICE, torch.bfloat16)
    return x, torch.tensor(slots, dtype=torch.int32, device=DEVICE), y


def assert_close(got: Tensor, wanted: Tensor, before: Tensor) -> None:
    assert not got.isnan().any()
    added = float((wanted.float() - before.float()).norm())
    assert float((got.float() - wanted.float()).norm()) <= ERROR * max(added, 1e-6)


@pytest.mark.parametrize("slots", MIXTURES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_outputs_side_by_side(shapes: Shapes, slots: list[int]) -> None:
    own, spec = sites(shapes)
    x, named, y = inputs(shapes, slots)
    got, wanted = y.float(), y.float()
    own.adapt_joined(x, named, got)
    spec.adapt_joined(x, named, wanted)
    assert_close(got, wanted, y)
    for row, slot in enumerate(slots):
        if not slot:
            assert torch.equal(got[row], y.float()[row])


def test_outputs_apart_and_in_bf16() -> None:
    shapes, slots = SHAPES[1], MIXTURES[0]
    own, spec = sites(shapes)
    x, named, y = inputs(shapes, slots)
    widths = [out for out, _ in shapes]
    got = [part.contiguous() for part in y.split(widths, dim=1)]
    wanted = y.float()
    own.adapt(x, named, got)
    spec.adapt_joined(x, named, wanted)
    assert got[0].dtype == torch.bfloat16
    assert_close(torch.cat(got, 1), wanted, y)


def test_the_depth_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_SPLIT_DEPTH", 64)
    shapes = [(48, 300)]
    own, spec = sites(shapes)
    x, named, y = inputs(shapes, [1, 0, 3, 4])
    got, wanted = y.float(), y.float()
    own.adapt_joined(x, named, got)
    spec.adapt_joined(x, named, wanted)
    assert_close(got, wanted, y)


def test_a_row_has_the_same_bits_in_every_mixture() -> None:
    shapes, slots = SHAPES[1], MIXTURES[0]
    own, _ = sites(shapes)
    x, named, y = inputs(shapes, slots)
    mixed = y.clone()
    own.adapt_joined(x, named, mixed)
    for rows in ([3], [7, 0, 5]):
        alone = y[rows].contiguous()
        own.adapt_joined(x[rows].contiguous(), named[rows].contiguous(), alone)
        assert torch.equal(alone, mixed[rows])


def test_a_slot_is_emptied_and_filled_again() -> None:
    shapes = SHAPES[0]
    own, _ = sites(shapes)
    x, named, y = inputs(shapes, [3, 1, 0])
    first, nbytes = y.clone(), own.nbytes
    own.adapt_joined(x, named, first)
    own.clear(3)
    own.clear(1)
    after = y.clone()
    own.adapt_joined(x, named, after)
    assert torch.equal(after, y)
    own.set(3, own.pack(adapters(shapes)[1]))  # without the gains that were there, and of a lower rank
    again, other = y.clone(), y.clone()
    own.adapt_joined(x, named, again)
    own.set(1, own.pack(adapters(shapes)[1]))
    own.adapt_joined(x, torch.where(named == 3, 1, 0).int(), other)
    assert torch.equal(again[0], other[0])
    assert own.nbytes == nbytes


def test_a_whole_matrix_replaces_the_product() -> None:
    shapes = SHAPES[1]
    own, spec = sites(shapes)
    whole: Parts = (AdaptedPart(whole=_random(*shapes[0], seed=3), bias=_random(shapes[0][0], seed=4)), None, None)
    own.set(5, own.pack(whole))
    spec.set(5, spec.pack(whole))
    x, named, y = inputs(shapes, [5, 1, 0, 5])
    got, wanted = y.float(), y.float()
    own.adapt_joined(x, named, got)
    spec.adapt_joined(x, named, wanted)
    assert_close(got, wanted, y)
