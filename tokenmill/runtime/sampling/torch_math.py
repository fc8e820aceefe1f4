"""What the sampler computes with tensors, wherever they are; numpy_math.py is the same for numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


def computing() -> AbstractContextManager[Any]:
    return torch.inference_mode()


def log_softmax(rows: Tensor) -> Tensor:
    return rows.log_softmax(-1)


def softmax(logits: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).softmax(-1, dtype=torch.float64)


def likeliest(probabilities: Tensor, _logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, ids = probabilities.topk(count)
    return values, ids


def descending(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = probabilities.sort(descending=True, stable=True)  # of equals the lower token first
    return values, ids


def scattered(values: Tensor, ids: Tensor, size: int) -> Tensor:
    return values.new_zeros(size).scatter_(0, ids, values)


def beside(values: Tensor, other: Tensor) -> Tensor:
    return values.to(other.device)


def pick(probabilities: Tensor, point: float) -> int:
    mass = probabilities.cumsum(-1)
    index = int(torch.searchsorted(mass, point * float(mass[-1]), right=True))
    if index >= probabilities.numel():  # rounding at the very end
        index = int(probabilities.nonzero()[-1])
    return index


def residual(target: Tensor, proposal: Tensor) -> Tensor:
    rest = (target - proposal).clamp_min(0.0)
    return torch.where(rest.sum(-1, keepdim=True) > 0.0, rest, target)


def own_and_rank(logprobs: Tensor, token_ids: Sequence[int]) -> tuple[list[float], list[int]]:
    own = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device)[:, None])
    return own.flatten().tolist(), ((logprobs > own).sum(-1) + 1).tolist()


def best(logprobs: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    values, ids = logprobs.topk(count)
    return ids.tolist(), values.tolist()
