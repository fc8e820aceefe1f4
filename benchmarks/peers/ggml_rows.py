"""Rows quantized by llama.cpp's own library, as found in the package xllamacpp: the peer of quantize/ggml/blocks.py.

Used by gguf_low_bit.py.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from tokenmill.kernels.ggml_types import TYPES
from tokenmill.quantize.ggml.blocks import PLAIN, quantize

_THREADS = 2


@cache
def _library() -> ctypes.CDLL:
    from xllamacpp import xllamacpp

    library = ctypes.CDLL(xllamacpp.__file__)
    sizes = [ctypes.c_int64] * 3
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *sizes, ctypes.c_void_p]
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def quantize_rows(type_name: str, rows: Tensor, importance: Tensor | None = None) -> Tensor:
    """As blocks.quantize, float32 [n, in] -> uint8 [n, bytes per row]. Without an importance every column counts alike,
    since llama.cpp refuses to do without for some types."""
    if type_name in PLAIN:
        return quantize(type_name, rows, importance)
    library, kind = _library(), TYPES[type_name]
    library.ggml_quantize_init(kind.number)
    rows = rows.float().contiguous()
    weights = torch.ones(rows.shape[1]) if importance is None else importance.float().contiguous()
    out = torch.empty(rows.shape[0], kind.row_bytes(rows.shape[1]), dtype=torch.uint8)

    def part(begin: int, end: int) -> None:
        library.ggml_quantize_chunk(
            kind.number,
            rows.data_ptr(),
            out.data_ptr(),
            begin * rows.shape[1],
            end - begin,
            rows.shape[1],
            weights.data_ptr(),
        )

    step = max(1, -(-rows.shape[0] // _THREADS))
    with ThreadPoolExecutor(_THREADS) as pool:
        begins = range(0, rows.shape[0], step)
        list(pool.map(lambda begin: part(begin, min(begin + step, rows.shape[0])), begins))
    return out
