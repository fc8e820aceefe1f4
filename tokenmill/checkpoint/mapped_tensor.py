"""Tensors over the bytes of a memory-mapped file, without copying. Used by the readers of weight files."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor


def view_tensor(buffer: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """A tensor over mapped bytes; the caller has checked that they exist. Copies only what lies misaligned."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)
