"""The experts of one layer on the GPU: routing, sort, the two products and the sum, by the plan of choose.py.

Nothing synchronizes with the host and shapes alone decide the launches, so a call can be captured. Activations are bf16
inside; the result has the type of the input. Router logits come from outside (a plain product). Called by the executor.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from tokenmill.kernels.base import Declined
from tokenmill.kernels.triton.experts.choose import GEMV, Plan, rule
from tokenmill.kernels.triton.experts.gemv import down_gemv, gate_up_gemv
from tokenmill.kernels.triton.experts.order import ExpertOrder, sort_by_expert
from tokenmill.kernels.triton.experts.product import grouped_product
from tokenmill.kernels.triton.experts.route import RoutingRule, route
from tokenmill.kernels.triton.experts.rows import add_experts, quantize_groups
from tokenmill.kernels.triton.experts.stack import SCALE_BLOCK, GpuExpertStack


class ExpertRule(RoutingRule, Protocol):
    """Routing and activation of an expert layer."""

    @property
    def activation(self) -> str: ...
    @property
    def clamp(self) -> float: ...
    @property
    def weights_on_input(self) -> bool: ...


class GpuExperts:
    """Stacks of gate and up rows [experts, 2 * inner, hidden] and of down rows [experts, hidden, inner]."""

    backend = "triton"

    def __init__(self, gate_up: GpuExpertStack, down: GpuExpertStack, spec: ExpertRule) -> None:
        if spec.activation != "silu":
            raise Declined(f"experts with activation {spec.activation} have no kernel")
        if gate_up.kind == "fp8" and gate_up.group and gate_up.halves == 1 and down.depth % SCALE_BLOCK:
            raise Declined(f"a block of float8 scales belongs to gate and up rows: {down.depth} of each")
        assert gate_up.num_experts == down.num_experts
        assert gate_up.rows == 2 * down.depth
        self.gate_up, self.down, self.spec = gate_up, down, spec
        self.detail = f"{gate_up.kind} x {gate_up.num_experts}"

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    def choose(self, tokens: int) -> Plan:
        kind = self.gate_up.kind if self.gate_up.kind == self.down.kind else "mixed"
        return rule(kind, self.gate_up.num_experts, self.spec.experts_per_token, tokens, self.down.depth)

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """x [T, hidden], router logits [T, experts] -> [T, hidden]."""
        ids, weights = route(logits, self.spec)
        return self.multiply(x, ids, weights)

    def multiply(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Plan | None = None) -> Tensor:
        """x [T, hidden] through experts ids [T, k], weighted by weights [T, k]."""
        plan = plan or self.choose(x.shape[0])
        inputs = x.to(torch.bfloat16)
        before, after = (weights, None) if self.spec.weights_on_input else (None, weights)
        clamp, top_k = self.spec.clamp, ids.shape[1]
        if plan.kernel == GEMV:
            hidden = gate_up_gemv(inputs, self.gate_up, ids, before, plan.gate_up, clamp)
            return down_gemv(hidden, self.down, ids, after, plan.down, x.dtype)
        order = sort_by_expert(ids, self.gate_up.num_experts, plan.tokens)
        return add_experts(self._products(inputs, order, weights, plan), top_k, x.dtype)

    def multiply_some(self, x: Tensor, ids: Tensor, weights: Tensor, plan: Plan, out: Tensor) -> None:
        """As `multiply` by products, without the sum: out [T * k, hidden]. Ids that are the number of experts belong to
        experts of another stack; their rows of `out` are left as they are."""
        order = sort_by_expert(ids, self.gate_up.num_experts + 1, plan.tokens)
        order.block_expert.masked_fill_(order.block_expert == self.gate_up.num_experts, -1)
        self._products(x.to(torch.bfloat16), order, weights, plan, out)

    def _products(
        self, inputs: Tensor, order: ExpertOrder, weights: Tensor, plan: Plan, out: Tensor | None = None
    ) -> Tensor:
        """The rows of all assignments [T * k, hidden]."""
        before, after = (weights, None) if self.spec.weights_on_input else (None, weights)
        top_k, clamp = weights.shape[1], self.spec.clamp
        codes, scales = _rounded(inputs, self.gate_up)
        hidden = grouped_product(
            codes, self.gate_up, order, top_k, plan.tokens, plan.gate_up, before, scales, True, clamp
        )
        codes, scales = _rounded(hidden, self.down)
        return grouped_product(codes, self.down, order, top_k, plan.tokens, plan.down, after, scales, out=out)


def _rounded(x: Tensor, stack: GpuExpertStack) -> tuple[Tensor, Tensor | None]:
    """The input as the products with this stack take it."""
    return quantize_groups(x) if stack.kind == "fp8" else (x, None)
