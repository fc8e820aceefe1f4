"""2:4 files: the layout of compressed-tensors' bitmask, read back unchanged; damaged ones are refused by name."""

from __future__ import annotations

import numpy
import pytest
import torch
from torch import Tensor

from tests.quantized_files import MemoryCheckpoint
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme
from tokenmill.model.formats.sparse24 import Sparse24Format

_SCHEME = Scheme("float", 16, sparsity="2:4")


def _pruned(rows: int, columns: int, dtype: torch.dtype = torch.float16) -> Tensor:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    fours = values.view(rows, -1, 4)
    fours.scatter_(2, fours.abs().topk(2, dim=2, largest=False).indices, 0.0)
    values[0, :4] = 0.0  # fewer than two: zeros are stored
    values[1, :4] = torch.tensor([0.0, 0.0, 0.0, 2.0])
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(5, 12), (32, 288)])
def test_what_is_written_is_read_back(rows: int, columns: int, dtype: torch.dtype) -> None:
    values = _pruned(rows, columns, dtype)
    writer = FILE_FORMATS.get("sparse-24")
    assert writer.refuses(_SCHEME, (rows, columns)) is None
    tensors = writer.encode(QuantizedMatrix(_SCHEME, values, torch.ones(rows, 1)))
    assert tensors["compressed"].shape == (rows, columns // 2)
    assert tensors["bitmask"].shape == (rows, -(-columns // 8))
    checkpoint = MemoryCheckpoint({f"w.{suffix}": part for suffix, part in tensors.items()})
    weight = Sparse24Format.load(checkpoint, "w")
    assert torch.equal(weight.values, values)
    assert weight.format_name == "dense"  # so that every kernel of plain floats serves


def test_the_bits_are_those_of_compressed_tensors() -> None:
    """numpy's packbits in little order, which its code calls; exactly two bits of every four."""
    values = _pruned(6, 20)
    tensors = Sparse24Format.encode(values)
    mask = numpy.unpackbits(tensors["bitmask"].numpy(), axis=1, bitorder="little")[:, :20].astype(bool)
    assert (mask.reshape(6, 5, 4).sum(2) == 2).all()
    rebuilt = numpy.zeros((6, 20), dtype=numpy.float16)
    rebuilt[mask] = tensors["compressed"].flatten().numpy()
    assert (rebuilt == values.numpy()).all()


def test_others_are_refused() -> None:
    writer = FILE_FORMATS.get("sparse-24")
    assert "2:4" in (writer.refuses(Scheme("float", 16), (8, 8)) or "")
    assert writer.refuses(Scheme("int", 4, 32), (8, 32))
    assert "multiple of 4" in (writer.refuses(_SCHEME, (8, 6)) or "")
    assert FILE_FORMATS.get("dense").refuses(Scheme("int", 4, 32), (8, 32))
    tensors = {f"w.{suffix}": part for suffix, part in Sparse24Format.encode(_pruned(8, 16)).items()}
    for name, broken in (
        ("w.bitmask", tensors["w.bitmask"] | 1),
        ("w.bitmask", tensors["w.bitmask"][:, :1]),
        ("w.compressed", tensors["w.compressed"][:4]),
        ("w.shape", torch.tensor([[8], [0]])),
    ):
        with pytest.raises(CheckpointError, match="w"):
            Sparse24Format.load(MemoryCheckpoint({**tensors, name: broken}), "w")
