"""Numpy arrays over the bytes of a memory-mapped file, without copying: what mapped_tensor.py does, without torch."""

from __future__ import annotations

import math
import mmap

import numpy as np

from tokenmill.checkpoint.tensor_views import TensorView, cut_places

ARRAY_TYPES = {  # by the name of the stored type; BF16 in its bits, which numpy has no type for
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "uint16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}


def view_array(buffer: mmap.mmap, dtype: str, shape: tuple[int, ...], start: int) -> np.ndarray:
    """An array over mapped bytes; the caller has checked that they exist. Copies only what lies misaligned."""
    count = math.prod(shape)
    if count == 0:
        return np.empty(shape, dtype=dtype)
    values = np.frombuffer(buffer, dtype, count, start).reshape(shape)
    return values if values.flags.aligned else values.copy()


def take_view(view: TensorView, stored: list[np.ndarray]) -> np.ndarray:
    """The array that `view` describes, of its stored sources."""
    data = stored[0] if len(stored) == 1 else np.stack(stored)
    if view.transposed:
        data = data.T
    if view.rows is None or data.ndim <= view.axis or data.shape[view.axis] == 1:
        return data
    axis, size = view.axis, data.shape[view.axis]
    begin, count, period = cut_places(view, size)
    before, after = data.shape[:axis], data.shape[axis + 1 :]
    pieces = data.reshape(*before, size // period, period, *after)
    cut = pieces[(slice(None),) * (axis + 1) + (slice(begin, begin + count),)]
    return cut.reshape(*before, size // period * count, *after)
