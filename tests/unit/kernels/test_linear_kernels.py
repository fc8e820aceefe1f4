"""Packed linear weights against dequantize-and-multiply in float64, through the Python binding.

The C++ conformance test (csrc/cpu/test/linear_test.cpp) sweeps shapes, scales and instruction sets; this file checks
that the same holds through the binding for every GGUF type, with the `gguf` package as the judge of the bytes.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

_cpu = pytest.importorskip("tokenmill.kernels._cpu", reason="the C++ kernels are not built")

PLAIN = ["F32", "F16", "BF16"]
# Byte offsets of the half-precision scale and minimum of a block, and a size for them that makes weights of order 1.
HALF_FIELDS = {
    "Q4_0": [(0, 0.2)],
    "Q4_1": [(0, 0.2), (2, -1.5)],
    "Q5_0": [(0, 0.1)],
    "Q5_1": [(0, 0.1), (2, -1.5)],
    "Q8_0": [(0, 0.01)],
    "Q2_K": [(80, 0.1), (82, 0.1)],
    "Q3_K": [(108, 0.02)],
    "Q4_K": [(0, 0.005), (2, 0.03)],
    "Q5_K": [(0, 0.003), (2, 0.03)],
    "Q6_K": [(208, 0.0005)],
    "IQ4_NL": [(0, 0.01)],
    "IQ4_XS": [(0, 0.0005)],
    "IQ2_XXS": [(0, 0.002)],
    "IQ2_XS": [(0, 0.002)],
    "IQ2_S": [(0, 0.002)],
    "IQ3_XXS": [(0, 0.001)],
    "IQ3_S": [(0, 0.001)],
    "IQ1_S": [(0, 0.02)],
    "TQ1_0": [(52, 0.1)],
    "TQ2_0": [(64, 0.1)],
}
QUANTIZED = [*HALF_FIELDS, "MXFP4", "IQ1_M", "NVFP4"]


def random_blocks(name: str, rows: int, cols: int, rng: np.random.Generator) -> np.ndarray:
    """Random bytes of type `name`, [rows, bytes per row], with sane scales."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, cols // block, size), dtype=np.uint8)
    for offset, value in HALF_FIELDS.get(name, []):
        scale = (value * rng.uniform(0.5, 1.5, data.shape[:2])).astype(np.float16)
        data[:, :, offset : offset + 2] = scale[..., None].view(np.uint8)
    if name == "MXFP4":
        data[:, :, 0] = 124 + data[:, :, 0] % 4
    if name == "NVFP4":
        data[:, :, :4] = 16 + data[:, :, :4] % 32
    if name == "IQ1_M":  # 0x2418 to 0x251f: four bits of the scale at the top of each of four words
        for byte, bits in ((49, 0), (51, 1), (53, 4), (55, 2)):
            data[:, :, byte] = data[:, :, byte] & (31 if byte < 53 else 15) | bits << 4
    return data.reshape(rows, -1)


def random_weight(name: str, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(len(name) * 131 + rows)
    kind = gguf.GGMLQuantizationType[name]
    if name in PLAIN:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        raw = gguf.quants.quantize(values, kind).view(np.uint8)
    else:
        raw = random_blocks(name, rows, cols, rng)
    plain = raw.view(np.float32) if name == "F32" else gguf.quants.dequantize(raw, kind)
    return raw, plain.reshape(rows, cols).astype(np.float64)


def multiply(packed: object, x: torch.Tensor, rows: int, bias: torch.Tensor | None = None) -> np.ndarray:
    out = torch.full((x.shape[0], rows), torch.nan)
    _cpu.linear(_cpu.Pool.shared(2), x, [packed], [bias], [out])
    return out.numpy().astype(np.float64)


def activation_bound(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Largest error that int8 rounding of both sides per 256 can make: loose, but a wrong lane breaks it."""
    bound = np.zeros((x.shape[0], weight.shape[0]))
    for k in range(0, weight.shape[1], 256):
        w, v = np.abs(weight[:, k : k + 256]), np.abs(x[:, k : k + 256])
        bound += np.outer(v.max(1), w.sum(1)) / 254 + np.outer(v.sum(1), w.max(1)) * 1.5 / 127
    return bound * 1.01 + 1e-4


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 40])
def test_quantized_product_is_within_int8_rounding(name: str, num_tokens: int) -> None:
    rows, cols = 75, 768
    raw, weight = random_weight(name, rows, cols)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, cols, generator=generator)
    bias = torch.randn(rows, generator=generator)
    packed = _cpu.PackedLinear(name, torch.from_numpy(raw), rows, cols)
    exact = x.numpy().astype(np.float64) @ weight.T + bias.numpy()
    error = np.abs(multiply(packed, x, rows, bias) - exact)
    assert (error <= activation_bound(weight, x.numpy())).all()
    # The worst case is rare: typically the error is a fraction of a percent of the result.
    assert np.sqrt((error**2).mean()) < 0.012 * np.sqrt((exact**2).mean())


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_float_product_is_exact_to_float32(name: str, num_tokens: int) -> None:
    rows, cols = 33, 515
    raw, weight = random_weight(name, rows, cols)
    x = torch.randn(num_tokens, cols, generator=torch.Generator().manual_seed(1))
    packed = _cpu.PackedLinear(name, torch.from_numpy(raw), rows, cols)
    exact = x.numpy().astype(np.float64) @ weight.T
    np.testing.assert_allclose(multiply(packed, x, rows), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_grouped_integers_stay_in_their_size(bits: int, affine: bool, num_tokens: int) -> None:
    rows, cols, group = 48, 512, 128
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (rows, cols), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(rows, cols // group, generator=generator) + 0.5).half().float()
    zeros = torch.randint(0, 2**bits, scales.shape, generator=generator).float() if affine else None
    given = codes[:, 1::2] << 4 | codes[:, 0::2] if bits == 4 else codes
    packed = _cpu.PackedLinear.grouped(given, scales, zeros, None, bits)
    per_weight = bits + (1 if affine else 0.5)  # a half for the scale of 32 weights, and one for their minimum
    assert packed.nbytes == rows * cols * per_weight / 8
    middle = 2 ** (bits - 1) if zeros is None else zeros.repeat_interleave(group, 1)
    weight = (codes.float() - middle) * scales.repeat_interleave(group, 1)
    x = torch.randn(num_tokens, cols, generator=generator)
    exact = x.numpy().astype(np.float64) @ weight.numpy().astype(np.float64).T
    error = multiply(packed, x, rows) - exact
    assert np.sqrt((error**2).mean()) < 0.012 * np.sqrt((exact**2).mean())


def test_grouped_integers_of_other_widths_are_declined() -> None:
    with pytest.raises(ValueError, match="2 to 6 bits"):
        _cpu.PackedLinear.grouped(torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), None, None, 7)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_row_of_a_small_batch_equals_the_row_alone(name: str) -> None:
    rows, cols = 48, 512
    raw, _ = random_weight(name, rows, cols)
    x = torch.randn(4, cols, generator=torch.Generator().manual_seed(2))
    packed = _cpu.PackedLinear(name, torch.from_numpy(raw), rows, cols)
    together = multiply(packed, x, rows)
    for row in range(4):
        assert (multiply(packed, x[row : row + 1], rows)[0] == together[row]).all()


def test_unsupported_type_and_shape_are_declined_with_the_reason() -> None:
    with pytest.raises(ValueError, match="Q8_1"):
        _cpu.PackedLinear("Q8_1", torch.zeros(64, dtype=torch.uint8), 1, 256)
    with pytest.raises(ValueError, match="multiple of 256"):
        _cpu.PackedLinear("Q4_K", torch.zeros(1, 144, dtype=torch.uint8), 1, 192)
