"""Which models' steps cannot be captured: because of their attention, of experts (in host memory, or in a format that
no grouped kernel reads), or of weights or KV pages without a GPU kernel. Asked by the graph executor."""

from __future__ import annotations

from typing import Any

from tokenmill.kernels import triton as gpu
from tokenmill.model.attention.latent import HeadProjections
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.loader import LoadedModel

# What GPU steps compute op by op, with decisions on the host.
_UNCAPTURED = {"chunked attention", "queries scaled by position"}
_UNCAPTURED_PACKED = {*_UNCAPTURED, "attention sinks"}  # over quantized pages


def uncaptured(model: LoadedModel, store: KVStore) -> str | None:
    """Why steps of this model cannot be captured; None if they can."""
    layers = expert_layers(model.decoder.blocks)
    if any(mlp.stacks.kernel is None for mlp in layers):
        return "experts of this format are multiplied one by one, which is not captured"
    if any(isinstance(mlp.stacks.kernel.run, gpu.HostExperts) for mlp in layers if mlp.stacks.kernel is not None):
        return "experts in host memory are fetched by the host in every step, which is not captured"
    slots = range(store.layout.layers_per_page)
    packed = any(store.gpu_declines(slot) is None and store.packed_pages(slot) is not None for slot in slots)
    found = (_UNCAPTURED_PACKED if packed else _UNCAPTURED) & set(model.decoder.description.features())
    if found:
        return f"steps with {', '.join(sorted(found))} are not captured"
    # Routers and gates stay float32 and are multiplied by torch, which can be captured.
    kept = {id(weight) for mlp in layers for weight in (mlp.router, mlp.shared and mlp.shared.gate)}
    for name, weight in model.weights.items():
        if weight.kernel is not None and id(weight) not in kept and not _can_be_captured(weight.kernel.run):
            return f"{name} ({weight.type_name}) has no GPU kernel that can be captured"
    has_pages = any(group.layers for group in store.layout.groups)
    reasons = map(store.gpu_declines, slots if has_pages else ())
    return next((reason for reason in reasons if reason is not None), None)


def _can_be_captured(kernel: Any) -> bool:
    return isinstance(kernel, (gpu.GpuLinear, gpu.JoinedRows, HeadProjections))
