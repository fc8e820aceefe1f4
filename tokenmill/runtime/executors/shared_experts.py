"""Experts that the ranks of a stage share: whole ones each, or a part of every one.

All ranks route alike and see every token, so nothing is sent before the products. Used by the eager executor.
"""

from __future__ import annotations

from torch import Tensor

from tokenmill.kernels.ref_experts import RoutingSpec, added_in_order, expert_results, run_experts
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.group import Group


def run_shared_experts(
    x: Tensor, ids: Tensor, weights: Tensor, stacks: ExpertStacks, spec: RoutingSpec, group: Group
) -> Tensor:
    products = stacks.gate_up.multiply, stacks.down.multiply
    if stacks.split == "gather":

        def down(expert: int, inner: Tensor) -> Tensor:
            return group.gather(stacks.down.multiply(expert, group.gather(inner)), stacks.shares)

        return run_experts(x, ids, weights, stacks.gate_up.multiply, down, spec)
    if stacks.split == "sum":
        return group.reduce(run_experts(x, ids, weights, *products, spec))
    results = expert_results(x, ids, weights, *products, spec, stacks.own)
    if stacks.split == "experts":
        return group.reduce(added_in_order(results))
    # One rank has a result and the others zeros, so that adding them changes no bit.
    return added_in_order(group.reduce(results.flatten(1)).view_as(results))
