"""Every weight type: rows chosen and rows in a range mean the same numbers, and every backend multiplies them.

Weights are exact; activations may be rounded to int8 per block, which bounds the error of a faster backend.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels.base import BACKENDS, select_linear
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.ggml import GgmlWeight

_WHERE = torch.device("cpu")
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BLOCK_TYPES = [name for name, kind in TYPES.items() if kind.is_block]
_ROWS, _COLS = 37, 512


def _weight(name: str, rows: int = _ROWS, cols: int = _COLS) -> LinearWeight:
    generator = np.random.default_rng(4)
    values = generator.standard_normal((rows, cols)).astype(np.float32)
    if name in _DENSE:
        return DenseWeight(StoredTensor("w", (rows, cols), name, torch.from_numpy(values).to(_DENSE[name])))
    return GgmlWeight(StoredTensor("w", (rows, cols), name, torch.from_numpy(_blocks(name, values, generator))))


def _blocks(name: str, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    kind = gguf.GGMLQuantizationType[name]
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:  # the oracle reads this type but does not write it: random codes, sane scales
        row_bytes = TYPES[name].row_bytes(values.shape[1])
        data = generator.integers(0, 256, (values.shape[0], row_bytes), dtype=np.uint8)
        blocks = data.reshape(-1, TYPES[name].block_bytes)
        half = np.frombuffer(np.float16(0.01).tobytes(), dtype=np.uint8)
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
        for place in places.get(name, (0,)):
            blocks[:, place : place + 2] = half
        return data


@pytest.mark.parametrize("name", [*_DENSE, *_BLOCK_TYPES])
def test_rows_and_ranges_agree(name: str) -> None:
    weight = _weight(name)
    rows = torch.tensor([5, 0, 36, 5])
    torch.testing.assert_close(weight.dequantize_rows(rows), weight.dequantize(0, _ROWS)[rows], rtol=0, atol=0)


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "ref"])
@pytest.mark.parametrize("tokens", [1, 2, 7, 70])
@pytest.mark.parametrize("name", [*_DENSE, *_BLOCK_TYPES])
def test_backend_multiplies_as_the_spec_says(name: str, tokens: int, backend: str) -> None:
    weight = _weight(name)
    weight.bias = torch.randn(_ROWS, generator=torch.Generator().manual_seed(1))
    choice = select_linear(weight, _WHERE, backend)
    if choice.backend != backend:
        pytest.skip(f"{backend} declined: {dict(choice.declined)[backend]}")
    x = torch.randn(tokens, _COLS, generator=torch.Generator().manual_seed(2))
    dense = weight.dequantize(0, _ROWS)
    error = (choice.run(x) - (x @ dense.T + weight.bias)).abs()
    # A rounding step of int8 is 1/127 of a block's largest value; errors add up as random ones do.
    step = x.abs().amax() / 127
    bound = 1e-4 + (0 if name in _DENSE else 4 * step * dense.square().sum(-1).sqrt() / 12**0.5)
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("backend", [backend for backend in BACKENDS if backend != "ref"])
@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("name", _BLOCK_TYPES)
def test_a_precise_weight_is_rounded_far_less(name: str, tokens: int, backend: str) -> None:
    x = torch.randn(tokens, _COLS, generator=torch.Generator().manual_seed(2))
    errors = []
    for precise in (False, True):
        weight = _weight(name)
        weight.precise = precise
        weight.bias = torch.randn(_ROWS, generator=torch.Generator().manual_seed(1))
        choice = select_linear(weight, _WHERE, backend)
        if choice.backend != backend:
            pytest.skip(f"{backend} declined: {dict(choice.declined)[backend]}")
        errors.append((choice.run(x) - (x @ weight.dequantize(0, _ROWS).T + weight.bias)).square().mean().sqrt())
    plain, precise_error = errors
    assert precise_error <= max(0.05 * plain, 1e-4)
