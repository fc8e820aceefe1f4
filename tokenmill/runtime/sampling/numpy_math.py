"""What the sampler computes with numpy arrays, as torch_math.py does with tensors. The rows are on the CPU, and the C++
kernels find the largest of them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from tokenmill.kernels import cpu


def computing() -> AbstractContextManager[Any]:
    return nullcontext()


def log_softmax(rows: np.ndarray) -> np.ndarray:
    """float32, over the last axis."""
    shifted = rows - rows.max(-1, keepdims=True)
    total = np.exp(shifted).sum(-1, keepdims=True, dtype=np.float64)
    return shifted - np.log(total).astype(np.float32)


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64 [vocab]."""
    values = (logits / np.float32(temperature)).astype(np.float64)
    values -= values.max()
    np.exp(values, out=values)
    values /= values.sum()
    return values


def likeliest(probabilities: np.ndarray, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest probabilities in descending order, and their tokens; `logits` are what they were made of."""
    ids: np.ndarray = cpu.top_k(logits[None], count)[1][0]
    return probabilities[ids], ids


def descending(probabilities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(-probabilities, kind="stable")  # of equals the lower token first
    return probabilities[order], order


def scattered(values: np.ndarray, ids: np.ndarray, size: int) -> np.ndarray:
    """[size] float64: `values` at `ids`, zero elsewhere."""
    whole = np.zeros(size)
    whole[ids] = values
    return whole


def beside(values: np.ndarray, _other: np.ndarray) -> np.ndarray:
    """`values` where `_other` is."""
    return values


def pick(probabilities: np.ndarray, point: float) -> int:
    mass = probabilities.cumsum(-1)
    index = int(np.searchsorted(mass, point * float(mass[-1]), side="right"))
    if index >= len(probabilities):  # rounding at the very end
        index = int(probabilities.nonzero()[0][-1])
    return index


def residual(target: np.ndarray, proposal: np.ndarray) -> np.ndarray:
    rest = (target - proposal).clip(0.0)
    return np.where(rest.sum(-1, keepdims=True) > 0.0, rest, target)


def own_and_rank(logprobs: np.ndarray, token_ids: Sequence[int]) -> tuple[list[float], list[int]]:
    own = logprobs[np.arange(len(token_ids)), list(token_ids)]
    return own.tolist(), ((logprobs > own[:, None]).sum(-1) + 1).tolist()


def best(logprobs: np.ndarray, count: int) -> tuple[list[list[int]], list[list[float]]]:
    values, ids = cpu.top_k(np.ascontiguousarray(logprobs), count)
    return ids.tolist(), values.tolist()
