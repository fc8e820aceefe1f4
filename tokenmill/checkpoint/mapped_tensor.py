"""Tensors over the bytes of a memory-mapped file, without copying. Used by the readers of weight files."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from tokenmill.checkpoint.tensor_views import TensorView, cut_places


def view_tensor(buffer: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """A tensor over mapped bytes; the caller has checked that they exist. Copies only what lies misaligned."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)


def take_view(view: TensorView, stored: list[Tensor]) -> Tensor:
    """The tensor that `view` describes, of its stored sources."""
    data = stored[0] if len(stored) == 1 else torch.stack(stored)
    if view.transposed:
        data = data.T
    if view.rows is None:
        return data
    if view.sources[0].endswith(".weight_shape"):
        return torch.tensor([view.rows.count * (view.total_rows // view.rows.period), int(data[1])])
    return _cut(view, data)


def _cut(view: TensorView, data: Tensor) -> Tensor:
    axis = view.axis
    if data.dim() <= axis or data.shape[axis] == 1:  # one scale for the whole matrix
        return data
    begin, count, period = cut_places(view, data.shape[axis])
    pieces = data.unflatten(axis, (-1, period)).narrow(axis + 1, begin, count)
    return pieces.flatten(axis, axis + 1)
