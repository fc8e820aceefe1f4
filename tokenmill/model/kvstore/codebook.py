"""Lloyd-Max codebooks of the normal distribution: the levels that lose least of a coordinate of a random unit vector.

After a random rotation each coordinate of a unit vector of width d is close to N(0, 1/d); these levels are for variance
one, so a row multiplies them by its norm / sqrt(d). Used by the TurboQuant stores.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

_MAX_ROUNDS = 20_000
_CLOSE = 1e-10


@cache
def normal_codebook(bits: int) -> tuple[Tensor, Tensor]:
    """Levels float32 [2**bits] in ascending order, and the bounds [2**bits - 1] between them."""
    count = 1 << bits
    levels = [math.sqrt(2) * _inverse_erf((2 * i + 1) / count - 1) for i in range(count)]
    for _ in range(_MAX_ROUNDS):  # bounds halfway between levels, levels at the mean of their cell
        bounds = [-math.inf, *((a + b) / 2 for a, b in pairwise(levels)), math.inf]
        better = [_cell_mean(a, b) for a, b in pairwise(bounds)]
        moved = max(abs(a - b) for a, b in zip(levels, better, strict=True))
        levels = better
        if moved < _CLOSE:
            break
    inner = [(a + b) / 2 for a, b in pairwise(levels)]
    return torch.tensor(levels), torch.tensor(inner)


def normal_distortion(bits: int) -> float:
    """The mean squared error of rounding a coordinate of variance one, which is that of a unit vector."""
    levels, bounds = normal_codebook(bits)
    edges = [-math.inf, *bounds.double().tolist(), math.inf]
    # E[(x - c)^2] = 1 - E[c^2] where every level is the mean of its cell.
    shares = [_distribution(b) - _distribution(a) for a, b in pairwise(edges)]
    return 1.0 - sum(share * level**2 for share, level in zip(shares, levels.double().tolist(), strict=True))


def _cell_mean(a: float, b: float) -> float:
    return (_density(a) - _density(b)) / (_distribution(b) - _distribution(a))


def _density(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _distribution(x: float) -> float:
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def _inverse_erf(y: float) -> float:
    return float(torch.erfinv(torch.tensor(y, dtype=torch.float64)))
