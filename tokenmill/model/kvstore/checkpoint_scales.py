"""Calibrated scales of an FP8 KV cache, if the checkpoint has them: `...self_attn.k_scale` and `v_scale`.

One number for the layer, or one per KV head (compressed-tensors' `attn_head`). Only the `fp8` store takes them; for
every other the reader's log line says that they are not used. Called once, when the runtime is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.errors import CheckpointError
from tokenmill.log import get_logger
from tokenmill.model.kvstore.base import KVStore

if TYPE_CHECKING:
    from torch import Tensor

_log = get_logger(__name__)
# Where exporters put them, newest first.
_NAMES = ("self_attn.{side}_scale", "self_attn.{side}_proj.{side}_scale", "self_attn.{side}_proj.output_scale")


def load_kv_scales(store: KVStore, checkpoint: Checkpoint) -> None:
    """Fill in the scales of an fp8 store from the checkpoint; every other store is left as it is."""
    if not store.is_coded:
        return
    from tokenmill.model.kvstore.float8 import Float8Store

    if not isinstance(store, Float8Store):
        return
    layers = [layer for group in store.layout.groups for layer in group.layers]
    by_layer = {layer: scales for layer in layers if (scales := _layer_scales(checkpoint, layer, store)) is not None}
    if not by_layer:
        return
    if len(store.layout.groups) > 1:
        _log.warning("the FP8 KV scales of the checkpoint are not used: full and sliding layers share page tensors")
        return
    for layer, (k, v) in by_layer.items():
        store.set_scales(store.layout.place(layer)[1], k, v)
    _log.info("FP8 KV cache: calibrated scales of %d layers are used", len(by_layer))


def _layer_scales(checkpoint: Checkpoint, layer: int, store: KVStore) -> tuple[Tensor, Tensor] | None:
    k, v = (_scale(checkpoint, layer, side, store.layout.num_kv_heads) for side in ("k", "v"))
    return None if k is None or v is None else (k, v)


def _scale(checkpoint: Checkpoint, layer: int, side: str, num_heads: int) -> Tensor | None:
    for pattern in _NAMES:
        name = f"model.layers.{layer}.{pattern.format(side=side)}"
        if name not in checkpoint:
            continue
        values = checkpoint.tensor(name).data.float().reshape(-1)
        if values.numel() not in (1, num_heads) or not bool((values > 0).all()) or not bool(values.isfinite().all()):
            raise CheckpointError(
                f"{name} is not a positive scale, one or one per KV head",
                "use --kv-cache-dtype float16, or export again",
            )
        return values.expand(num_heads).contiguous() if values.numel() == 1 else values
    return None
