"""The parameters of recurrent ops: which layer's state they continue, and their small tensors.

Passed from layers to Ops; `arguments` is what the kernels of kernels/ref_recurrent.py take after inputs and states. Of
the two arrays that a recurrent layer keeps per sequence, the convolution has the first and the scan the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionSpec:
    op: ClassVar[str] = "convolve"
    array: ClassVar[int] = 0

    layer: int
    weight: Tensor  # [width, channels], oldest input first
    bias: Tensor | None

    def arguments(self) -> tuple[Any, ...]:
        return self.weight, self.bias


@dataclass(frozen=True, slots=True, eq=False)
class MambaScan:
    """Inputs: x, dt, b, c."""

    op: ClassVar[str] = "mamba_scan"
    array: ClassVar[int] = 1

    layer: int
    a: Tensor  # [channels, state size], negative
    d: Tensor  # [channels]

    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.d


@dataclass(frozen=True, slots=True, eq=False)
class Mamba2Scan:
    """Inputs: x, b and c side by side; dt."""

    op: ClassVar[str] = "mamba2_scan"
    array: ClassVar[int] = 1

    layer: int
    a: Tensor  # [heads], negative
    d: Tensor  # [heads]
    dt_bias: Tensor  # [heads]
    num_groups: int
    dt_scale: float
    dt_limits: tuple[float, float]

    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.d, self.dt_bias, self.num_groups, self.dt_scale, self.dt_limits


@dataclass(frozen=True, slots=True, eq=False)
class DeltaScan:
    """Inputs: q, k and v side by side; beta; dt."""

    op: ClassVar[str] = "delta_scan"
    array: ClassVar[int] = 1

    layer: int
    a: Tensor  # [value heads], negative
    dt_bias: Tensor  # [value heads]
    num_key_heads: int

    def arguments(self) -> tuple[Any, ...]:
        return self.a, self.dt_bias, self.num_key_heads


ScanSpec = MambaScan | Mamba2Scan | DeltaScan
