"""Measured op times on one H200 (plan/data/h200_profiles.npz), interpolated in logarithms.

Owns reading and interpolating the tables; scaling to other devices is roofline.py's. Each answer is a line of samples
(points, milliseconds). Made by benchmarks/make_profile_tables.py, which names source, licence and date.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import NamedTuple

import numpy as np

MEASURED_ON = "h200-sxm"
GEMM_DTYPES = ("bfloat16", "fp8")
EXPERT_DTYPES = {"bfloat16": 0, "fp8": 1, "fp8_block": 2, "mxfp4": 3, "int4": 4}
Samples = tuple[list[float], list[float]]  # points, milliseconds


@cache
def _arrays() -> dict[str, np.ndarray]:
    with (resources.files("tokenmill.plan") / "data" / "h200_profiles.npz").open("rb") as file, np.load(file) as stored:
        return {
            name: stored[name].astype(np.float64) if stored[name].dtype == np.float16 else stored[name]
            for name in stored.files
        }


def _weights(sizes: np.ndarray, value: float) -> tuple[int, float]:
    """(lower index, share of the upper one) of a size on a logarithmic axis, clamped to the table."""
    position = float(np.interp(np.log2(value), np.log2(sizes), np.arange(len(sizes))))
    low = min(int(position), len(sizes) - 2)
    return low, position - low


def gemm(dtype: str, outputs: int, inputs: int) -> Samples:
    """Milliseconds of [m, inputs] x [inputs, outputs] over m. Beyond the table's sizes time grows with the matrix."""
    arrays = _arrays()
    sizes = arrays["gemm_sizes"]
    grid = arrays["gemm_ms"][GEMM_DTYPES.index(dtype)]  # [m, n, k] of log2 ms
    (n, share_n), (k, share_k) = _weights(sizes, outputs), _weights(sizes, inputs)
    corner = grid[:, n : n + 2, k : k + 2]
    weight = np.outer([1 - share_n, share_n], [1 - share_k, share_k])
    known = np.isfinite(corner)  # one corner of the grid was too big to measure: its neighbours stand in
    weight = np.where(known, np.maximum(weight, 1e-9), 0.0)
    log_ms = (np.where(known, corner, 0.0) * weight).sum((1, 2)) / weight.sum((1, 2))
    beyond = max(1.0, outputs / sizes[-1]) * max(1.0, inputs / sizes[-1])
    return [float(m) for m in arrays["gemm_rows"]], [float(x) for x in 2.0**log_ms * beyond]


def _nearest(keys: np.ndarray, wanted: tuple[float, ...]) -> int:
    distance = np.abs(np.log2(np.maximum(keys, 1)) - np.log2(np.maximum(wanted, 1))).sum(1)
    return int(distance.argmin())


def decode_attention(head_dim: int, kv_heads: int, heads: int, kv_bytes: int) -> list[tuple[float, Samples]]:
    """For each number of KV-head groups in the batch: (batch x kv_heads, milliseconds over context length).

    The kernel's work is batch x KV heads, so the nearest measured number of KV heads serves with the batch scaled.
    """
    arrays = _arrays()
    row = _nearest(arrays["decode_keys"], (head_dim, min(kv_heads, 8), heads, kv_bytes))
    measured_dim, measured_kv = (int(x) for x in arrays["decode_keys"][row, :2])
    contexts = arrays["decode_step"] + 1
    lines = []
    for batch, log_ms in zip(arrays["decode_batch_size"], arrays["decode_ms"][row], strict=True):
        known = np.isfinite(log_ms)
        if known.sum() < 8:  # too big for the measuring machine's memory: larger batches are extrapolated
            continue
        ms = 2.0 ** log_ms[known] * max(1.0, head_dim / measured_dim)
        lines.append(
            (float(batch) * measured_kv / kv_heads, ([float(c) for c in contexts[known]], [float(x) for x in ms]))
        )
    return lines


def prefill_attention(head_dim: int, kv_heads: int, heads: int, kv_bytes: int) -> Samples:
    """Milliseconds of causal attention over one prompt, over its length; scaled by query heads from the nearest row."""
    arrays = _arrays()
    row = _nearest(arrays["prefill_keys"], (head_dim, kv_heads, heads, kv_bytes))
    scale = max(1.0, heads / arrays["prefill_keys"][row, 2]) * max(1.0, head_dim / arrays["prefill_keys"][row, 0])
    log_ms = arrays["prefill_ms"][row]
    known = np.isfinite(log_ms)
    lengths = arrays["prefill_isl"][known]
    return [float(x) for x in lengths], [float(x) for x in 2.0 ** log_ms[known] * scale]


class ExpertShape(NamedTuple):
    """The experts of one layer, and how they are sharded: inside each (tp) and into groups of whole ones (ep)."""

    hidden: int
    width: int
    per_token: int
    num_experts: int
    tp: int
    ep: int


def experts(dtype: str, wanted: ExpertShape) -> tuple[Samples, ExpertShape]:
    """Milliseconds of one layer's experts on one rank over tokens, and the shape that was measured."""
    arrays = _arrays()
    keys = arrays["moe_keys"]
    rows = np.flatnonzero(keys[:, 4] == EXPERT_DTYPES[dtype])
    shape = keys[rows][:, [0, 1, 2, 3, 5, 6]]
    best = rows[_nearest(shape, wanted)]
    log_ms = arrays["moe_ms"][best]
    known = np.isfinite(log_ms)
    samples = [float(x) for x in arrays["moe_tokens"][known]], [float(x) for x in 2.0 ** log_ms[known]]
    return samples, ExpertShape(*(int(x) for x in keys[best][[0, 1, 2, 3, 5, 6]]))
