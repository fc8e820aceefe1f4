"""The spec of a mixture of experts in plain torch: which experts a token goes to, and what they compute together.

Scores and weights are float32 whatever the weights are. Ties go to the lower expert and outputs are added in the order
of experts, so that a token gives the same numbers alone and in a batch. Knows nothing of formats: the products of an
expert are functions. Compared with faster kernels by the conformance tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tokenmill.kernels.ref import gated
from tokenmill.kernels.routing import RoutingSpec as RoutingSpec

SWIGLU_ALPHA = 1.702  # steepness of the sigmoid of the clamped activation


def route(logits: Tensor, spec: RoutingSpec) -> tuple[Tensor, Tensor]:
    """[T, experts] float32 -> (ids int32 [T, k] in ascending order, weights float32 [T, k])."""
    logits = logits.float()
    if spec.score == "sigmoid":
        scores = logits.sigmoid()
    else:
        assert spec.score in ("softmax", "softmax_of_selected"), spec.score
        scores = logits.softmax(-1) if spec.score == "softmax" else logits
    choice = scores if spec.correction_bias is None else scores + spec.correction_bias
    if spec.num_groups > 1:
        choice = _within_best_groups(choice, spec)
    ids = _largest(choice, spec.experts_per_token).sort(-1).values
    weights = scores.gather(1, ids)
    if spec.score == "softmax_of_selected":
        weights = weights.softmax(-1)
    elif spec.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.to(torch.int32), weights * spec.scale


def activate(gate: Tensor, up: Tensor, spec: RoutingSpec) -> Tensor:
    if spec.clamp:
        gate, up = gate.clamp(max=spec.clamp), up.clamp(-spec.clamp, spec.clamp)
        return gate * torch.sigmoid(SWIGLU_ALPHA * gate) * (up + 1)
    return gated(gate, up, spec.activation)


Multiply = Callable[[int, Tensor], Tensor]  # (expert, rows)


def run_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Multiply, down: Multiply, spec: RoutingSpec
) -> Tensor:
    """x [T, hidden] through the chosen experts; `gate_up(expert, rows)` returns gate columns, then up columns."""
    y = torch.zeros_like(x)
    for rows, _, out in _each_expert(x, ids, weights, gate_up, down, spec, ids.unique().tolist()):
        y.index_add_(0, rows, out)
    return y


def expert_results(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Multiply, down: Multiply, spec: RoutingSpec, own: range
) -> Tensor:
    """[T, k, hidden]: what each chosen expert of `own` adds to a token, zeros where it is another's. `ids` ascend, as
    `route` gives them: the order in which `run_experts` adds."""
    results = x.new_zeros(*ids.shape, x.shape[1])
    chosen = [expert for expert in ids.unique().tolist() if expert in own]
    for rows, place, out in _each_expert(x, ids, weights, gate_up, down, spec, chosen):
        results[rows, place] = out
    return results


def _each_expert(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up: Multiply, down: Multiply, spec: RoutingSpec, experts: list[int]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each expert: the tokens that chose it, as which of their choices, and what it adds to them."""
    for expert in experts:
        rows, place = (ids == expert).nonzero(as_tuple=True)
        weight = weights[rows, place].unsqueeze(1)
        states = x[rows] * weight if spec.weights_on_input else x[rows]
        gate, up = gate_up(expert, states).chunk(2, -1)
        out = down(expert, activate(gate, up, spec))
        yield rows, place, out if spec.weights_on_input else out * weight


def added_in_order(results: Tensor) -> Tensor:
    """[T, k, hidden] -> [T, hidden]: the sum over the experts of each token in their order, as `run_experts` adds."""
    total = torch.zeros_like(results[:, 0])
    for place in range(results.shape[1]):
        total += results[:, place]
    return total


def _within_best_groups(choice: Tensor, spec: RoutingSpec) -> Tensor:
    """The scores of experts outside the best groups become minus infinity."""
    groups = choice.unflatten(1, (spec.num_groups, -1))
    if spec.group_score == "max":
        best = groups.amax(-1)
    else:
        assert spec.group_score == "two_best", spec.group_score
        best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter(1, _largest(best, spec.top_groups), True)
    return groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row; of equals the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
