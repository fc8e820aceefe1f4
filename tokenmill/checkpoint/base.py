"""The contract of a checkpoint: a description, named tensors in their stored form, and what the tokenizer is made from.

Implemented by gguf.py and safetensors.py. Tensor names are canonical (Hugging Face style, `model.layers.3.mlp.up_proj.
weight`) so that architectures are written once. Data stays memory-mapped; nothing is converted here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.checkpoint.description import ModelDescription


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as it lies in the file.

    `data` is a memory-mapped view: for plain types ("F32", "F16", "BF16", "I32", ...) a tensor of that dtype and of
    `shape`; for ggml block types ("Q4_K", ...) uint8 of shape [*shape[:-1], bytes per row]. Where the file is read
    without torch it is a numpy array, and BF16 is uint16 there.
    """

    name: str
    shape: tuple[int, ...]  # logical, row-major: a linear weight is [out, in]
    type_name: str
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class Checkpoint(Protocol):
    path: Path
    description: ModelDescription

    def names(self) -> Iterable[str]: ...

    def __contains__(self, name: str) -> bool: ...

    def tensor(self, name: str) -> StoredTensor: ...

    def release(self, name: str) -> None:
        """Release the mapped pages of a tensor that has been converted; it can still be read again."""
        ...

    def float_type(self) -> str:
        """ "float16", "bfloat16" or "float32": the type that the file says its model computes in; empty where it says
        nothing."""
        ...

    def is_quantized(self) -> bool:
        """Whether most of its weights are codes of fewer bits than a float."""
        ...

    def stores_halves(self) -> bool:
        """Whether most of its weights are float16."""
        ...

    def quantization(self) -> dict[str, object]:
        """`quantization_config` of a safetensors checkpoint; empty for GGUF and plain ones."""
        ...
