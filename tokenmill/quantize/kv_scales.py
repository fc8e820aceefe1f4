"""Calibrated scales of an FP8 KV cache: the largest key and value of each layer over the calibration text, with the
weights as they will be stored, written as `self_attn.k_scale` and `v_scale` beside `kv_cache_scheme`.

vLLM and this engine divide by them before rounding to e4m3. Used by the job.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.errors import UserError
from tokenmill.model.formats.files.base import FileFormat

KV_CACHE_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
_LARGEST = 448.0  # of e4m3
_ROOM = 1.25  # other text reaches further: a float loses nothing by it but the smallest of its numbers


class KVPeaks:
    """Of one layer."""

    def __init__(self) -> None:
        self._peaks: list[float] = []

    def add(self, keys: Tensor, values: Tensor) -> None:
        found = [float(each.detach().abs().amax()) for each in (keys, values)]
        self._peaks = [max(pair) for pair in zip(self._peaks, found, strict=True)] if self._peaks else found

    def tensors(self, layer: int) -> dict[str, Tensor]:
        """Nothing where there was no attention."""
        scales = (max(peak, 1e-6) * _ROOM / _LARGEST for peak in self._peaks)
        names = (f"model.layers.{layer}.self_attn.{side}_scale" for side in "kv")
        return {name: torch.tensor([scale]) for name, scale in zip(names, scales, strict=False)}


def scales_among(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of a stored block, for what writes its weights again: so little changes that the room is enough."""
    return {name: tensor for name, tensor in tensors.items() if name.endswith((".k_scale", ".v_scale"))}


def check_kv_scales(file_format: type[FileFormat], description: ModelDescription) -> None:
    """Refuse formats whose readers take no such scales, and models whose cache holds no keys."""
    if file_format.name != "compressed-tensors":
        raise UserError(f"{file_format.name} has no place for KV scales", "write compressed-tensors, or no --kv-scales")
    if "latent" in description.layer_kinds:
        raise UserError(f"{description.architecture} caches latents, not keys and values", "leave --kv-scales out")
