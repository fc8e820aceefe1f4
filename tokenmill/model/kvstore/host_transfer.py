"""Copies pages of numpy arrays out of a KV store and into it: what transfer.py does for tensors, without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class PagesOnHost:
    """An export that is complete."""

    def __init__(self, pages: list[memoryview]) -> None:
        self._pages = pages

    def wait(self) -> list[memoryview]:
        return self._pages


def copy_out(arrays: Sequence[np.ndarray], page: int) -> memoryview:
    parts = [np.ascontiguousarray(array[:, page]).reshape(-1).view(np.uint8) for array in arrays]
    return np.concatenate(parts).data


def copy_in(arrays: Sequence[np.ndarray], page: int, data: memoryview) -> None:
    source, begin = np.frombuffer(data, dtype=np.uint8), 0
    for array in arrays:
        part = array[:, page]
        part[...] = source[begin : begin + part.nbytes].view(part.dtype).reshape(part.shape)
        begin += part.nbytes
    assert begin == source.size, "a page of another store"
