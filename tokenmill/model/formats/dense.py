"""Plain floating-point matrices: F32, F16, BF16, kept in the stored type and widened when used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.model.formats.base import LinearWeight, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

_TYPES = {"F32", "F16", "BF16"}


class DenseWeight(LinearWeight):
    format_name = "dense"

    def __init__(self, stored: StoredTensor) -> None:
        self.type_name = stored.type_name
        self.out_features, self.in_features = stored.shape
        self.values = stored.data

    def parts(self) -> dict[str, Tensor]:
        return {"values": self.values}

    def dequantize(self, begin: int, end: int) -> Tensor:
        return self.values[begin:end].float()

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        return self.values[rows].float()


class DenseFormat(WeightFormat):
    name = "dense"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        name = f"{prefix}.weight"
        return [name] if name in checkpoint and checkpoint.tensor(name).type_name in _TYPES else []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> DenseWeight:
        return DenseWeight(checkpoint.tensor(f"{prefix}.weight"))
