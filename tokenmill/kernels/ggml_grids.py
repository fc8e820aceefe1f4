"""The grids of ggml's low-bit types: which short vectors of levels a code stands for.

A point of a grid is eight (IQ1, IQ2) or four (IQ3) levels; the file format fixes which ones exist. The numbers are in
ggml_grids.inc, which the C++ kernels include too; a test compares them with the gguf package's. Used by
ref_ggml_grids.py and the quantizers.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# (name, points, levels in a point, value of each level), in the order of the file
_GRIDS: tuple[tuple[str, int, int, tuple[int, ...]], ...] = (
    ("IQ2_XXS", 256, 8, (8, 25, 43)),
    ("IQ2_XS", 512, 8, (8, 25, 43)),
    ("IQ2_S", 1024, 8, (8, 25, 43)),
    ("IQ1_S", 2048, 8, (-1, 0, 1)),
    ("IQ3_XXS", 256, 4, (4, 12, 20, 28, 36, 44, 52, 62)),
    ("IQ3_S", 512, 4, (1, 3, 5, 7, 9, 11, 13, 15)),
)


@cache
def grid(name: str) -> Tensor:
    """int8 [points, levels of a point]."""
    begin = 0
    for other, points, size, values in _GRIDS:
        if other == name:
            words = torch.tensor(_words()[begin : begin + points], dtype=torch.int32)
            bits = 2 if size == 8 else 3
            levels = (words.unsqueeze(1) >> bits * torch.arange(size)) & (2**bits - 1)
            return torch.tensor(values, dtype=torch.int8)[levels.long()]
        begin += points
    raise KeyError(name)


@cache
def _words() -> tuple[int, ...]:
    text = (Path(__file__).parent / "ggml_grids.inc").read_text(encoding="ascii")
    return tuple(int(word, 16) for word in re.findall(r"0x(\w{4}),", text))
