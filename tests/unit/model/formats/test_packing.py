"""Files unpack by readers written here from the published layouts alone, number by number, sharing no code of ours."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor

from tests.quantized_files import random_matrix
from tokenmill.model.formats.bits import pack_bits, unpack_bits, unpack_padded
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)


def written(matrix: QuantizedMatrix, file_format: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = FILE_FORMATS.get(file_format).encode(matrix)
    return tensors


def word(value: Tensor) -> int:
    return int(value) & 0xFFFFFFFF


def stream(words: list[int], bits: int, index: int) -> int:
    """Code `index` of a little-endian bit stream over 32-bit words."""
    whole = sum(each << (32 * position) for position, each in enumerate(words))
    return whole >> (index * bits) & (2**bits - 1)


def expect(matrix: QuantizedMatrix, value_at: list[list[float]]) -> None:
    assert torch.equal(torch.tensor(value_at), matrix.dequantize())


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [1, 7, 32, 45])
def test_a_row_is_a_bit_stream(bits: int, count: int) -> None:
    codes = torch.randint(0, 2**bits, (3, count), generator=torch.Generator().manual_seed(bits)).to(torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, math.ceil(count * bits / 32))
    for row in range(3):
        words = [word(value) for value in packed[row]]
        assert [stream(words, bits, index) for index in range(count)] == codes[row].tolist()
    assert torch.equal(unpack_bits(packed, bits, count), codes)


def test_the_older_layout_leaves_the_top_bits_of_a_word_unused() -> None:
    codes = [5, 1, 7, 0, 3, 2, 6, 4, 1, 1, 2, 7]  # 10 of 3 bits fit a word
    words = [sum(code << (3 * i) for i, code in enumerate(part)) for part in (codes[:10], codes[10:])]
    assert unpack_padded(torch.tensor([words], dtype=torch.int32), 3, 12).tolist() == [codes]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("file_format", "symmetric"), [("gptq", True), ("gptq_v2", True), ("gptq_v2", False)])
def test_gptq(bits: int, file_format: str, symmetric: bool) -> None:
    rows, columns, group = 32, 64, 32
    matrix = random_matrix(Scheme("int", bits, group, symmetric=symmetric), rows, columns)
    tensors = written(matrix, file_format)
    assert tensors["g_idx"].tolist() == [column // group for column in range(columns)]
    assert tensors["scales"].dtype == torch.float16
    added = 1 if file_format == "gptq" else 0
    values = []
    for row in range(rows):
        down = [word(value) for value in tensors["qweight"][:, row]]
        line = []
        for column in range(columns):
            across = [word(value) for value in tensors["qzeros"][column // group]]
            zero = stream(across, bits, row) + added
            scale = float(tensors["scales"][column // group, row])
            line.append(scale * (stream(down, bits, column) - zero))
        values.append(line)
    expect(matrix, values)


def test_the_zero_points_of_symmetric_gptq_are_the_known_words() -> None:
    for bits, file_format, expected in ((4, "gptq", 0x77777777), (4, "gptq_v2", 0x88888888), (8, "gptq", 0x7F7F7F7F)):
        zeros = written(random_matrix(Scheme("int", bits, 32), 32, 64), file_format)["qzeros"]
        assert {word(value) for value in zeros.flatten()} == {expected}


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(symmetric: bool) -> None:
    rows, columns, group = 16, 64, 32
    matrix = random_matrix(Scheme("int", 4, group, symmetric=symmetric), rows, columns)
    tensors = written(matrix, "awq")
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def nibble(packed: Tensor, line: int, output: int) -> int:
        return word(packed[line, output // 8]) >> (4 * order.index(output % 8)) & 15

    values = [
        [
            float(tensors["scales"][column // group, row])
            * (nibble(tensors["qweight"], column, row) - nibble(tensors["qzeros"], column // group, row))
            for column in range(columns)
        ]
        for row in range(rows)
    ]
    expect(matrix, values)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_ints(bits: int, symmetric: bool) -> None:
    rows, columns, group = 5, 64, 32
    matrix = random_matrix(Scheme("int", bits, group, symmetric=symmetric), rows, columns)
    tensors = written(matrix, "compressed-tensors")
    assert tensors["weight_shape"].tolist() == [rows, columns]
    assert ("weight_zero_point" in tensors) == (not symmetric)
    middle = 2 ** (bits - 1)  # numbers are signed and stored with this added
    values = []
    for row in range(rows):
        words = [word(value) for value in tensors["weight_packed"][row]]
        line = []
        for column in range(columns):
            zero = 0
            if not symmetric:
                down = [word(value) for value in tensors["weight_zero_point"][:, column // group]]
                zero = stream(down, bits, row) - middle
            number = stream(words, bits, column) - middle
            line.append(float(tensors["weight_scale"][row, column // group]) * (number - zero))
        values.append(line)
    expect(matrix, values)


def e2m1(packed: Tensor, row: int, column: int) -> float:
    code = int(packed[row, column // 2]) >> (4 * (column % 2)) & 15
    return _E2M1[code & 7] * (-1 if code & 8 else 1)


def test_nvfp4_divides_by_its_global_scale() -> None:
    matrix = random_matrix(Scheme("e2m1", 4, 16, scale_type="e4m3"), 5, 48)
    tensors = written(matrix, "compressed-tensors")
    divisor = float(tensors["weight_global_scale"])
    scales = tensors["weight_scale"].float()
    expect(
        matrix,
        [
            [
                e2m1(tensors["weight_packed"], row, column) * float(scales[row, column // 16]) / divisor
                for column in range(48)
            ]
            for row in range(5)
        ],
    )


def test_mxfp4_scales_are_biased_exponents() -> None:
    matrix = random_matrix(Scheme("e2m1", 4, 32, scale_type="e8m0"), 5, 96)
    tensors = written(matrix, "compressed-tensors")
    assert tensors["weight_scale"].dtype == torch.uint8
    expect(
        matrix,
        [
            [
                e2m1(tensors["weight_packed"], row, column)
                * 2.0 ** (int(tensors["weight_scale"][row, column // 32]) - 127)
                for column in range(96)
            ]
            for row in range(5)
        ],
    )


def test_float8_blocks_multiply_by_weight_scale_inv() -> None:
    matrix = random_matrix(Scheme("e4m3", 8, 128, 128, activations="fp8_group128"), 130, 160)
    tensors = written(matrix, "fp8")
    assert tensors["weight_scale_inv"].shape == (2, 2)
    weight, scales = tensors["weight"].float(), tensors["weight_scale_inv"]
    rows = torch.arange(130).unsqueeze(1) // 128
    assert torch.equal(weight * scales[rows, torch.arange(160) // 128], matrix.dequantize())


def test_nf4_has_the_even_element_high() -> None:
    matrix = random_matrix(Scheme("nf4", 4, 32), 3, 64)
    tensors = written(matrix, "bitsandbytes")
    state = json.loads(bytes(tensors["weight.quant_state.bitsandbytes__nf4"].tolist()))
    assert (state["shape"], state["blocksize"], state["quant_type"]) == ([3, 64], 32, "nf4")
    packed, table = tensors["weight"].flatten(), tensors["weight.quant_map"]
    flat = [
        float(table[int(packed[i // 2]) >> (0 if i % 2 else 4) & 15] * tensors["weight.absmax"][i // 32])
        for i in range(3 * 64)
    ]
    expect(matrix, torch.tensor(flat).view(3, 64).tolist())
