"""Every weight type: rows chosen and rows in a range mean the same numbers, and every backend multiplies them.

Weights are exact; activations may be rounded to int8 per block, which bounds the error of a faster backend.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.devices import BACKEND_OF, CPU, DEVICES
from tests.quantized_files import SAMPLES, in_memory, random_matrix
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels import cpu
from tokenmill.kernels.base import select_linear
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.kernels.rounding import round_input
from tokenmill.model.device_weights import Uploader
from tokenmill.model.formats import FORMATS
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.coded import CodedWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.quantized import QuantizedMatrix

_CASES = [(device, BACKEND_OF[device.type]) for device in DEVICES]
_ON_EACH_DEVICE = pytest.mark.parametrize(("device", "backend"), _CASES, ids=[backend for _, backend in _CASES])
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
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
        if name == "NVFP4":
            blocks[:, :4] = 24 + blocks[:, :4] % 24  # scales within a factor of 8
            return data
        if name == "IQ1_M":  # four bits of the scale at the top of each of four words
            for byte, bits in zip((49, 51, 53, 55), (15, 1, 1, 2), strict=True):
                blocks[:, byte] = blocks[:, byte] & 15 | bits << 4
            return data
        for place in places.get(name, (0,)):
            blocks[:, place : place + 2] = half
        return data


@pytest.mark.parametrize("name", [*_DENSE, *_BLOCK_TYPES])
def test_rows_and_ranges_agree(name: str) -> None:
    weight = _weight(name)
    rows = torch.tensor([5, 0, 36, 5])
    torch.testing.assert_close(weight.dequantize_rows(rows), weight.dequantize(0, _ROWS)[rows], rtol=0, atol=0)


def _multiply(weight: LinearWeight, x: Tensor, device: torch.device, backend: str) -> Tensor:
    """x @ W^T + bias by a backend, back on the CPU; skips where the backend declines."""
    choice = select_linear(Uploader(device).weight(weight), device, backend)
    if choice.backend != backend:
        pytest.skip(f"{backend} declined: {dict(choice.declined)[backend]}")
    product: Tensor = choice.run(x.to(device))
    return product.float().cpu()


def _bfloat_error(x: Tensor, values: Tensor) -> Tensor:
    """What rounding both factors and the result to bfloat16 costs: half a unit of 2**-8 each, added up as random."""
    return 6 * 2**-8 * (x.square() @ values.square().T).sqrt() + 2**-8 * (x @ values.T).abs()


def _half_error(x: Tensor, values: Tensor) -> Tensor:
    """What float16 inputs and sums of 128 products cost: 20 roundings of half a unit of 2**-10, added up as random."""
    return 12 * 2**-11 * (x.square() @ values.square().T).sqrt()


@_ON_EACH_DEVICE
@pytest.mark.parametrize("tokens", [1, 2, 7, 70])
@pytest.mark.parametrize("name", [*_DENSE, *_BLOCK_TYPES])
def test_backend_multiplies_as_the_spec_says(name: str, tokens: int, device: torch.device, backend: str) -> None:
    weight = _weight(name)
    weight.bias = torch.randn(_ROWS, generator=torch.Generator().manual_seed(1))
    x = torch.randn(tokens, _COLS, generator=torch.Generator().manual_seed(2))
    dense = weight.dequantize(0, _ROWS)
    error = (_multiply(weight, x, device, backend) - (x @ dense.T + weight.bias)).abs()
    if backend == "triton":
        bound = 1e-3 + _bfloat_error(x, dense)
    elif name == "F16" and cpu.multiplies_halves(8):
        bound = 1e-3 + _half_error(x, dense)
    else:
        # A rounding step of int8 is 1/127 of a block's largest value; errors add up as random ones do.
        step = x.abs().amax() / 127
        bound = 1e-4 + (0 if name in _DENSE else 4 * step * dense.square().sum(-1).sqrt() / 12**0.5)
        if name == "BF16":  # with AMX inputs become two bfloat16 terms
            bound = bound + 6 * 2**-17 * (x.square() @ dense.square().T).sqrt()
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("name", _BLOCK_TYPES)
def test_a_precise_weight_is_rounded_far_less(name: str, tokens: int) -> None:
    """Where activations are rounded to int8: by the C++ kernels."""
    x = torch.randn(tokens, _COLS, generator=torch.Generator().manual_seed(2))
    errors = []
    for precise in (False, True):
        weight = _weight(name)
        weight.precise = precise
        weight.bias = torch.randn(_ROWS, generator=torch.Generator().manual_seed(1))
        product = _multiply(weight, x, CPU, "cpu")
        errors.append((product - (x @ weight.dequantize(0, _ROWS).T + weight.bias)).square().mean().sqrt())
    plain, precise_error = errors
    assert precise_error <= max(0.05 * plain, 1e-4)


_PREFIX = "model.q_proj"


def _coded(sample: str, rows: int, columns: int, largest: float = 0.02) -> tuple[CodedWeight, QuantizedMatrix]:
    """The sample written and read back; whichever format takes its tensors must be the first and only one."""
    file_format, scheme = SAMPLES[sample]
    matrix = random_matrix(scheme, rows, columns, largest=largest)
    assert FILE_FORMATS.get(file_format).refuses(scheme, (rows, columns)) is None
    checkpoint = in_memory(matrix, file_format, _PREFIX)
    takers = [name for name in FORMATS if FORMATS.get(name).tensor_names(checkpoint, _PREFIX)]
    assert len(takers) == 1, takers
    assert set(FORMATS.get(takers[0]).tensor_names(checkpoint, _PREFIX)) == set(checkpoint.names())
    return FORMATS.get(takers[0]).load(checkpoint, _PREFIX), matrix


def test_every_format_that_is_read_has_a_sample() -> None:
    read = {_coded(sample, 64, 128)[0].format_name for sample in SAMPLES}
    assert {*FORMATS, *read} == {*read, "ggml", "dense", "sparse-24"}  # the last is expanded: test_sparse24.py
    written = {"bitsandbytes_double", "dense", "sparse-24"}
    assert {file_format for file_format, _ in SAMPLES.values()} >= {*FILE_FORMATS} - written


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize(("rows", "columns"), [(32, 96), (160, 288)])
def test_what_is_written_is_read_back_unchanged(sample: str, rows: int, columns: int) -> None:
    weight, matrix = _coded(sample, rows, columns)
    read = weight.decode()
    assert (read.scheme, weight.activations) == (matrix.scheme, matrix.scheme.activations)
    assert torch.equal(read.codes, matrix.codes)
    assert torch.equal(read.scales, matrix.scales)
    assert (read.global_scale, read.input_scale) == (matrix.global_scale, matrix.input_scale)
    assert (read.zeros is None) == (matrix.zeros is None)
    assert read.zeros is None or torch.equal(read.zeros, matrix.zeros)
    writer = FILE_FORMATS.get(SAMPLES[sample][0])
    first, second = writer.encode(matrix), writer.encode(read)
    assert first.keys() == second.keys()
    for suffix, part in first.items():
        assert part.dtype == second[suffix].dtype
        assert torch.equal(part.view(torch.uint8), second[suffix].view(torch.uint8)), suffix


@pytest.mark.parametrize("sample", SAMPLES)
def test_packed_rows_and_ranges_agree(sample: str) -> None:
    weight, matrix = _coded(sample, 160, 96)
    whole = matrix.dequantize()
    assert torch.equal(weight.dequantize(0, 160), whole)
    assert torch.equal(weight.dequantize(3, 141), whole[3:141])  # across blocks of 128 and words of 8
    rows = torch.tensor([159, 0, 130, 5])
    assert torch.equal(weight.dequantize_rows(rows), whole[rows])
    assert weight.nbytes < 1.2 * 160 * 96


@_ON_EACH_DEVICE
@pytest.mark.parametrize("largest", [0.02, 3e-6, 30.0])
@pytest.mark.parametrize("sample", SAMPLES)
def test_backend_multiplies_packed_weights(sample: str, largest: float, device: torch.device, backend: str) -> None:
    rows, columns = 160, 384
    weight, matrix = _coded(sample, rows, columns, largest)
    weight.bias = torch.randn(rows, generator=torch.Generator().manual_seed(1)) * largest
    values = matrix.dequantize()
    rounds_input = matrix.scheme.activations != "none"
    # What a kernel may lose: scales as halves (or bfloats, where they exceed halves), tables as int8; and, where the
    # scheme leaves activations alone, those to int8 in blocks.
    scale_error = (2**-8 if largest < 1e-4 else 2**-10) * values.abs()
    table_error = 1 / 250 * values.abs().amax() if matrix.scheme.element in ("nf4", "codebook") else 0.0
    for tokens in (1, 5, 70):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
        seen = round_input(x, weight.activations, weight.input_scale)
        expected = seen @ values.T + weight.bias
        bound = 1e-5 * expected.abs().amax() + seen.abs() @ (scale_error + table_error).T
        if not rounds_input:
            bound += 4 * x.abs().amax() / 127 * values.square().sum(-1).sqrt() / 12**0.5
        product = _multiply(weight, x, device, backend)
        error = (product - expected).abs()
        if backend == "triton":
            bound += _bfloat_error(seen, values) + 2**-7 * weight.bias.abs()
            # Of one token, inputs need not be rounded to save time: then the product is the better one.
            error = error.minimum((product - (x @ values.T + weight.bias)).abs())
        assert (error <= bound).all(), (error / bound).max()
