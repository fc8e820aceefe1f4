"""Every ggml type against the gguf package's own dequantization, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as oracle
from gguf.quants import quantize

from tokenmill.errors import UserError
from tokenmill.kernels.ggml_types import TYPES, TYPES_BY_NUMBER, UNREAD_TYPE_NAMES
from tokenmill.kernels.ref_ggml import dequantize

BLOCK_TYPES = [name for name, layout in TYPES.items() if layout.is_block]
QUANTIZABLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]

# Byte offsets of the float16 scales in a block, so that random bytes do not make infinities by accident.
HALF_OFFSETS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "IQ1_S": (0,),
    "IQ1_M": (),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "NVFP4": (),
}
EXTREME_HALVES = np.array([0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 6e-8, -6e-8, 6.1e-5, 0.3333], dtype=np.float16)


def random_blocks(name: str, rows: int, blocks: int, extreme: bool, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    layout = TYPES[name]
    data = generator.integers(0, 256, (rows, blocks, layout.block_bytes), dtype=np.uint8)
    for offset in HALF_OFFSETS[name]:
        halves = generator.normal(0, 0.05, (rows, blocks)).astype(np.float16)
        if extreme:
            halves = generator.choice(EXTREME_HALVES, (rows, blocks))
        data[:, :, offset : offset + 2] = halves[..., None].view(np.uint8)
    if name == "IQ1_M":  # its scale lies in the top four bits of four words: no infinities either
        data[:, :, 55] &= 0xBF
    return data.reshape(rows, -1)


def assert_same_bits(actual: torch.Tensor, expected: np.ndarray) -> None:
    assert actual.dtype == torch.float32
    assert tuple(actual.shape) == expected.shape
    np.testing.assert_array_equal(actual.numpy().view(np.uint32), expected.view(np.uint32))


def test_table_agrees_with_gguf() -> None:
    for name, layout in TYPES.items():
        number = gguf.GGMLQuantizationType[name]
        assert (layout.block_size, layout.block_bytes) == gguf.GGML_QUANT_SIZES[number]
        assert layout.number == number
    known = {int(member): member.name for member in gguf.GGMLQuantizationType}
    ours = {number: layout.name for number, layout in TYPES_BY_NUMBER.items()} | UNREAD_TYPE_NAMES
    assert all(known.get(number, name) == name for number, name in ours.items())


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_random_blocks(name: str, extreme: bool) -> None:
    data = random_blocks(name, rows=37, blocks=5, extreme=extreme)
    with np.errstate(over="ignore"):  # the largest MXFP4 exponents overflow to infinity
        expected = oracle(data, gguf.GGMLQuantizationType[name])
    assert_same_bits(dequantize(name, torch.from_numpy(data)), expected)


@pytest.mark.parametrize("name", QUANTIZABLE)
def test_quantized_values(name: str) -> None:
    values = np.random.default_rng(1).normal(0, 3, (8, 512)).astype(np.float32)
    values[0] = 0
    values[1, ::7] *= 1000
    data = quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    result = dequantize(name, torch.from_numpy(data))
    assert_same_bits(result, oracle(data, gguf.GGMLQuantizationType[name]))
    scale = np.abs(values).reshape(8, 16, 32).max(-1, keepdims=True)
    error = np.abs(result.numpy() - values).reshape(8, 16, 32) / np.maximum(scale, 1e-9)
    assert error.max() < (0.26 if name == "MXFP4" else 0.15)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_leading_dimensions_and_strides(name: str) -> None:
    data = torch.from_numpy(random_blocks(name, rows=12, blocks=2, extreme=False))
    plain = dequantize(name, data)
    folded = dequantize(name, data.view(3, 4, -1))
    assert folded.shape == (3, 4, 2 * TYPES[name].block_size)
    assert torch.equal(folded.view(12, -1), plain)
    assert torch.equal(dequantize(name, data[::3]), plain[::3])
    assert torch.equal(dequantize(name, data[0]), plain[0])


def test_plain_types_in_their_own_dtype() -> None:
    values = torch.randn(4, 8).to(torch.bfloat16)
    assert torch.equal(dequantize("BF16", values), values.float())


def test_unknown_type_names_the_valid_ones() -> None:
    with pytest.raises(UserError, match="Q4_K"):
        dequantize("Q8_1", torch.zeros(1, 1, dtype=torch.uint8))
