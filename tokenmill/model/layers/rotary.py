"""Rotary position tables: cos and sin for every position, with the frequency scalings that models use.

Built once per model and context length; all layers of one frequency base share a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.checkpoint.description import RopeScaling


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    cos: Tensor  # [positions, head_dim / 2] float32
    sin: Tensor
    interleaved: bool  # pairs are (2i, 2i + 1) instead of (i, i + head_dim / 2)


def build_rotary_table(
    head_dim: int,
    num_positions: int,
    theta: float,
    scaling: RopeScaling,
    interleaved: bool,
    frequency_divisors: Tensor | None = None,
) -> RotaryTable:
    """`frequency_divisors` [head_dim / 2]: GGUF's precomputed llama3 factors, used instead of `scaling`."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    magnitude = 1.0
    if frequency_divisors is not None:
        frequencies = frequencies / frequency_divisors.double()
    else:
        frequencies, magnitude = _scale(frequencies, head_dim, theta, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return RotaryTable((angles.cos() * magnitude).float(), (angles.sin() * magnitude).float(), interleaved)


def _scale(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[Tensor, float]:
    if scaling.kind == "default":
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    assert scaling.kind == "yarn", scaling.kind
    return _yarn(frequencies, head_dim, theta, scaling), _yarn_magnitude(scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are scaled by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def _yarn(frequencies: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """High frequencies are kept, low ones are scaled, with a linear ramp between them."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _yarn_magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_growth(scaling, scaling.mscale) / yarn_growth(scaling, scaling.mscale_all_dim)
    return yarn_growth(scaling, 1.0)


def yarn_growth(scaling: RopeScaling, mscale: float) -> float:
    """By how much YaRN enlarges magnitudes for its factor."""
    return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0
