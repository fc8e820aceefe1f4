"""Gemma 3: norms on both sides of attention and of the MLP."""

from __future__ import annotations

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class Gemma3Block(Block):
    def __init__(
        self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable | None
    ) -> None:
        super().__init__(reader, description, layer, rotary)
        d = description
        prefix = f"model.layers.{layer}"
        # Gemma gives the name that other models use for the MLP's input norm to attention's output norm.
        self.attention_output_norm = self.mlp_norm
        self.mlp_norm = reader.vector(f"{prefix}.pre_feedforward_layernorm.weight", d.hidden_size, d.norm_offset)
        self.mlp_output_norm = reader.vector(
            f"{prefix}.post_feedforward_layernorm.weight", d.hidden_size, d.norm_offset
        )

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.enter(ops, residual, update)
        x = ops.rms_norm(self.attention(ops, x), self.attention_output_norm, self.eps)
        residual, x = ops.add_rms_norm(residual, x, self.mlp_norm, self.eps)
        return residual, ops.rms_norm(self.mlp(ops, x), self.mlp_output_norm, self.eps)


class Gemma3(Decoder):
    features = frozenset({"norms before and after each half"})
    block_class = Gemma3Block
