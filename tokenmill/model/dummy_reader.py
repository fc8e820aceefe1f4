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
from tokenmill.model.formats.bits import words_for
from tokenmill.model.formats.dense import DenseWeight
from tokenmill.model.formats.float4 import Float4Weight
from tokenmill.model.formats.float8 import Float8Weight
from tokenmill.model.formats.packed_int import PackedIntWeight
from tokenmill.model.formats.settings import input_rounding, weight_settings
from tokenmill.model.reader import WeightReader

_SPREAD = 0.02  # standard deviation, that of usual initializations
_CODE_SPREAD = 32.0  # of float8 codes, which end at 448
_NEVER_QUANTIZED = ("embed_tokens", "lm_head", "mlp.gate", "router", "kv_b_proj")


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
        coded = self._coded(prefix, shape)
        if coded is not None:
            coded.bias = torch.zeros(out_features) if bias else None
            return self.add(prefix, coded, [])
        if self._device.type == "cpu":
            values = (torch.randn(shape, generator=self._generator) * _SPREAD).to(torch.bfloat16)
        else:
            values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        weight = DenseWeight(StoredTensor(f"{prefix}.weight", shape, "BF16", values))
        weight.bias = torch.zeros(out_features) if bias else None
        self.weights[prefix] = weight
        self.tensor_names[prefix] = []
        return weight

    def _coded(self, prefix: str, shape: tuple[int, int]) -> LinearWeight | None:
        """A quantized matrix, where `quantization_config` has one here; meta tensors as `linear` has them."""
        settings = self.checkpoint.quantization()
        method, (rows, columns) = settings.get("quant_method"), shape
        if not method or prefix.endswith(_NEVER_QUANTIZED) or (method == "mxfp4" and ".experts." not in prefix):
            return None

        def tensor(*size: int, dtype: torch.dtype) -> Tensor:
            meta = torch.empty(size, dtype=dtype, device="meta")
            return fill(meta, self._device, self._generator) if self._device.type == "cpu" else meta

        if method == "mxfp4":
            scales = tensor(rows, columns // 32, dtype=torch.float8_e8m0fnu)
            return Float4Weight(
                {"weight_packed": tensor(rows, columns // 2, dtype=torch.uint8), "weight_scale": scales}, prefix
            )
        if method == "compressed-tensors":  # integers in symmetric groups
            weights = weight_settings(self.checkpoint, prefix)
            if not weights:
                return None
            group = weights.get("group_size") or columns
            packed = tensor(rows, words_for(columns, int(weights["num_bits"])), dtype=torch.int32)
            scales = tensor(rows, columns // group, dtype=torch.float32)
            return PackedIntWeight(
                {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(shape)},
                prefix,
                weights,
                input_rounding(self.checkpoint, prefix),
            )
        block = settings.get("weight_block_size")
        size = [-(-rows // block[0]), -(-columns // block[1])] if isinstance(block, list) else [1]
        tensors = {
            "weight": tensor(rows, columns, dtype=torch.float8_e4m3fn),
            "weight_scale_inv" if block else "weight_scale": tensor(*size, dtype=torch.float32),
        }
        return Float8Weight(
            tensors, prefix, tuple(block) if isinstance(block, list) else None, input_rounding(self.checkpoint, prefix)
        )

    def finish(self) -> None:
        """Nothing can be missing or left over."""


def matrix_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, int]]:
    """Name -> [out, in] of every matrix that the architecture reads; nothing is made."""
    reader = DummyReader(checkpoint, torch.device("meta"))
    architecture_of(checkpoint.description)(reader, checkpoint.description, 1)
    return {f"{prefix}.weight": (each.out_features, each.in_features) for prefix, each in reader.weights.items()}


def fill(meta: Tensor, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
    """Random values in place of a meta tensor: of a matrix, of codes (a byte, or several in a byte or word), or of
    their scales."""
    if meta.dtype == torch.int32:
        return torch.randint(-(2**31), 2**31, meta.shape, dtype=torch.int32, device=device, generator=generator)
    if meta.dtype == torch.uint8:
        return torch.randint(0, 256, meta.shape, dtype=torch.uint8, device=device, generator=generator)
    if meta.dtype == torch.float8_e8m0fnu:  # a power of two beside codes of 1 to 6
        exponents = torch.randint(118, 122, meta.shape, dtype=torch.uint8, device=device, generator=generator)
        return exponents.view(meta.dtype)
    if meta.dtype == torch.float32:  # beside codes up to 448
        return torch.rand(meta.shape, device=device, generator=generator).add_(0.5).mul_(_SPREAD / _CODE_SPREAD)
    is_code = meta.dtype == torch.float8_e4m3fn
    values = torch.empty(meta.shape, dtype=torch.bfloat16 if is_code else meta.dtype, device=device)
    return values.normal_(std=_CODE_SPREAD if is_code else _SPREAD, generator=generator).to(meta.dtype)
