"""Codebook weights: files hold exactly what was chosen, and products from the packed form are those of its values."""

from __future__ import annotations

import pytest
import torch

from tests.unit.quantize.methods.fake_block import random_weight
from tokenmill.errors import CheckpointError
from tokenmill.kernels.base import select_linear
from tokenmill.kernels.hadamard import inverse_signed_hadamard
from tokenmill.kernels.ref_codebook import unpack_indices
from tokenmill.model.formats.bits import pack_bits, unpack_bits
from tokenmill.model.formats.codebook import CodebookFormat, CodebookWeight
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.quantize.methods.turboquant import to_codebook


def matrix(bits: int, rows: int = 48, columns: int = 288) -> QuantizedMatrix:
    return to_codebook(random_weight(rows, columns), Scheme("codebook", bits), seed=11)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_file_holds_exactly_what_was_chosen(bits: int) -> None:
    chosen = matrix(bits)
    tensors = CodebookFormat.encode(chosen)
    assert tensors["weight_codes"].numel() * 32 == 48 * 288 * bits
    assert tensors["weight_norms"].dtype == torch.float16
    again = CodebookWeight(tensors, "w").decode()
    assert torch.equal(again.codes, chosen.codes)
    assert torch.equal(again.dequantize(), chosen.dequantize())
    assert (again.scheme, again.rotation_seed) == (chosen.scheme, 11)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("rotated", [False, True])
def test_product_from_the_packed_form(bits: int, rotated: bool) -> None:
    chosen = matrix(bits)
    tensors = CodebookFormat.encode(chosen)
    if not rotated:
        del tensors["weight_rotation"]
    weight = CodebookWeight(tensors, "w")
    weight.bias = torch.randn(48)
    values = inverse_signed_hadamard(chosen.dequantize(), 11) if rotated else chosen.dequantize()
    torch.testing.assert_close(weight.dequantize(8, 32), values[8:32])
    torch.testing.assert_close(weight.dequantize_rows(torch.tensor([40, 3])), values[[40, 3]])
    if rotated:  # no other backend may take it without rotating the input
        assert select_linear(weight, torch.device("cpu")).backend == "ref"
    choice = select_linear(weight, torch.device("cpu"), "ref")
    x = torch.randn(5, 288)
    torch.testing.assert_close(choice.run(x), x @ values.T + weight.bias, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 8])
def test_both_unpackers_agree(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (7, 45), dtype=torch.uint8)
    words = pack_bits(codes, bits)
    assert torch.equal(unpack_indices(words, 2**bits, 45), unpack_bits(words, bits, 45).long())


def test_parts_that_do_not_fit_are_refused() -> None:
    tensors = CodebookFormat.encode(matrix(3))
    with pytest.raises(CheckpointError, match="do not fit"):
        CodebookWeight({**tensors, "weight_table": torch.zeros(7)}, "w")
    with pytest.raises(CheckpointError, match="do not fit"):
        CodebookWeight({**tensors, "weight_shape": torch.tensor([48, 320])}, "w")


def test_only_our_own_files_hold_it() -> None:
    scheme = Scheme("codebook", 3)
    accepting = [name for name in FILE_FORMATS if FILE_FORMATS.get(name).refuses(scheme, (48, 288)) is None]
    assert accepting == ["tokenmill"]
    assert "tokenmill" in (FILE_FORMATS.get("compressed-tensors").refuses(scheme, (48, 288)) or "")
    assert FILE_FORMATS.get("tokenmill").refuses(Scheme("int", 4, 32), (48, 288))
