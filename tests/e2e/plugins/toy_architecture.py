"""A toy architecture in one file: attention and MLP read the same norm and are added together (x + attn(n) + mlp(n)).

`register` teaches the engine the model type, whose config says nothing of it, and the class that computes it.
"""

from __future__ import annotations

from tokenmill.checkpoint.configs.families import Family, register_model_type
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.architectures import ARCHITECTURES
from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.layers.attention import GatedMLP, SelfAttention
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

NAME = "toy_parallel"


class ParallelBlock(Block):
    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable) -> None:
        d = description
        self.eps = d.norm_eps
        self.attention = SelfAttention(reader, d, layer, rotary)
        self.mlp = GatedMLP(reader, d, layer)
        self.attention_norm = reader.vector(
            f"model.layers.{layer}.input_layernorm.weight", d.hidden_size, d.norm_offset
        )

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.enter(ops, residual, update)
        return residual, ops.add(self.attention(ops, x), self.mlp(ops, x))


class ToyParallel(Decoder):
    features = frozenset({"parallel blocks"})
    block_class = ParallelBlock


def register() -> None:
    ARCHITECTURES.register(NAME, ToyParallel)
    register_model_type(NAME, Family(norms="parallel"))
