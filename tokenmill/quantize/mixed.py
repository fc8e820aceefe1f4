"""Mixed precision: how many bits each group of linears gets, so that a byte budget costs the least quality.

`measure_block` rounds one group at a time to each width and looks at the block's output; `allocate` then spends the
budget where a byte helps most. Linears that share an input get the same width, since engines fuse them. Called by the
job (mixed_job.py) before the solver; knows nothing of files.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.base import BlockView
from tokenmill.quantize.methods.rtn import round_to_nearest

WIDTHS = (2, 3, 4, 5, 6, 8)
_SEQUENCES = 4  # calibration sequences that sensitivities are measured on


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One group of linears: its names, number of weights, and the error of each width."""

    names: tuple[str, ...]
    num_weights: int
    errors: Mapping[int, float]  # by width


@torch.no_grad()
def measure_block(
    block: BlockView, scheme_of: Mapping[str, Scheme], widths: Sequence[int] = WIDTHS, num_sequences: int = _SEQUENCES
) -> list[Sensitivity]:
    """The error of rounding each group to each width, all else in float: the squared change of the residual stream
    after the block relative to its square (the next norm divides by it); the mean over tokens."""
    inputs = block.inputs()
    count = min(num_sequences, len(inputs))
    sequences = [inputs[index * len(inputs) // count] for index in range(count)]
    outputs = [block.forward(sequence, {}) for sequence in sequences]
    measured = []
    for group in block.groups:
        names = tuple(name for name in group.names if name in scheme_of)
        if not names:
            continue
        weights = {name: block.weight(name) for name in names}
        errors = {}
        for width in widths:
            rounded = {
                name: round_to_nearest(weight, replace(scheme_of[name], bits=width)).dequantize()
                for name, weight in weights.items()
            }
            changed = [block.forward(sequence, rounded) for sequence in sequences]
            errors[width] = sum(map(relative_change, changed, outputs)) / count
        measured.append(Sensitivity(names, sum(weight.numel() for weight in weights.values()), errors))
    return measured


def relative_change(changed: Tensor, original: Tensor) -> float:
    """The mean over rows of |changed - original|^2 / |original|^2."""
    change = (changed - original).square().sum(-1)
    return float((change / original.square().sum(-1).clamp(min=1e-30)).mean())


def budget_bytes(sensitivities: Sequence[Sensitivity], scheme: Scheme, average_bits: float) -> int:
    """Bytes of all groups at `average_bits` each, scales and zero points included; 3.5 is halfway from 3 to 4."""
    below = int(average_bits)
    low, high = (replace(scheme, bits=bits).bits_per_weight for bits in (below, below + 1))
    bits = low + (high - low) * (average_bits - below)
    return int(sum(each.num_weights for each in sensitivities) * bits / 8)


def average_bits_within(budget: int, num_weights: int, scheme: Scheme) -> float:
    """The inverse of `budget_bytes`: bits per weight that `budget` bytes pay for."""
    one, two = (replace(scheme, bits=bits).bits_per_weight for bits in (1, 2))
    return 1 + (8 * budget / num_weights - one) / (two - one)


def choose_widths(sensitivities: Sequence[Sensitivity], scheme: Scheme, budget: int) -> dict[str, int]:
    """Bits for every linear, such that all together take at most `budget` bytes with their scales."""
    errors = {each.names[0]: each.errors for each in sensitivities}
    sizes = {
        each.names[0]: {
            width: int(each.num_weights * replace(scheme, bits=width).bits_per_weight / 8) for width in each.errors
        }
        for each in sensitivities
    }
    chosen = allocate(errors, sizes, budget)
    return {name: chosen[each.names[0]] for each in sensitivities for name in each.names}


def allocate(
    sensitivities: Mapping[str, Mapping[int, float]], sizes: Mapping[str, Mapping[int, int]], budget: int
) -> dict[str, int]:
    """A width for each name with the least sum of sensitivities among those whose sizes fit into `budget`.

    Widths are raised in the order of error removed per byte along each name's lower convex hull, which is the exact
    optimum of the relaxed problem; what is left over is then spent on any single raise that still fits.
    """
    hulls = {name: _hull(sensitivities[name], sizes[name]) for name in sensitivities}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    left = budget - sum(sizes[name][width] for name, width in chosen.items())
    if left < 0:
        raise UserError(
            f"the budget of {budget:,} bytes is below the {budget - left:,} bytes of the narrowest widths",
            f"give at least {budget - left:,} bytes",
        )
    queue = [raised for name, hull in hulls.items() for raised in _raises(name, hull, sensitivities, sizes)]
    heapq.heapify(queue)
    stuck: set[str] = set()
    while queue:
        _, name, width = heapq.heappop(queue)
        cost = sizes[name][width] - sizes[name][chosen[name]]
        if name in stuck or cost > left:
            stuck.add(name)  # the next raise of this name costs even more
            continue
        chosen[name] = width
        left -= cost
    return _spend(chosen, sensitivities, sizes, left)


def _hull(errors: Mapping[int, float], sizes: Mapping[int, int]) -> list[int]:
    """Widths on the lower convex hull of error over size, from the smallest: each raise removes less per byte."""
    hull: list[int] = []
    for width in sorted(sizes, key=lambda width: (sizes[width], errors[width])):
        if hull and errors[width] >= errors[hull[-1]]:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1], errors, sizes) <= _slope(hull[-2], width, errors, sizes):
            hull.pop()
        hull.append(width)
    return hull


def _slope(width: int, wider: int, errors: Mapping[int, float], sizes: Mapping[int, int]) -> float:
    """Error removed per byte."""
    return (errors[width] - errors[wider]) / max(1, sizes[wider] - sizes[width])


def _raises(
    name: str, hull: Sequence[int], errors: Mapping[str, Mapping[int, float]], sizes: Mapping[str, Mapping[int, int]]
) -> list[tuple[float, str, int]]:
    return [(-_slope(width, wider, errors[name], sizes[name]), name, wider) for width, wider in pairwise(hull)]


def _spend(
    chosen: dict[str, int],
    errors: Mapping[str, Mapping[int, float]],
    sizes: Mapping[str, Mapping[int, int]],
    left: int,
) -> dict[str, int]:
    """Take the raise that removes the most error and fits, until none fits."""
    while True:
        fitting = [
            (errors[name][width] - errors[name][wider], name, wider)
            for name, width in chosen.items()
            for wider in sizes[name]
            if sizes[name][wider] - sizes[name][width] <= left and errors[name][wider] < errors[name][width]
        ]
        if not fitting:
            return chosen
        _, name, wider = max(fitting)
        left -= sizes[name][wider] - sizes[name][chosen[name]]
        chosen[name] = wider
