"""ggml block types (Q4_0 ... Q6_K, IQ1_S ... IQ4_XS, TQ1_0, MXFP4, NVFP4 ...) as they lie in a GGUF file, by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.checkpoint.base import Checkpoint, StoredTensor
from tokenmill.kernels.ggml_types import TYPES
from tokenmill.model.formats.base import LinearWeight, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor


class GgmlWeight(LinearWeight):
    format_name = "ggml"

    def __init__(self, stored: StoredTensor) -> None:
        self.type_name = stored.type_name
        self.out_features, self.in_features = stored.shape
        self.blocks = stored.data  # uint8 [out, row_bytes]

    def parts(self) -> dict[str, Tensor]:
        return {"blocks": self.blocks}

    def dequantize(self, begin: int, end: int) -> Tensor:
        from tokenmill.kernels.ref_ggml import dequantize

        return dequantize(self.type_name, self.blocks[begin:end])

    def dequantize_rows(self, rows: Tensor) -> Tensor:
        from tokenmill.kernels.ref_ggml import dequantize

        return dequantize(self.type_name, self.blocks[rows])


class GgmlFormat(WeightFormat):
    name = "ggml"

    @classmethod
    def tensor_names(cls, checkpoint: Checkpoint, prefix: str) -> list[str]:
        name = f"{prefix}.weight"
        if name not in checkpoint:
            return []
        kind = TYPES.get(checkpoint.tensor(name).type_name)
        return [name] if kind is not None and kind.block_size > 1 else []

    @classmethod
    def load(cls, checkpoint: Checkpoint, prefix: str) -> GgmlWeight:
        return GgmlWeight(checkpoint.tensor(f"{prefix}.weight"))
