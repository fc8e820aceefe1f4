"""Experts on a GPU where no grouped kernel reads them, and which models' steps cannot be captured because of that or of
their attention.

Used by the ops and by the graph executor.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack
from tokenmill.model.layers.experts import Experts
from tokenmill.model.loader import LoadedModel

# What GPU steps compute op by op, with decisions on the host.
_UNCAPTURED = {
    "attention sinks",
    "chunked attention",
    "queries scaled by position",
}


def multiply_one_by_one(x: Tensor, logits: Tensor, stacks: ExpertStacks, routing: RoutingSpec) -> Tensor:
    """Each expert through its own linear kernels, chosen on the host: right for every format, and not captured."""
    ids, weights = route(logits, routing)
    gate_up, down = partial(_product, stacks.gate_up), partial(_product, stacks.down)
    return run_experts(x.float(), ids, weights, gate_up, down, routing).to(torch.bfloat16)


def _product(stack: WeightStack, expert: int, rows: Tensor) -> Tensor:
    kernels: list[Any] = [block.kernel.run for block in stack.experts[expert] if block.kernel is not None]
    outputs = [
        kernel.multiply(rows.to(torch.bfloat16), torch.bfloat16) if isinstance(kernel, gpu.GpuLinear) else kernel(rows)
        for kernel in kernels
    ]
    return torch.cat([output.float() for output in outputs], -1)


def _experts(model: LoadedModel) -> list[Experts]:
    return [block.mlp for block in model.decoder.blocks if isinstance(block.mlp, Experts)]


def uncaptured(model: LoadedModel) -> str | None:
    """Why steps of this model cannot be captured; None if they can."""
    if any(mlp.stacks.kernel is None for mlp in _experts(model)):
        return "experts of this format are multiplied one by one, which is not captured"
    found = _UNCAPTURED & set(model.decoder.description.features())
    return f"steps with {', '.join(sorted(found))} are not captured" if found else None


def float_matrices(model: LoadedModel) -> set[int]:
    """Identities of the routers and gates that stay float32 and are multiplied by torch, which can be captured."""
    return {id(weight) for mlp in _experts(model) for weight in (mlp.router, mlp.shared and mlp.shared.gate)}
