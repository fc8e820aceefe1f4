"""Experts of a layer into host memory, ready to be copied into slots on a GPU.

Each expert is packed as the grouped kernels read it, one at a time, into memory that the GPU can copy from without the
host waiting. Says how many slots a stated amount of GPU memory gives each layer. Called by device_weights.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmill.kernels.base import Choice, Declined
from tokenmill.kernels.routing import RoutingSpec
from tokenmill.log import get_logger
from tokenmill.model.device_experts import Upload, stack_for_gpu
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack

if TYPE_CHECKING:
    from tokenmill.kernels.triton.experts.host import HostCosts, HostExpert

_log = get_logger(__name__)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SlotPlan:
    num_slots: int  # of each layer
    slot_bytes: int  # of one slot in every layer


def plan_slots(layers: Sequence[ExpertStacks], memory: int, quantization: str, upload: Upload) -> SlotPlan:
    """Slots are divided evenly: every layer is as likely to be asked for any expert as the others."""
    slot_bytes = sum(_pack(stacks, 0, upload, quantization).nbytes for stacks in layers)
    return SlotPlan(min(memory // slot_bytes, max(len(stacks.down) for stacks in layers)), slot_bytes)


class HostPlacement:
    """Called for one layer after the other."""

    def __init__(self, num_slots: int, device: torch.device, quantization: str, upload: Upload) -> None:
        """`upload` gives a weight's tensors in host memory."""
        self._num_slots, self._device, self._quantization, self._upload = num_slots, device, quantization, upload
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._costs: HostCosts | None = None

    def __call__(self, stacks: ExpertStacks, routing: RoutingSpec) -> Choice:
        from tokenmill.kernels.triton.experts.host import HostExperts  # here: triton is not installed everywhere

        for stack in (stacks.gate_up, stacks.down):
            if len({block.type_name for blocks in stack.experts for block in blocks}) > 1:
                raise Declined("the experts of a layer have different types")
        experts = [self._pinned(_pack(stacks, e, self._upload, self._quantization)) for e in range(len(stacks.down))]
        layer = HostExperts(experts, self._num_slots, routing, self._device, self._stream)
        if self._costs is None:
            self._costs = layer.measure()
            costs = (self._costs.fetch * 1e6, self._costs.first * 1e6, self._costs.further * 1e6)
            _log.info("an expert: fetched in %.0f us; on the host %.0f us, and %.0f us per further token", *costs)
        layer.costs = self._costs
        return Choice("experts", "triton", layer)

    def _pinned(self, expert: HostExpert) -> HostExpert:
        if self._device.type == "cuda":
            for stack in (expert.gate_up, expert.down):
                for tensor in stack.tensors:
                    if tensor is not None:
                        _pin(tensor)
        return expert


def _pack(stacks: ExpertStacks, expert: int, upload: Upload, quantization: str) -> HostExpert:
    from tokenmill.kernels.triton.experts.host import HostExpert

    gate_up, down = (
        stack_for_gpu(WeightStack([stack.experts[expert]]), upload, quantization)
        for stack in (stacks.gate_up, stacks.down)
    )
    return HostExpert(gate_up, down)


def _pin(tensor: Tensor) -> None:
    """Where it lies: torch's own pinned memory is rounded up to powers of two, which would nearly double it."""
    runtime: Any = torch.cuda.cudart()
    error = runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel() * tensor.element_size(), 0)
    if int(error) != 0:
        _log.warning("an expert's memory could not be pinned (%s): it is fetched more slowly", error)
