"""Measures the roofs of this machine through our own kernels: read bandwidth, and matrix products of a few types.

A few seconds; medians of repeats. Called by job.py and by `optimize`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from tokenmill.errors import UserError
from tokenmill.kernels import cpu

_READ_BYTES = 256 << 20
_FEATURES = 2048  # of the square matrices
_TOKENS = 256
_ROW_BYTES = {
    "float32": ("F32", 4 * _FEATURES),
    "q4_1": ("Q4_1", _FEATURES // 32 * 20),
    "q8_0": ("Q8_0", _FEATURES // 32 * 34),
}


def read_bandwidth_gb_s() -> float:
    """Bytes per second of a sum over an array larger than any cache, all threads."""
    array = torch.ones(_READ_BYTES // 4)
    return _READ_BYTES / _median_seconds(array.sum, 7) / 1e9


def product_gflops() -> dict[str, float]:
    """Arithmetic rate of [256, 2048] x [2048, 2048], by weight type."""
    reason = cpu.unavailable(torch.device("cpu"))
    if reason:
        raise UserError(f"this machine cannot be measured: {reason}")
    x, y = torch.randn(_TOKENS, _FEATURES), torch.empty(_TOKENS, _FEATURES)
    rates = {}
    for name, (type_name, row_bytes) in _ROW_BYTES.items():
        data = torch.zeros(_FEATURES, row_bytes, dtype=torch.uint8)
        packed = cpu.module().PackedLinear(type_name, data, _FEATURES, _FEATURES, "", False)

        def multiply(packed: object = packed) -> None:
            cpu.module().linear(cpu.pool(), x, [packed], [None], [y])

        rates[name] = 2 * _TOKENS * _FEATURES**2 / _median_seconds(multiply, 5) / 1e9
    return rates


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return median(times)
