"""A checkpoint's tensors as an encoder computes with them: canonical names, one dtype, products with a common input
joined.

Every tensor is asked for by name and shape; what is missing or misshapen is reported together. Called by encoder.py and
pooling.py while a model is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.configs.encoders import EncoderDescription, canonical_name
from tokenmill.checkpoint.safetensors import StoredTensors
from tokenmill.errors import CheckpointError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(slots=True)
class Product:
    """y = x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(slots=True)
class LayerNorm:
    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class EncoderWeights:
    def __init__(self, path: Path, description: EncoderDescription, device: torch.device, dtype: torch.dtype) -> None:
        self._stored = StoredTensors(path)
        self._device = device
        self._dtype = dtype
        self._names = {
            found: name
            for name in self._stored.names()
            if (found := canonical_name(description.model_type, name)) is not None
        }
        self._problems: list[str] = []
        self.path = path
        self.num_bytes = 0
        self.stored_type = str(next((self._stored.tensor(name).dtype for name in self._names.values()), dtype))

    def table(self, name: str, rows: int, columns: int) -> Tensor:
        return self._take(f"{name}.weight", (rows, columns))

    def product(self, names: Sequence[str], outs: Sequence[int], size: int) -> Product:
        """The products of these names, which have one input, as one: rows below rows."""
        weights = [self._take(f"{name}.weight", (out, size)) for name, out in zip(names, outs, strict=True)]
        biases = [self._optional(f"{name}.bias", (out,)) for name, out in zip(names, outs, strict=True)]
        weight, present = torch.cat(weights) if len(weights) > 1 else weights[0], [b for b in biases if b is not None]
        if present and len(present) < len(biases):
            self._problems.append(f"some of {', '.join(names)} have a bias, others have none")
        return Product(weight, torch.cat(present) if present else None)

    def norm(self, name: str, size: int, eps: float) -> LayerNorm:
        return LayerNorm(self._take(f"{name}.weight", (size,)), self._optional(f"{name}.bias", (size,)), eps)

    def has(self, name: str) -> bool:
        return f"{name}.weight" in self._names

    def check(self) -> None:
        """Raise a CheckpointError for all that was wrong so far."""
        if self._problems:
            shown = "; ".join(self._problems[:4])
            more = f" and {len(self._problems) - 4} more" if len(self._problems) > 4 else ""
            raise CheckpointError(f"{self.path.name}: {shown}{more}", "config.json may be of another model")

    def _optional(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        return self._take(name, shape) if name in self._names else None

    def _take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """As it is computed with; zeros where something is wrong, which `check` reports."""
        if name not in self._names:
            self._problems.append(f"tensor '{name}' is missing")
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        stored = self._stored.tensor(self._names[name])
        if tuple(stored.shape) != shape or stored.dtype not in _FLOATS:
            found = f"{list(stored.shape)} of {str(stored.dtype).removeprefix('torch.')}"
            self._problems.append(f"tensor '{self._names[name]}' is {found}, not floats of shape {list(shape)}")
            return torch.zeros(shape, device=self._device, dtype=self._dtype)
        taken = stored.to(self._device, self._dtype, copy=True)  # not a view of the mapped file
        self.num_bytes += taken.numel() * taken.element_size()
        return taken
