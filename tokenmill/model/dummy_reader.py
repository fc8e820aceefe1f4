"""Random weights instead of a checkpoint's: every tensor that an architecture reads, in the shape it expects.

For benchmarks: shapes, not values, decide how fast a step is. Matrices for a GPU are meta tensors and filled on the
device, so that the host never holds a copy of the model. Used by the loader.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.model.architectures import architecture_of
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.reader import WeightReader

_SPREAD = 0.02  # standard deviation, that of usual initializations


class DummyReader(WeightReader):
    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        super().__init__(checkpoint)
        self._device = device
        self._generator = torch.Generator().manual_seed(0)

    def vector(self, name: str, size: int, offset: float = 0.0) -> Tensor:  # noqa: ARG002
        return torch.ones(size) if name.endswith(".weight") else torch.zeros(size)

    def array(self, name: str, shape: tuple[int, ...]) -> Tensor:  # noqa: ARG002
        return torch.randn(shape, generator=self._generator) * _SPREAD

    def table(self, name: str, rows: int, columns: int) -> Tensor:  # noqa: ARG002
        return torch.randn(rows, columns, generator=self._generator) * _SPREAD

    def optional_vector(self, name: str, size: int) -> Tensor | None:  # noqa: ARG002
        return None

    def linear(self, prefix: str, out_features: int, in_features: int, bias: bool = False) -> LinearWeight:
        shape = (out_features, in_features)
        if self._device.type == "cpu":
            values = (torch.randn(shape, generator=self._generator) * _SPREAD).to(torch.bfloat16)
        else:
            values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        weight = DenseWeight(StoredTensor(f"{prefix}.weight", shape, "BF16", values))
        weight.bias = torch.zeros(out_features) if bias else None
        self.weights[prefix] = weight
        self.tensor_names[prefix] = []
        return weight

    def finish(self) -> None:
        """Nothing can be missing or left over."""


def matrix_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of every matrix that the architecture reads; nothing is made."""
    reader = DummyReader(checkpoint, torch.device("meta"))
    architecture_of(checkpoint.description)(reader, checkpoint.description, 1)
    return {f"{prefix}.weight": (each.out_features, each.in_features) for prefix, each in reader.weights.items()}


def fill(meta: Tensor, device: torch.device) -> Tensor:
    """A matrix of random values in place of a meta tensor."""
    return torch.empty(meta.shape, dtype=meta.dtype, device=device).normal_(std=_SPREAD)
