"""compressed-tensors' "sparse-24-bitmask": `compressed` [out, in / 2] holds two of every four neighbours of a row in
order, `bitmask` uint8 [out, ceil(in / 8)] says which (column 8 i + j is bit j of byte i), `shape` int64 [2, 1].

Expanded to plain floats when loaded: no kernel here skips the zeros, so the file is smaller and the memory is not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.errors import CheckpointError
from tokenmill.model.formats.base import WeightFormat
from tokenmill.model.formats.coded import check_dimensions, stored_shape
from tokenmill.model.formats.dense import DenseWeight

_SUFFIXES = ("compressed", "bitmask", "shape")
_FLOATS = ("F32", "F16", "BF16")


class Sparse24Format(WeightFormat):
    name = "sparse-24"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        names = [f"{prefix}.{suffix}" for suffix in _SUFFIXES]
        if any(name not in checkpoint for name in names) or checkpoint.tensor(names[0]).type_name not in _FLOATS:
            return []
        return names

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> DenseWeight:
        parts = {suffix: checkpoint.tensor(f"{prefix}.{suffix}") for suffix in _SUFFIXES}
        check_dimensions(prefix, {suffix: part.data for suffix, part in parts.items()}, compressed=2, bitmask=2)
        rows, columns = stored_shape(prefix, parts["shape"].data)
        kept, bits = parts["compressed"].data, parts["bitmask"].data
        if kept.shape != (rows, columns // 2) or bits.shape != (rows, -(-columns // 8)) or bits.dtype != torch.uint8:
            raise CheckpointError(f"{prefix}: compressed, bitmask and shape disagree", "download it again")
        mask = unpack_mask(bits, columns)
        if bool((mask.sum(1) != columns // 2).any()):
            raise CheckpointError(f"{prefix}: bitmask does not name two of four columns", "download it again")
        values = torch.zeros(rows, columns, dtype=kept.dtype)
        values[mask] = kept.flatten()
        return DenseWeight(StoredTensor(f"{prefix}.weight", (rows, columns), parts["compressed"].type_name, values))

    @classmethod
    def encode(cls, values: Tensor) -> dict[str, Tensor]:
        """The tensors of a file by suffix. At most two of four neighbours may differ from zero."""
        rows, columns = values.shape
        fours = values.view(rows, columns // 4, 4)
        # Exactly two are stored: where fewer differ from zero, zeros fill up.
        kept = torch.zeros_like(fours, dtype=torch.bool)
        kept.scatter_(2, fours.float().abs().topk(2, dim=2).indices, True)
        assert not bool(fours[~kept].any()), "more than two of four weights are not zero"
        mask = kept.view(rows, columns)
        return {
            "compressed": values[mask].view(rows, columns // 2),
            "bitmask": pack_mask(mask),
            "shape": torch.tensor([[rows], [columns]]),
        }


def pack_mask(mask: Tensor) -> Tensor:
    """bool [rows, columns] -> uint8 [rows, ceil(columns / 8)], the first column in the lowest bit."""
    padded = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).view(mask.shape[0], -1, 8)
    return (padded.to(torch.uint8) << torch.arange(8, dtype=torch.uint8)).sum(2, dtype=torch.uint8)


def unpack_mask(bits: Tensor, columns: int) -> Tensor:
    wide = bits.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)
    return (wide & 1).bool().flatten(1)[:, :columns]
