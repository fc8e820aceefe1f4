"""Mixed precision: how many bits each group of linears gets, so that a byte budget costs the least quality.

`measure_block` rounds one group at a time and measures what the whole model's answers lose; `allocate` then spends the
budget where a byte helps most. Linears that share an input get the same width, since engines fuse them. Called by the
job (mixed_job.py) before the solver; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.allocation import allocate
from tokenmill.quantize.divergence import DivergenceProbe
from tokenmill.quantize.methods.rtn import round_to_nearest

WIDTHS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """One group of linears: its names, number of weights, and the divergence of each width."""

    names: tuple[str, ...]
    num_weights: int
    errors: Mapping[int, float]  # by width


@torch.no_grad()
def measure_block(
    probe: DivergenceProbe,
    index: int,
    scheme_of: Mapping[str, Scheme],
    widths: Sequence[int],
    measured: Sequence[int],
    importance: Mapping[str, Tensor],
) -> list[Sensitivity]:
    """The divergence of the whole model's logits with one group of a block rounded to each width, all else in float.

    `measured`: the widths that are run; the others follow from the nearest of them by their squared errors, weighted by
    `importance` (the mean square of each input), to which a divergence is proportional while it is small.
    """
    units = []
    for group in probe.source.groups(index):
        names = tuple(name for name in group.names if name in scheme_of)
        if names:
            units.append((names, {name: probe.weights[index][name] for name in names}))
    squared = [
        {width: sum(_error(w, scheme_of[n], width, importance[n]) for n, w in weights.items()) for width in widths}
        for _, weights in units
    ]
    found: list[dict[int, float]] = [{} for _ in units]
    for width in measured:
        changes = [{n: _rounded(w, scheme_of[n], width) for n, w in weights.items()} for _, weights in units]
        for each, divergence in zip(found, probe.measure(changes), strict=True):
            each[width] = divergence
    return [
        Sensitivity(names, sum(weight.numel() for weight in weights.values()), _filled_in(run, errors))
        for (names, weights), run, errors in zip(units, found, squared, strict=True)
    ]


def _rounded(weight: Tensor, scheme: Scheme, width: int) -> Tensor:
    return round_to_nearest(weight, replace(scheme, bits=width)).dequantize()


def _error(weight: Tensor, scheme: Scheme, width: int, importance: Tensor) -> float:
    return float(((_rounded(weight, scheme, width) - weight).square() * importance).sum(dtype=torch.float64))


def _filled_in(run: Mapping[int, float], errors: Mapping[int, float]) -> dict[int, float]:
    """A divergence for every width, from the nearest that was run."""
    filled = {}
    for width, error in errors.items():
        near = min(run, key=lambda each: (abs(each - width), each))
        filled[width] = max(run[near], 0.0) * error / max(errors[near], 1e-30)
    return filled


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
