"""Every ggml type we write: the same bits from C++ and torch, read by the gguf package as by us, with a small error."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize as peer_dequantize
from gguf.quants import quantize as peer_quantize
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels import cpu, ref_ggml
from tokenmill.quantize.ggml.blocks import BLOCK_TYPES, dequantize, quantize, reference

COLUMNS = 768
# Relative root mean square error on normal weights, a little above what llama.cpp's quantizers leave.
BOUNDS = {
    "Q4_0": 0.090,
    "Q4_1": 0.082,
    "Q5_0": 0.045,
    "Q5_1": 0.040,
    "Q8_0": 0.006,
    "IQ4_NL": 0.079,
    "Q2_K": 0.310,
    "Q3_K": 0.156,
    "Q4_K": 0.074,
    "Q5_K": 0.0375,
    "Q6_K": 0.0185,
    "IQ4_XS": 0.080,
    "IQ2_XXS": 0.375,
    "IQ2_XS": 0.330,
    "IQ2_S": 0.270,
    "IQ3_XXS": 0.210,
    "IQ3_S": 0.150,
    "TQ1_0": 0.450,
    "TQ2_0": 0.450,
}


def normal_rows(count: int = 48) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, COLUMNS, generator=generator) * 0.05


def odd_rows() -> Tensor:
    """What a search can trip over: zeros, one value, one sign, outliers, tiny and subnormal numbers."""
    rows = normal_rows(14)
    rows[0] = 0
    rows[1, :256], rows[1, 300:] = 0.5, 0
    rows[2] = -0.2
    rows[3].clamp_(min=0)
    rows[4].clamp_(max=0)
    rows[5, ::41] = 30
    rows[6] *= 1e-6
    rows[7] *= 1e-14
    rows[8] *= 1e-30
    rows[9] *= 1e-42
    rows[10] += 2
    rows[11] = rows[11].sign() * 0.125
    rows[12, 32:64] = 0
    rows[13, 5] = 1e4
    return rows


def importance() -> Tensor:
    weights = torch.rand(COLUMNS, generator=torch.Generator().manual_seed(2)) ** 4
    weights[64:96] = 0
    return weights


def relative_error(found: Tensor, rows: Tensor, weights: Tensor | float = 1.0) -> float:
    return float(((found - rows).square() * weights).sum() / (rows.square() * weights).sum()) ** 0.5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_cpp_has_the_bits_of_torch(type_name: str, weighted: bool) -> None:
    if cpu.unavailable(torch.device("cpu")):
        pytest.skip("the C++ kernels are not built")
    rows = torch.cat([odd_rows(), normal_rows()])
    weights = importance() if weighted else None
    differing = (quantize(type_name, rows, weights) != reference(type_name, rows, weights)).any(1)
    assert differing.nonzero().flatten().tolist() == []


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_readers_agree_and_the_error_is_small(type_name: str) -> None:
    rows = normal_rows()
    packed = quantize(type_name, rows)
    found = dequantize(type_name, packed)
    assert torch.equal(found, ref_ggml.dequantize(type_name, packed))
    peer = peer_dequantize(packed.numpy(), gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(found.numpy(), peer)
    assert relative_error(found, rows) < BOUNDS[type_name]


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_odd_rows_stay_close(type_name: str) -> None:
    rows = odd_rows()
    found = dequantize(type_name, quantize(type_name, rows))
    assert bool(torch.isfinite(found).all())
    assert torch.equal(found[0], rows[0])
    # The tiny ones lie below what a float16 scale can say; beside outliers, a grid without zero has nothing small.
    for row in (1, 2, 3, 4, 10, 11) if type_name.startswith(("IQ2", "IQ3")) else (1, 2, 3, 4, 5, 10, 11):
        assert relative_error(found[row], rows[row]) < 2 * BOUNDS[type_name], row


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_simple_types_are_the_bytes_of_the_gguf_package(type_name: str) -> None:
    rows = normal_rows()
    peer = peer_quantize(rows.numpy(), gguf.GGMLQuantizationType[type_name])
    assert np.array_equal(quantize(type_name, rows).numpy(), peer)


@pytest.mark.parametrize("type_name", [name for name in BLOCK_TYPES if name != "Q8_0"])
def test_importance_lowers_the_weighted_error(type_name: str) -> None:
    rows, weights = normal_rows(), importance()
    plain = relative_error(dequantize(type_name, quantize(type_name, rows)), rows, weights)
    weighted = relative_error(dequantize(type_name, quantize(type_name, rows, weights)), rows, weights)
    assert (
        weighted < (1.0 if type_name.startswith("TQ") else 0.95) * plain
    )  # one scale for 256 weights: little to choose


def test_columns_that_do_not_matter_keep_their_weights() -> None:
    rows, weights = normal_rows(), importance()
    found = dequantize("Q6_K", quantize("Q6_K", rows, weights))
    assert relative_error(found[:, 64:96], rows[:, 64:96]) < 0.05


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_types_are_casts(type_name: str, dtype: torch.dtype) -> None:
    rows = normal_rows()
    assert torch.equal(quantize(type_name, rows, importance()).view(dtype), rows.to(dtype))


def test_bad_input_is_refused_with_the_remedy() -> None:
    with pytest.raises(UserError, match=r"multiple of 32 values, these have 40.*F16"):
        quantize("Q4_0", torch.zeros(2, 40))
    with pytest.raises(UserError, match=r"multiple of 256 values, these have 288.*blocks of 32"):
        quantize("Q4_K", torch.zeros(2, 288))
    with pytest.raises(UserError, match="NaN or infinity"):
        quantize("Q4_K", torch.full((1, 256), float("nan")))
    with pytest.raises(UserError, match="another length"):
        quantize("Q4_K", torch.zeros(1, 256), torch.ones(128))
    with pytest.raises(UserError, match="another length or negative"):
        quantize("Q4_K", torch.zeros(1, 256), -torch.ones(256))
    with pytest.raises(UserError, match="did you mean 'Q4_K'"):
        quantize("Q4_KM", torch.zeros(1, 256))
