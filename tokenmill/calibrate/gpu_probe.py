"""Measures the roofs of one GPU through the engine's own kernels: bandwidth, matrix products, a launch.

Every product is timed at several row counts, because different kernels serve decodes and prompts, and on copies of its
weights in turn, so that they come from memory. How work is timed is the caller's to say, so that all of this runs
without a GPU in tests. A few seconds; called by job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from tokenmill.calibrate.device_timing import Work, device_seconds
from tokenmill.errors import UserError
from tokenmill.kernels.base import Declined

Timing = Callable[[Sequence[Work]], float]  # seconds of one call, where the calls take turns
WEIGHTS = ("bf16", "fp8", "int8", "int4")  # float16 checkpoints are multiplied as bf16
ROWS = (1, 8, 64, 512, 4096)
_FEATURES = 8192
_READ_BYTES = 2 << 30
_COLD_BYTES = 256 << 20  # beyond the caches of every GPU
_MAX_COPIES = 16
_GROUP = 128


class Linear(Protocol):
    """A weight ready to be multiplied with."""

    @property
    def nbytes(self) -> int: ...

    def multiply(self, x: Tensor) -> Tensor: ...


Make = Callable[[Tensor, str], Linear]  # values [features, features] and the kind of weights


@dataclass(frozen=True, slots=True)
class ProductRate:
    """[rows, features] x [features, features] with weights of one kind."""

    weights: str
    rows: int
    microseconds: float
    tflops: float
    gb_s: float  # of weights read


@dataclass(frozen=True, slots=True)
class GpuRoofs:
    name: str
    memory_bytes: int
    bandwidth_gb_s: float
    launch_us: float  # of the smallest kernel in a graph
    products: tuple[ProductRate, ...]
    skipped: tuple[str, ...] = field(default=())

    def gflops(self) -> dict[str, float]:
        """The best rate of each kind of weights."""
        best: dict[str, float] = {}
        for each in self.products:
            best[each.weights] = max(best.get(each.weights, 0.0), 1e3 * each.tflops)
        return best


def find_gpu() -> str:
    """The name of the GPU that an engine would use; empty if there is none."""
    return torch.cuda.get_device_name(torch.cuda.current_device()) if torch.cuda.is_available() else ""


def probe_gpu(
    device: torch.device | None = None,
    timing: Timing | None = None,
    make: Make | None = None,
    *,
    name: str = "",
    memory_bytes: int = 0,
    features: int = _FEATURES,
    read_bytes: int = _READ_BYTES,
    rows: Sequence[int] = ROWS,
    weights: Sequence[str] = WEIGHTS,
) -> GpuRoofs:
    """All roofs. Without arguments, those of the current GPU."""
    device = device or torch.device("cuda", torch.cuda.current_device())
    timing = timing or device_seconds
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory_bytes = name or properties.name, memory_bytes or properties.total_memory
    products: list[ProductRate] = []
    skipped: list[str] = []
    for kind in weights:
        try:
            products += product_rates(kind, device, timing, make or engine_linear, features, rows)
        except (Declined, UserError, RuntimeError, NotImplementedError) as error:  # a chip without this arithmetic
            skipped.append(f"{kind} products: {str(error).splitlines()[0][:160]}")
    one = torch.zeros(1, device=device)
    return GpuRoofs(
        name,
        memory_bytes,
        bandwidth_gb_s(device, timing, read_bytes),
        1e6 * timing([lambda: one.add_(1.0)]),
        tuple(products),
        tuple(skipped),
    )


def bandwidth_gb_s(device: torch.device, timing: Timing, read_bytes: int = _READ_BYTES) -> float:
    """Bytes per second of a sum over an array larger than any cache."""
    array = torch.ones(read_bytes // 4, device=device)
    return read_bytes / timing([array.sum]) / 1e9


def product_rates(
    weights: str, device: torch.device, timing: Timing, make: Make, features: int, rows: Sequence[int]
) -> list[ProductRate]:
    """One kind of weights at each row count, by the kernel that the engine chooses there."""

    def copy() -> Linear:
        return make(torch.randn(features, features, device=device, dtype=torch.bfloat16), weights)

    copies = [copy()]
    nbytes = copies[0].nbytes
    copies += [copy() for _ in range(1, min(_MAX_COPIES, -(-_COLD_BYTES // nbytes)))]
    found = []
    for count in rows:
        x = torch.randn(count, features, device=device, dtype=torch.bfloat16)
        seconds = timing([partial(each.multiply, x) for each in copies])
        flops = 2.0 * count * features**2
        found.append(ProductRate(weights, count, 1e6 * seconds, flops / seconds / 1e12, nbytes / seconds / 1e9))
    return found


def engine_linear(values: Tensor, weights: str) -> Linear:
    """As the engine multiplies: bf16, or rounded at load."""
    from tokenmill.kernels.triton.matmul.linear import DenseLinear  # imports Triton
    from tokenmill.kernels.triton.matmul.make import quantize_at_load

    return DenseLinear(values, None) if weights == "bf16" else quantize_at_load(values, None, weights, _GROUP)
