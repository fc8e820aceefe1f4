"""Experts on a GPU where no grouped kernel reads them. Used by the ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.model.formats.stacks import ExpertStacks, WeightStack


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
