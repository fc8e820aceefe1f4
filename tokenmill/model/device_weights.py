"""Weights onto a GPU: mapped file -> pinned memory -> device, quantized there on request, joined where they share an
input.

Each matrix passes through alone, so that the peak is the model plus one layer. The small tensors of the
architecture (norms, rotary tables) are moved too. Called by the loader; knows nothing of batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.hardware.machine import available_memory
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.base import Choice, Declined, select_linear
from tokenmill.kernels.routing import RoutingSpec
from tokenmill.log import get_logger
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.device_experts import place_experts
from tokenmill.model.dummy_reader import fill
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.host_experts import HostPlacement, SlotPlan, plan_slots
from tokenmill.model.layers.experts import Experts, expert_layers
from tokenmill.model.linear_groups import head_projections, linear_groups
from tokenmill.model.reader import WeightReader

_log = get_logger(__name__)
_STAGE_BYTES = 64 << 20
_INT4_GROUPS = (128, 64, 32)
_TABLE_ROWS = 16384  # of the embedding, dequantized at a time


class Uploader:
    """Copies mapped tensors to a device through two pinned buffers: one is filled from disk while the other is being
    copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stage_index = 0
        if device.type == "cuda":
            self._stages = [torch.empty(_STAGE_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            self._free = [torch.cuda.Event() for _ in range(2)]

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return fill(tensor, self._device)
        if self._device.type != "cuda" or tensor.device.type == "cuda":
            return tensor
        source = tensor.contiguous().reshape(-1).view(torch.uint8)
        target = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        flat = target.view(-1).view(torch.uint8)
        for begin in range(0, source.numel(), _STAGE_BYTES):
            self._stage_index ^= 1
            stage, free = self._stages[self._stage_index], self._free[self._stage_index]
            free.synchronize()
            part = source[begin : begin + _STAGE_BYTES]
            stage[: part.numel()].copy_(part)
            flat[begin : begin + part.numel()].copy_(stage[: part.numel()], non_blocking=True)
            free.record()
        return target

    def weight(self, weight: LinearWeight) -> LinearWeight:
        """The same weight with its tensors on the device."""
        moved = copy.copy(weight)
        for name, value in vars(weight).items():
            if isinstance(value, Tensor):
                setattr(moved, name, self(value))
            elif isinstance(value, dict) and any(isinstance(entry, Tensor) for entry in value.values()):
                setattr(moved, name, {k: self(v) if isinstance(v, Tensor) else v for k, v in value.items()})
        return moved


@dataclass(frozen=True, slots=True)
class Placement:
    device: torch.device
    kernels: str  # forced backend, or empty
    quantization: str  # "", "fp8" or "int4": how float matrices are quantized
    expert_memory: int = 0  # bytes of the device for experts, the others stay in host memory; 0: all on the device
    dtype: torch.dtype = torch.bfloat16  # of activations, and of matrices that are not codes


def place_weights(decoder: Decoder, reader: WeightReader, placement: Placement) -> Tensor:
    """Give every multiplied weight its kernel on the device; returns the embedding table, whose type is that
    of activations."""
    upload = Uploader(placement.device)
    prefixes = {id(weight): prefix for prefix, weight in reader.weights.items()}
    routers, placed = _place_experts(decoder, reader, upload, placement)
    for group in linear_groups(decoder):
        if id(group[0]) in placed:
            continue
        for weight in group:
            scheme = "" if weight is decoder.head else placement.quantization
            if id(weight) in routers:
                weight.kernel = _make_router(upload.weight(weight), placement)
            else:
                weight.kernel = _make(upload.weight(weight), prefixes[id(weight)], scheme, placement)
            for name in reader.tensor_names[prefixes[id(weight)]]:
                reader.checkpoint.release(name)
        if not placement.quantization:
            _expand(group, placement.dtype)
        if len(group) > 1:
            _join(group)
    for projections in head_projections(decoder):
        projections.place(upload.weight, placement.dtype)
    _move_small(decoder, placement.device)
    return _embedding(decoder, upload, placement.dtype)


def _place_experts(
    decoder: Decoder, reader: WeightReader, upload: Uploader, placement: Placement
) -> tuple[set[int], set[int]]:
    """Stacks for grouped kernels. (Matrices that stay float32, matrices that are in a stack), by identity."""
    routers: set[int] = set()
    placed: set[int] = set()
    names = {id(weight): prefix for prefix, weight in reader.weights.items()}
    layers = expert_layers(decoder.blocks)
    place = expert_placement(layers, placement, upload)
    for mlp in layers:
        gate = None if mlp.shared is None else mlp.shared.gate
        routers |= {id(weight) for weight in (mlp.router, gate) if weight is not None}
        if placement.kernels not in ("", "triton"):
            continue
        if mlp.routing.correction_bias is not None:  # the kernel keeps this record
            mlp.routing = replace(mlp.routing, correction_bias=mlp.routing.correction_bias.to(placement.device))
        try:
            mlp.stacks.kernel = place(mlp.stacks, mlp.routing)
        except Declined as error:
            if placement.expert_memory:
                raise UserError(f"--expert-memory: {error}", "leave --expert-memory out") from None
            _log.info("experts one by one: %s", error)
            continue
        blocks = mlp.stacks.blocks()
        placed |= {id(block) for block in blocks}
        for name in {name for block in blocks for name in reader.tensor_names[names[id(block)]]}:
            reader.checkpoint.release(name)
    return routers, placed


def slots_for(layers: list[Experts], expert_memory: int, quantization: str) -> SlotPlan:
    """Experts of each layer that this memory holds. Raises UserError if they are too few for a token, or if no kernel
    reads them."""
    try:
        upload = Uploader(torch.device("cpu")).weight
        plan = plan_slots([mlp.stacks for mlp in layers], expert_memory, quantization, upload)
    except Declined as error:
        raise UserError(f"--expert-memory: {error}", "leave --expert-memory out") from None
    per_token = layers[0].routing.experts_per_token
    if plan.num_slots < per_token:
        raise UserError(
            f"--expert-memory: {expert_memory / 2**20:.1f} MiB hold {plan.num_slots} experts of each layer, "
            f"a token needs {per_token}",
            f"give at least {-(-per_token * plan.slot_bytes // 2**20)}MiB",
        )
    return plan


def expert_placement(
    layers: list[Experts], placement: Placement, upload: Uploader | None = None
) -> Callable[[ExpertStacks, RoutingSpec], Choice]:
    """How the experts of a layer are placed: on the device, or in host memory where the memory for them is stated and
    does not hold all."""
    send = (upload or Uploader(placement.device)).weight
    on_device = partial(place_experts, upload=send, quantization=placement.quantization)
    if not placement.expert_memory:
        return on_device
    plan, experts = slots_for(layers, placement.expert_memory, placement.quantization), len(layers[0].stacks.down)
    if plan.num_slots >= experts:
        return on_device
    needed, free = experts * plan.slot_bytes, available_memory()
    if needed > free:
        raise UserError(
            f"--expert-memory: the experts need {needed / 2**30:.1f} GiB of host memory, {free / 2**30:.1f} are free",
            "free host memory, or round the weights with --quantization int4",
        )
    _log.info("experts: %d of %d in each layer on the GPU, all in host memory", plan.num_slots, experts)
    to_host = Uploader(torch.device("cpu")).weight
    return HostPlacement(plan.num_slots, placement.device, placement.quantization, to_host)


def place_reference(decoder: Decoder, reader: WeightReader, device: torch.device) -> None:
    """For the torch reference kernels on a GPU: every weight as stored, on the device, multiplied by the spec."""
    upload = Uploader(device)
    for weight in reader.weights.values():
        vars(weight).update(vars(upload.weight(weight)))
        weight.kernel = select_linear(weight, device, "ref")
    for projections in head_projections(decoder):
        projections.place(lambda weight: weight, torch.float32)
    _move_small(decoder, device)


def _make_router(weight: LinearWeight, placement: Placement) -> Choice:
    """In 16 bits only where the matrix is stored so: rounding it would change which experts are chosen."""
    values = weight.parts().get("values")
    router = None
    if values is not None and weight.precise and placement.kernels in ("", "triton"):
        router = gpu.make_router(values, weight.bias)
    return select_linear(weight, placement.device, "ref") if router is None else Choice("linear", "triton", router)


def _make(weight: LinearWeight, prefix: str, scheme: str, placement: Placement) -> Choice:
    if not scheme:
        return select_linear(weight, placement.device, placement.kernels, placement.dtype)
    parts = weight.parts()
    if set(parts) != {"values"}:
        raise UserError(f"{prefix} is quantized already ({weight.type_name})", "leave --quantization out")
    group = next((size for size in _INT4_GROUPS if weight.in_features % size == 0), 0)
    if scheme == "int4" and not group:
        return select_linear(weight, placement.device, placement.kernels, placement.dtype)
    return Choice("linear", "triton", gpu.quantize_at_load(parts["values"], weight.bias, scheme, group))


def _expand(group: list[LinearWeight], dtype: torch.dtype) -> None:
    """Dequantize matrices whose products are faster in 16-bit floats."""
    choices = [weight.kernel for weight in group if weight.kernel is not None]
    kernels = [choice.run for choice in choices if isinstance(choice.run, gpu.GpuLinear)]
    if len(kernels) == len(choices):
        for weight, choice, run in zip(group, choices, gpu.expand_small(kernels, dtype), strict=True):
            weight.kernel = replace(choice, run=run)


def _join(group: list[LinearWeight]) -> None:
    choices = [weight.kernel for weight in group if weight.kernel is not None]
    kernels = [choice.run for choice in choices if isinstance(choice.run, gpu.GpuLinear)]
    if len(kernels) != len(choices):
        return
    joined = gpu.join_linears(kernels)
    if joined is None:
        return
    begin = 0
    for weight in group:
        assert weight.kernel is not None
        end = begin + weight.out_features
        weight.kernel = replace(weight.kernel, run=gpu.JoinedRows(joined, begin, end))
        begin = end


def _move_small(decoder: Decoder, device: torch.device) -> None:
    """Norms, rotary tables and all other tensors of an architecture that are not matrices."""
    moved: dict[int, Any] = {}

    def move(value: Any) -> Any:
        if id(value) not in moved:
            moved[id(value)] = value  # parts may refer to each other
            moved[id(value)] = _moved(value, device, move)
        return moved[id(value)]

    move(decoder)


def _moved(value: Any, device: torch.device, move: Callable[[Any], Any]) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(move(each) for each in value)
    if isinstance(value, (LinearWeight, type)):
        return value
    if is_dataclass(value):  # frozen, as rotary tables are
        changed = {each.name: getattr(value, each.name) for each in fields(value)}
        tensors = {name: move(each) for name, each in changed.items() if isinstance(each, Tensor)}
        return replace(value, **tensors) if tensors else value  # type: ignore[type-var]
    if hasattr(value, "__dict__") and type(value).__module__ != "builtins":
        for name, each in vars(value).items():
            setattr(value, name, move(each))
    return value


def _embedding(decoder: Decoder, upload: Uploader, dtype: torch.dtype) -> Tensor:
    """[vocab, hidden]; shared with the head if they are tied and not codes."""
    head = decoder.head.kernel.run if decoder.head.kernel is not None else None
    if decoder.head is decoder.embedding and getattr(head, "kind", "") == "bf16":
        table: Tensor = head.weight  # type: ignore[union-attr]
        return table
    stored = upload.weight(decoder.embedding)
    rows = range(0, stored.out_features, _TABLE_ROWS)
    pieces = [stored.dequantize(r, min(r + _TABLE_ROWS, stored.out_features)).to(dtype) for r in rows]
    return torch.cat(pieces)
