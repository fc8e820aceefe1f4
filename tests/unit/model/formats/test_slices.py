"""Parts of matrices: any rows of every format, columns where the format can be cut, always the numbers of the whole."""

from __future__ import annotations

import pytest
import torch

from tests.quantized_files import SAMPLES, in_memory, random_matrix
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels.base import select_linear
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.ggml import GgmlWeight
from tokenmill.model.formats.slices import columns_problem, cut_columns, cut_rows
from tokenmill.model.reader import WeightReader

_ROWS, _COLUMNS = 192, 256
_CUTS = ([range(96)], [range(96, 192)], [range(8, 40), range(104, 136)])
_CPU = torch.device("cpu")


def _sample(name: str) -> LinearWeight:
    file_format, scheme = SAMPLES[name]
    prefix = "model.q_proj"
    reader = WeightReader(in_memory(random_matrix(scheme, _ROWS, _COLUMNS), file_format, prefix))
    weight = reader.linear(prefix, _ROWS, _COLUMNS)
    weight.bias = torch.arange(_ROWS).float()
    return weight


def _rows(whole: torch.Tensor, cut: list[range]) -> torch.Tensor:
    return torch.cat([whole[each.start : each.stop] for each in cut])


@pytest.mark.parametrize("name", SAMPLES)
def test_rows_of_every_format(name: str) -> None:
    weight = _sample(name)
    whole = weight.dequantize(0, _ROWS)
    x = torch.randn(3, _COLUMNS, generator=torch.Generator().manual_seed(1))
    product = select_linear(weight, _CPU).run(x)
    for cut in _CUTS:
        part = cut_rows(weight, cut)
        assert (part.out_features, part.in_features) == (sum(map(len, cut)), _COLUMNS)
        assert torch.equal(part.dequantize(0, part.out_features), _rows(whole, cut))
        assert torch.equal(part.dequantize(3, 11), _rows(whole, cut)[3:11])
        # The kernel of the part gives the same bits as that of the whole.
        kernel = select_linear(part, _CPU)
        expected = _rows(product.T, cut).T
        if kernel.backend == "ref":  # a torch product of another shape may add in another order
            assert torch.allclose(kernel.run(x), expected, atol=1e-3)
        else:
            assert torch.equal(kernel.run(x), expected)


@pytest.mark.parametrize("name", SAMPLES)
def test_columns_where_the_format_allows(name: str) -> None:
    weight = _sample(name)
    whole = weight.dequantize(0, _ROWS)
    for width in (128, 64, 24):
        problem = columns_problem(weight, width)
        if problem:
            continue
        cut = range(width, 2 * width)
        part = cut_columns(weight, cut)
        assert part.bias is None
        assert torch.equal(part.dequantize(0, _ROWS), whole[:, cut.start : cut.stop])
        if width % 32 == 0:
            x = torch.randn(2, width, generator=torch.Generator().manual_seed(1))
            found = select_linear(part, _CPU, "ref").run(x)
            padded = torch.zeros(2, _COLUMNS)
            padded[:, cut.start : cut.stop] = x
            if weight.activations == "none":
                expected = padded @ whole.T
                assert torch.allclose(found, expected, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("pack 4 bit", "groups of 32"),
        ("awq", "groups of 32"),
        ("W8A8", "rounded by token"),
        ("llm.int8", "rounded by token"),
        ("codebook 4 bit", "rotated"),
        ("fp8 block", "rounded"),
    ],
)
def test_declined_columns_name_the_reason(name: str, reason: str) -> None:
    assert reason in columns_problem(_sample(name), 24)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_blocks_of_gguf(kind: str) -> None:
    size = TYPES[kind]
    generator = torch.Generator().manual_seed(0)
    row_bytes = 512 // size.block_size * size.block_bytes
    data = torch.randint(0, 60, (_ROWS, row_bytes), generator=generator, dtype=torch.uint8)
    weight = GgmlWeight(StoredTensor("w", (_ROWS, 512), kind, data))
    whole = weight.dequantize(0, _ROWS)
    part = cut_rows(weight, _CUTS[2])
    assert torch.equal(part.dequantize(0, 64), _rows(whole, _CUTS[2]))
    assert not columns_problem(weight, 256)
    assert torch.equal(cut_columns(weight, range(256, 512)).dequantize(0, _ROWS), whole[:, 256:])
    assert ("blocks of 256" in columns_problem(weight, 128)) == (size.block_size == 256)
    assert "blocks of" in columns_problem(weight, 48)


def test_plain_floats_are_cut_anywhere() -> None:
    values = torch.randn(10, 6)
    weight = DenseWeight(StoredTensor("w", (10, 6), "F32", values))
    weight.bias = torch.arange(10.0)
    part = cut_rows(weight, [range(1, 3), range(7, 9)])
    assert torch.equal(part.dequantize(0, 4), values[[1, 2, 7, 8]])
    assert part.bias is not None
    assert part.bias.tolist() == [1, 2, 7, 8]
    assert torch.equal(cut_columns(weight, range(1, 4)).dequantize(0, 10), values[:, 1:4])
    assert weight.out_features == 10
