"""Reads a model without torch: the same architectures over numpy arrays, for the recorded program.

Only formats whose bytes the C++ kernels take as they are: ggml blocks and plain floats. Anything else raises NeedsTorch
with its reason, before any weight was packed. Called by the loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.kernels.host import NeedsTorch, widened
from tokenmill.model.architectures import ARCHITECTURES
from tokenmill.model.formats import FORMATS
from tokenmill.model.reader import WeightReader

if TYPE_CHECKING:
    from tokenmill.checkpoint.base import Checkpoint, StoredTensor
    from tokenmill.model.formats.base import LinearWeight

_FLOATS = ("F32", "F16", "BF16", "F64")
_FORMATS = ("ggml", "dense")  # of model/formats


def needs_torch(checkpoint: Checkpoint) -> str:
    """What of this model has no form without torch; empty if everything has one."""
    d = checkpoint.description
    if checkpoint.quantization():
        return "weights in this quantization format are unpacked with it"
    if any(layer.kind == "latent" for layer in d.layers):
        return "projections of latent attention are read with it"
    if FORMATS.added or d.architecture in ARCHITECTURES.added:
        return "weight formats and architectures of plugins compute with it"
    return ""


class ArrayCheckpoint:
    """A checkpoint whose tensors are numpy arrays."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        read = getattr(checkpoint, "array", None)
        if read is None:
            raise NeedsTorch("weights of this kind of checkpoint are read with it")
        self._read: Callable[[str], StoredTensor] = read
        self.path: Path = checkpoint.path
        self.description: ModelDescription = checkpoint.description

    def names(self) -> Iterable[str]:
        return self._checkpoint.names()

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def tensor(self, name: str) -> StoredTensor:
        return self._read(name)

    def release(self, name: str) -> None:
        self._checkpoint.release(name)

    def float_type(self) -> str:
        return self._checkpoint.float_type()

    def is_quantized(self) -> bool:
        return self._checkpoint.is_quantized()

    def stores_halves(self) -> bool:
        return self._checkpoint.stores_halves()

    def quantization(self) -> dict[str, object]:
        return self._checkpoint.quantization()


class HostReader(WeightReader):
    def __init__(self, checkpoint: Checkpoint) -> None:
        if reason := needs_torch(checkpoint):
            raise NeedsTorch(reason)
        super().__init__(ArrayCheckpoint(checkpoint))

    def own(self, values: np.ndarray) -> Any:
        return values

    def format_names(self) -> Iterable[str]:
        return _FORMATS

    def _unreadable(self, prefix: str, out_features: int, in_features: int) -> LinearWeight:
        if any(name.startswith(f"{prefix}.") for name in self.checkpoint.names()):
            raise NeedsTorch(f"{prefix} is stored in a format that is read with it")
        return super()._unreadable(prefix, out_features, in_features)

    def _absent(self, *shape: int) -> Any:
        return np.zeros(shape, dtype=np.float32)

    def floats(self, stored: StoredTensor) -> Any:
        values: Any = stored.data
        if stored.type_name not in _FLOATS:
            self._misshapen.append(f"{stored.name} has type {stored.type_name}, expected a plain float type")
            return np.zeros(stored.shape, dtype=np.float32)
        return widened(values, stored.type_name)
