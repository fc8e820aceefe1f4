"""A toy architecture in one file: attention and MLP read the same norm and are added together (x + attn(n) + mlp(n)).

`register` teaches the engine the model type, whose config says nothing of it, and the class that computes it.
"""

from __future__ import annotations

from tokenmill.checkpoint.configs.families import Family, register_model_type
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.model.architectures import ARCHITECTURES
from tokenmill.model.architectures.decoder import Block, Decoder
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.mlp import MLP
from tokenmill.model.layers.norm import Norm
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

NAME = "toy_parallel"


class ParallelBlock(Block):
    def __init__(
        self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable | None
    ) -> None:
        self.attention = SelfAttention(reader, description, layer, rotary)
        self.mlp = MLP(reader, description, layer)
        self.norm = Norm(reader, description, f"model.layers.{layer}.input_layernorm")

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.norm.of_sum(ops, residual, update)
        return residual, ops.add(self.attention(ops, x), self.mlp(ops, x))


class ToyParallel(Decoder):
    features = frozenset({"toy blocks"})
    block_class = ParallelBlock


def register() -> None:
    ARCHITECTURES.register(NAME, ToyParallel)
    register_model_type(NAME, Family(other_features=("toy blocks",)))
