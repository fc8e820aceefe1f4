"""The dense MLP, gated or not: the second half of a block."""

from __future__ import annotations

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class MLP:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x)))."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int) -> None:
        prefix = f"model.layers.{layer}.mlp"
        hidden, mlp = description.hidden_size, description.layers[layer].feed_forward
        assert mlp is not None
        self.gated, self.activation = mlp.gated, mlp.activation
        self.inputs = [
            reader.linear(f"{prefix}.{name}", mlp.intermediate_size, hidden, mlp.bias)
            for name in (("gate_proj", "up_proj") if mlp.gated else ("up_proj",))
        ]
        self.output = reader.linear(f"{prefix}.down_proj", hidden, mlp.intermediate_size, mlp.bias)

    def __call__(self, ops: Ops, x: Value) -> Value:
        if self.gated:
            gate, up = ops.linear(x, self.inputs)
            inner = ops.gated(gate, up, self.activation)
        else:
            inner = ops.activate(ops.linear(x, self.inputs)[0], self.activation)
        return ops.linear(inner, [self.output])[0]
