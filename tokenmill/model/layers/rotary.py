"""Rotary position tables: cos and sin for every position, with the frequency scalings that models use.

Built once per model and context length; all layers of one frequency base share a table. Longrope has two lists of
divisors, for contexts up to the original length and beyond: the engine's context length decides, once for all
sequences, since keys of both kinds in one cache do not fit together.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.checkpoint.description import ModelDescription, RopeScaling
from tokenmill.checkpoint.mixers import Attention
from tokenmill.checkpoint.rope_divisors import longrope_magnitude
from tokenmill.log import get_logger
from tokenmill.model.reader import WeightReader

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)
_CHUNK = 4096  # positions whose angles are computed at a time, in float64


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    cos: Tensor  # [positions, rotary_dim / 2] float32
    sin: Tensor
    interleaved: bool  # pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
    rotates_keys: bool = True  # False: queries alone pass this table

    @property
    def rotary_dim(self) -> int:
        """How many leading numbers of each head are rotated."""
        return 2 * self.cos.shape[1]


def build_rotary_tables(
    reader: WeightReader, description: ModelDescription, num_positions: int
) -> dict[str, RotaryTable]:
    """Every table of the model, by name. A GGUF may store divisors of the full table instead of the scaling rule. Under
    the empty name: how layers without rotation scale their queries, where they do."""
    d = description
    tables = {}
    for rope in d.rope_tables:
        count = rope.rotary_dim // 2
        divisors = reader.optional_vector("rope_freqs.weight", count) if rope.name == "full" else None
        tables[rope.name] = build_rotary_table(
            rope.rotary_dim, num_positions, rope.theta, rope.scaling, d.rope_interleaved, divisors, reader.own
        )
    for mixer in (mixer for layer in d.layers for mixer in layer.mixers):
        if isinstance(mixer, Attention) and mixer.temperature is not None and not mixer.rope:
            size = mixer.head_dim
            tables[""] = build_temperature_table(reader, size, num_positions, mixer.temperature, d.rope_interleaved)
    return tables


def build_rotary_table(
    rotary_dim: int,
    num_positions: int,
    theta: float,
    scaling: RopeScaling,
    interleaved: bool,
    frequency_divisors: Tensor | None = None,
    own: Callable[[np.ndarray], Any] | None = None,
) -> RotaryTable:
    """`frequency_divisors` [rotary_dim / 2]: GGUF's precomputed llama3 factors, used instead of `scaling`. `own`: as
    WeightReader.own; None: tensors."""
    frequencies = theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    magnitude = 1.0
    if frequency_divisors is not None:
        frequencies = frequencies / np.asarray(frequency_divisors, dtype=np.float64)
    elif scaling.kind == "longrope":
        frequencies, magnitude = _longrope(frequencies, num_positions, scaling)
    else:
        frequencies, magnitude = _scale(frequencies, rotary_dim, theta, scaling)
    cos, sin = (np.empty((num_positions, len(frequencies)), dtype=np.float32) for _ in range(2))
    for begin in range(0, num_positions, _CHUNK):
        end = min(begin + _CHUNK, num_positions)
        angles = np.outer(np.arange(begin, end, dtype=np.float64), frequencies)
        cos[begin:end] = np.cos(angles) * magnitude
        sin[begin:end] = np.sin(angles) * magnitude
    own = own or _tensor
    return RotaryTable(own(cos), own(sin), interleaved)


def _tensor(values: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(values)


def build_temperature_table(
    reader: WeightReader, head_dim: int, num_positions: int, temperature: tuple[float, float], interleaved: bool
) -> RotaryTable:
    """Llama 4's scale of queries by position as a rotation by no angle, so that it needs no op of its own."""
    slope, floor = temperature
    positions = np.arange(num_positions, dtype=np.float64)
    scales = 1 + slope * np.log1p(np.floor((positions + 1) / floor))
    cos = np.repeat(scales.astype(np.float32)[:, None], head_dim // 2, axis=1)
    return RotaryTable(reader.own(cos), reader.own(np.zeros_like(cos)), interleaved, rotates_keys=False)


def _scale(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    if scaling.kind == "default":
        return frequencies, 1.0
    if scaling.kind == "linear":
        return frequencies / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(frequencies, scaling), 1.0
    assert scaling.kind == "yarn", scaling.kind
    return _yarn(frequencies, head_dim, theta, scaling), _yarn_magnitude(scaling)


def _longrope(frequencies: np.ndarray, num_positions: int, scaling: RopeScaling) -> tuple[np.ndarray, float]:
    beyond = num_positions > scaling.original_context
    _log.info(
        "longrope: the %s factors for all sequences, for a context of %d tokens (%d originally)",
        "long" if beyond else "short",
        num_positions,
        scaling.original_context,
    )
    factors = scaling.long_factors if beyond else scaling.short_factors
    return frequencies / np.array(factors, dtype=np.float64), longrope_magnitude(scaling)


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Long wavelengths are scaled by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_context / wavelength
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clip(0.0, 1.0)
    scaled: np.ndarray = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    return scaled


def _yarn(frequencies: np.ndarray, head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """High frequencies are kept, low ones are scaled, with a linear ramp between them."""

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of zero width would divide by zero
    ramp = ((np.arange(head_dim // 2, dtype=np.float64) - low) / (high - low)).clip(0.0, 1.0)
    scaled: np.ndarray = frequencies / scaling.factor * ramp + frequencies * (1 - ramp)
    return scaled


def _yarn_magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_growth(scaling, scaling.mscale) / yarn_growth(scaling, scaling.mscale_all_dim)
    return yarn_growth(scaling, 1.0)


def yarn_growth(scaling: RopeScaling, mscale: float) -> float:
    """By how much YaRN enlarges magnitudes for its factor."""
    return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0
