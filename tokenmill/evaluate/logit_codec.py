"""Log-probabilities of a row as uint16: fine where the probability is, coarse where there is none.

A value is the square root of its distance below the row's largest log-probability, in 65535 steps up to the farthest.
Near the top a step is 1e-8 nats, 10 nats below it about 1e-3: weighted with the probability that changes a row's
Kullback-Leibler divergence by 1e-5 nats at most, either way, and the mean over a text by less than 1e-6.
Called by reference_cache.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_STEPS = 65535

ROW = np.dtype(
    [
        ("top", "<f4"),  # largest log-probability
        ("span", "<f4"),  # distance of the smallest below it
        ("target", "<f8"),  # log-probability of the token that follows, exact
        ("best", "<i8"),  # the most likely token
    ]
)


def encode(logprobs: Tensor, targets: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """[R, V] float64 and [R] -> (rows of ROW, codes [R, V] uint16)."""
    top, best = logprobs.max(-1)
    distance = (top[:, None] - logprobs).float()
    span = distance.amax(-1).clamp_min(torch.finfo(torch.float32).tiny)
    codes = distance.div_(span[:, None]).sqrt_().mul_(_STEPS).round_()
    rows = np.empty(len(logprobs), dtype=ROW)
    rows["top"], rows["span"] = top.cpu().numpy(), span.cpu().numpy()
    rows["target"] = logprobs.gather(-1, targets[:, None])[:, 0].cpu().numpy()
    rows["best"] = best.cpu().numpy()
    return rows, codes.to(torch.int32).cpu().numpy().astype(np.uint16)


def decode(rows: np.ndarray, codes: np.ndarray, device: torch.device | str = "cpu") -> Tensor:
    """[R, V] float64 log-probabilities that sum to one, computed on `device`."""
    bits = torch.from_numpy(codes.astype(np.int16)).to(device)  # two bytes a code cross the bus
    share = bits.to(torch.int32).bitwise_and_(0xFFFF).double().div_(_STEPS)
    span = torch.from_numpy(rows["span"].astype(np.float64))[:, None].to(device)
    top = torch.from_numpy(rows["top"].astype(np.float64))[:, None].to(device)
    return share.square_().mul_(span).neg_().add_(top).log_softmax(-1)
