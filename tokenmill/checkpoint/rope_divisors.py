"""Arithmetic of rotary scalings that GGUF and config.json say differently.

GGUF keeps one divisor per rotary frequency (`rope_freqs.weight`), of which this reads llama3's four numbers; and the
magnitude of longrope, which a config leaves to be computed. Called by the exports and by the rotary tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from tokenmill.checkpoint.description import RopeScaling
from tokenmill.errors import CheckpointError

# Every published model has these two; with them, each blended frequency alone tells the original context.
_LOW, _HIGH = 1.0, 4.0
_TOLERANCE = 1e-4  # the divisors are float32, made from float32 frequencies


def fit_llama3(divisors: Sequence[float], head_dim: int, theta: float) -> RopeScaling:
    """The llama3 scaling whose divisors these are; refused where there is none."""
    if all(abs(divisor - 1) < _TOLERANCE for divisor in divisors):
        return RopeScaling()
    factor = float(f"{max(divisors):.6g}")
    wavelengths = [2 * math.pi * theta ** (2 * pair / head_dim) for pair in range(head_dim // 2)]
    contexts = [
        wavelength * (_LOW + (_HIGH - _LOW) * (1 / divisor - 1 / factor) / (1 - 1 / factor))
        for divisor, wavelength in zip(divisors, wavelengths, strict=True)
        if 1 + _TOLERANCE < divisor < factor - _TOLERANCE * factor
    ]
    if contexts:
        scaling = RopeScaling("llama3", factor, round(median(contexts)), low_freq_factor=_LOW, high_freq_factor=_HIGH)
        made = llama3_divisors(scaling, wavelengths)
        if all(abs(a - b) <= _TOLERANCE * b for a, b in zip(made, divisors, strict=True)):
            return scaling
    raise CheckpointError(
        "the file's rotary divisors (rope_freqs) do not follow the llama3 rule", "choose a GGUF format for this model"
    )


def llama3_divisors(scaling: RopeScaling, wavelengths: Sequence[float]) -> list[float]:
    """What each frequency is divided by: nothing for short waves, `factor` for long ones, a blend between."""
    result = []
    for wavelength in wavelengths:
        turns = scaling.original_context / wavelength
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        result.append(1 / ((1 - blend) / scaling.factor + blend))
    return result


def longrope_magnitude(scaling: RopeScaling) -> float:
    """What longrope multiplies cos and sin by."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    growth = math.log(scaling.factor) / math.log(scaling.original_context) if scaling.factor > 1 else 0.0
    return math.sqrt(1 + growth)
