"""A mixture of experts: the router, the experts it chooses among, and the expert that every token passes.

Which experts, weights and activation follow from the description; how files keep them is known by expert_reader.py.
Takes the place of the MLP in a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tokenmill.checkpoint.description import FeedForward, ModelDescription
from tokenmill.kernels.routing import RoutingSpec
from tokenmill.model.expert_reader import ExpertShape, read_experts, read_router, router_name
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

_SHARED = ("mlp.shared_expert", "mlp.shared_experts", "feed_forward.shared_expert")


class Experts:
    """sum over the chosen experts of weight * expert(x), plus the shared expert."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int) -> None:
        ffn, hidden, prefix = description.layers[layer].feed_forward, description.hidden_size, f"model.layers.{layer}"
        assert ffn is not None
        assert ffn.routing is not None
        shape = ExpertShape(ffn.num_experts, hidden, ffn.expert_size, ffn.bias, ffn.routing.bias)
        self.router = read_router(reader, prefix, shape)
        self.routing = _routing(reader, ffn, prefix)
        self.stacks = read_experts(reader, prefix, shape)
        self.shared = SharedExpert(reader, ffn, hidden, prefix) if ffn.shared_size else None

    def __call__(self, ops: Ops, x: Value) -> Value:
        y = ops.experts(x, self.router, self.stacks, self.routing)
        return y if self.shared is None else ops.add(y, self.shared(ops, x))


class SharedExpert:
    """The MLP that every token passes beside its experts; Qwen multiplies it by a gate of one number per token."""

    def __init__(self, reader: WeightReader, ffn: FeedForward, hidden: int, layer: str) -> None:
        prefix = reader.first_prefix([f"{layer}.{name}" for name in _SHARED])
        self.activation = ffn.activation
        self.inputs = [reader.linear(f"{prefix}.{name}", ffn.shared_size, hidden) for name in ("gate_proj", "up_proj")]
        self.output = reader.linear(f"{prefix}.down_proj", hidden, ffn.shared_size)
        self.gate = reader.row(f"{prefix}_gate", hidden) if ffn.shared_gate else None

    def __call__(self, ops: Ops, x: Value) -> Value:
        gate, up = ops.linear(x, self.inputs)
        y = ops.linear(ops.gated(gate, up, self.activation), [self.output])[0]
        return y if self.gate is None else ops.gate_rows(y, ops.linear(x, [self.gate])[0])


def expert_layers(blocks: Iterable[Any]) -> list[Experts]:
    """The experts of a model's blocks, alone or (in hybrids) as a part of what follows the mixers."""
    layers = [getattr(block.mlp, "experts", block.mlp) for block in blocks]
    return [layer for layer in layers if isinstance(layer, Experts)]


def _routing(reader: WeightReader, ffn: FeedForward, layer: str) -> RoutingSpec:
    routing = ffn.routing
    assert routing is not None
    bias = None
    if routing.correction_bias:
        bias = reader.vector(f"{router_name(reader, layer)}.e_score_correction_bias", ffn.num_experts)
    return RoutingSpec(
        ffn.experts_per_token,
        routing.score,
        routing.normalize,
        routing.scale,
        routing.num_groups,
        routing.top_groups,
        routing.group_score,
        bias,
        ffn.activation,
        ffn.clamp,
        routing.weights_on_input,
    )
