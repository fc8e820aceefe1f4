"""GPTQ fills every group of every size that an integer file format holds, and the file gives the same numbers back."""

from __future__ import annotations

import pytest
import torch

from tests.quantized_files import in_memory
from tokenmill.model.formats import FORMATS
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.methods.gptq import Gptq
from tokenmill.quantize.methods.rtn import round_to_nearest

_ROWS, _COLUMNS = 16, 96
_SIZES = [0, *(size for size in range(1, _COLUMNS + 1) if _COLUMNS % size == 0)]
_PREFIX = "model.layers.0.mlp.up_proj"


def _schemes(file_format: str, group_size: int) -> list[Scheme]:
    """What the format says it can hold at this group size."""
    every = [  # each width once with zero points and once without, at one size or the next
        Scheme("int", bits, group_size, symmetric=(bits + _SIZES.index(group_size)) % 2 == 0) for bits in (2, 3, 4, 8)
    ]
    return [each for each in every if FILE_FORMATS.get(file_format).refuses(each, (_ROWS, _COLUMNS)) is None]


_CASES = [(name, size) for name in FILE_FORMATS for size in _SIZES if _schemes(name, size)]


def test_there_are_formats_of_many_group_sizes() -> None:
    assert len({name for name, _ in _CASES}) >= 4
    assert {8, 32} <= {size for _, size in _CASES}


@pytest.mark.parametrize(("file_format", "group_size"), _CASES)
def test_gptq_at_every_group_size(file_format: str, group_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(_ROWS, _COLUMNS, generator=generator)
    inputs = torch.randn(400, _COLUMNS, generator=generator) @ torch.randn(_COLUMNS, _COLUMNS, generator=generator)
    hessian = inputs.T @ inputs / len(inputs)
    for scheme in _schemes(file_format, group_size):
        matrix = Gptq()._solve_group({"a": weight}, hessian, {"a": scheme})["a"]
        assert matrix.scales.shape == (_ROWS, _COLUMNS // (group_size or _COLUMNS))
        assert bool(matrix.scales.isfinite().all())
        assert float(matrix.scales.abs().min()) > 0
        plain = round_to_nearest(weight, scheme)
        # A scale that was never set would be far from the grid of plain rounding, or give an error far above its.
        error, of_rounding = (_error(each.dequantize() - weight, hessian) for each in (matrix, plain))
        assert error < 1.05 * of_rounding + 1e-3 * _error(weight, hessian)
        checkpoint = in_memory(matrix, file_format, _PREFIX)
        (reader,) = [name for name in FORMATS if FORMATS.get(name).tensor_names(checkpoint, _PREFIX)]
        stored = FORMATS.get(reader).load(checkpoint, _PREFIX).dequantize(0, _ROWS)
        torch.testing.assert_close(stored, matrix.dequantize(), rtol=1e-3, atol=1e-5)


def _error(delta: torch.Tensor, hessian: torch.Tensor) -> float:
    return float((delta @ hessian * delta).sum())
