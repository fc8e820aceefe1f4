"""The decoder that all architectures share: embedding, blocks, final norm, head. Subclasses define how a block differs,
and which additional features of a description (`ModelDescription.features`) they support.

A block takes the residual stream and the update still to be added to it, so that each addition fuses with the norm
that follows. Written against Ops only: it runs eagerly, is recorded, or is captured, without knowing which.
"""

from __future__ import annotations

from typing import Any, ClassVar

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.hardware.kv_layout import LayerKV
from tokenmill.model.layers.attention import GatedMLP, SelfAttention
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_table
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader


class Block:
    """Norm before attention and before the MLP, as in Llama."""

    attention_class: type[Any] = SelfAttention

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable) -> None:
        d = description
        prefix = f"model.layers.{layer}"
        self.eps = d.norm_eps
        self.attention = self.attention_class(reader, d, layer, rotary)
        self.mlp = GatedMLP(reader, d, layer)
        self.attention_norm = reader.vector(f"{prefix}.input_layernorm.weight", d.hidden_size, d.norm_offset)
        self.mlp_norm = reader.vector(f"{prefix}.post_attention_layernorm.weight", d.hidden_size, d.norm_offset)

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.enter(ops, residual, update)
        residual, x = ops.add_rms_norm(residual, self.attention(ops, x), self.mlp_norm, self.eps)
        return residual, self.mlp(ops, x)

    def enter(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        if update is None:
            return residual, ops.rms_norm(residual, self.attention_norm, self.eps)
        return ops.add_rms_norm(residual, update, self.attention_norm, self.eps)


class Decoder:
    features: ClassVar[frozenset[str]] = frozenset()
    block_class: type[Block] = Block

    def __init__(self, reader: WeightReader, description: ModelDescription, num_positions: int) -> None:
        d = self.description = description
        self.embedding = reader.linear("model.embed_tokens", d.vocab_size, d.hidden_size)
        # GGUF may store the scaled frequencies of the full table instead of the scaling rule.
        divisors = reader.optional_vector("rope_freqs.weight", d.rope_table("full").rotary_dim // 2)
        tables = {
            rope.name: build_rotary_table(
                rope.rotary_dim,
                num_positions,
                rope.theta,
                rope.scaling,
                d.rope_interleaved,
                divisors if rope.name == "full" else None,
            )
            for rope in d.rope_tables
        }
        self.blocks = [self.block_class(reader, d, number, tables[layer.rope]) for number, layer in enumerate(d.layers)]
        self.norm = reader.vector("model.norm.weight", d.hidden_size, d.norm_offset)
        if d.tie_embeddings:
            self.head = self.embedding
            reader.ignore("lm_head.weight")
        else:
            self.head = reader.linear("lm_head", d.vocab_size, d.hidden_size)

    def kv_layers(self) -> list[LayerKV]:
        return self.description.kv_layers()

    def forward(self, ops: Ops) -> Value:
        """The hidden state of every token of the batch, before the final norm."""
        residual, update = ops.embed(self.embedding, self.description.embedding_scale), None
        for block in self.blocks:
            residual, update = block(ops, residual, update)
        return ops.add(residual, update)

    def logits(self, ops: Ops, hidden: Value) -> Value:
        """Logits of the rows that the step selects."""
        x = ops.rms_norm(ops.select_rows(hidden), self.norm, self.description.norm_eps)
        logits = ops.linear(x, [self.head])[0]
        cap = self.description.logit_softcap
        return ops.softcap(logits, cap) if cap else logits
