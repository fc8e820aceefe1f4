"""What adapters add to a product: every implementation against the torch spec, over odd shapes and mixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tokenmill.kernels import cpu
from tokenmill.kernels.cpu_adapters import CpuSite
from tokenmill.kernels.ref_adapters import AdaptedPart, Parts, RefSite
from tokenmill.model.adapters import AdapterSite

_CPU = torch.device("cpu")
Shapes = list[tuple[int, int]]
# By name: how it is made, and its error relative to what the adapters add, where an input is 20 times the others.
SITES: dict[str, tuple[Callable[[Shapes], AdapterSite], float]] = {
    "ref": (lambda shapes: RefSite(shapes, _CPU), 1e-6),
    "cpu float32": (lambda shapes: CpuSite(shapes, exact=True), 1e-5),
    "cpu int8": (lambda shapes: CpuSite(shapes, exact=False), 0.06),
}
SHAPES: list[Shapes] = [[(96, 64)], [(64, 96), (32, 96), (32, 96)], [(49, 70), (3, 70)], [(160, 32), (160, 32)]]

pytestmark = pytest.mark.skipif(cpu.unavailable(_CPU) is not None, reason=str(cpu.unavailable(_CPU)))


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def part(shape: tuple[int, int], rank: int, seed: int, gain: bool = False) -> AdaptedPart:
    """Ranks of very different sizes, as extracted adapters have them."""
    sizes = torch.logspace(0, -2, rank)
    a, b = _random(rank, shape[1], seed=seed) * sizes[:, None], _random(shape[0], rank, seed=seed + 1)
    if not gain:
        return AdaptedPart(a, b)
    return AdaptedPart(a, b, 1 + 0.3 * _random(shape[0], seed=seed + 2), _random(shape[0], seed=seed + 3))


def adapters(shapes: Shapes) -> dict[int, Parts]:
    """By slot: all matrices, the last one alone, gains, a rank over two blocks, a whole matrix."""
    whole = AdaptedPart(whole=_random(*shapes[0], seed=9), bias=_random(shapes[0][0], seed=8))
    return {
        1: tuple(part(shape, 4, 10 * n) for n, shape in enumerate(shapes)),
        2: (*(None for _ in shapes[1:]), part(shapes[-1], 16, 50)),
        3: tuple(part(shape, 17, 90 * n, gain=True) for n, shape in enumerate(shapes)),
        5: (part(shapes[0], 40, 70), *(None for _ in shapes[1:])),
        6: (whole, *(None for _ in shapes[1:])),
    }


def run(site: AdapterSite, shapes: Shapes, slots: list[int], rows: list[int] | None = None) -> list[Tensor]:
    x = _random(len(slots), shapes[0][1], seed=1)
    x[:, 3] *= 20  # as activations are
    outputs = [_random(len(slots), out, seed=2 + n) for n, (out, _) in enumerate(shapes)]
    rows = list(range(len(slots))) if rows is None else rows
    chosen = [y[rows].contiguous() for y in outputs]
    site.adapt(x[rows], torch.tensor([slots[row] for row in rows], dtype=torch.int32), chosen)
    return chosen


def _loaded(name: str, shapes: Shapes) -> AdapterSite:
    site = SITES[name][0](shapes)
    for slot, parts in adapters(shapes).items():
        site.set(slot, site.pack(parts))
    return site


MIXTURES = [[0, 1, 2, 3, 0, 5, 6, 1, 3, 3], [3] * 37, [0, 4, 0], [2], [1, 2] * 20, [7, 1, 0]]


@pytest.mark.parametrize("slots", MIXTURES, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("name", list(SITES))
def test_a_site_equals_its_spec(name: str, shapes: Shapes, slots: list[int]) -> None:
    before = run(RefSite(shapes, _CPU), shapes, slots)
    wanted = run(_loaded("ref", shapes), shapes, slots)
    got = run(_loaded(name, shapes), shapes, slots)
    for old, spec, own in zip(before, wanted, got, strict=True):
        added = float((spec - old).norm())
        assert float((own - spec).norm()) <= SITES[name][1] * added
        for row, slot in enumerate(slots):
            if slot in (0, 4, 7):
                assert torch.equal(own[row], old[row])


@pytest.mark.parametrize("name", list(SITES))
def test_a_row_has_the_same_bits_in_every_mixture(name: str) -> None:
    shapes, slots = SHAPES[1], MIXTURES[0]
    site = _loaded(name, shapes)
    mixed = run(site, shapes, slots)
    for rows in ([1], [3, 8, 9], [9, 2, 7, 0]):
        for one, other in zip(mixed, run(site, shapes, slots, rows), strict=True):
            if name == "ref":  # torch sums in another order
                torch.testing.assert_close(one[rows], other, atol=1e-4, rtol=1e-4)
            else:
                assert torch.equal(one[rows], other)


@pytest.mark.parametrize("name", list(SITES))
def test_a_slot_is_emptied_and_filled_again(name: str) -> None:
    shapes = SHAPES[0]
    site, spec = _loaded(name, shapes), RefSite(shapes, _CPU)
    first, nbytes = run(site, shapes, [1, 1, 0]), site.nbytes
    packed = site.pack(adapters(shapes)[1])
    site.clear(1)
    assert site.nbytes == nbytes - site.packed_bytes(packed)
    assert torch.equal(run(site, shapes, [1, 1, 0])[0], run(spec, shapes, [1, 1, 0])[0])
    site.set(1, packed)
    assert torch.equal(run(site, shapes, [1, 1, 0])[0], first[0])
