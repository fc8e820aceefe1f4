"""A toy weight format in one file: a byte per weight and one scale for the whole matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.model.formats import FORMATS
from tokenmill.model.formats.base import LinearWeight, WeightFormat


class ToyWeight(LinearWeight):
    format_name = "toy"
    type_name = "TOY8"

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        self.out_features, self.in_features = codes.shape
        self.codes, self.scale = codes, scale

    def parts(self) -> dict[str, Tensor]:
        return {"codes": self.codes, "scale": self.scale}

    def dequantize(self, begin: int, end: int) -> Tensor:
        return self.codes[begin:end].float() * self.scale

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        return self.codes[rows].float() * self.scale


class ToyFormat(WeightFormat):
    name = "toy"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        names = [f"{prefix}.toy_codes", f"{prefix}.toy_scale"]
        return names if names[0] in checkpoint else []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> ToyWeight:
        codes, scale = (checkpoint.tensor(name).data for name in cls.tensor_names(checkpoint, prefix))
        return ToyWeight(codes, scale)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scale) of a float matrix."""
    scale = weight.abs().amax() / 127
    return (weight / scale).round().to(torch.int8), scale.reshape(1)


def register() -> None:
    FORMATS.register("toy", ToyFormat, first=True)
