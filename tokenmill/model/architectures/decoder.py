"""The decoder that all architectures share: embedding, blocks, final norm, head. What differs between dense families is
data of the description: where the norms are and of which kind, gates, biases, scales, rotation.

A block takes the residual stream and the update still to be added to it, so that each addition fuses with the norm
that follows. Written against Ops only: it runs eagerly, is recorded, or is captured, without knowing which.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.rank_description import EMPTY_LAYER
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import LayerKV
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.experts import Experts
from tokenmill.model.layers.latent_attention import LatentSelfAttention
from tokenmill.model.layers.mlp import MLP
from tokenmill.model.layers.norm import NoNorm, Norm
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_tables
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

# By placement: the norms (before attention, behind it, before the MLP, behind it), under their canonical names.
_INPUT, _ATTENTION, _BEFORE, _BEHIND = (
    "input_layernorm",
    "post_attention_layernorm",  # before the MLP, unless there is a norm behind attention
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORMS = {
    "pre": (_INPUT, "", _ATTENTION, ""),
    "sandwich": (_INPUT, _ATTENTION, _BEFORE, _BEHIND),
    "post": ("", _ATTENTION, "", _BEHIND),
    "parallel": (_INPUT, "", "", ""),
    "parallel_norms": (_INPUT, "", _ATTENTION, ""),
}


class Block:
    """Attention and MLP, one behind the other or side by side, each with the norms of the description around it."""

    def __init__(
        self, reader: WeightReader, description: ModelDescription, layer: int, rotary: RotaryTable | None
    ) -> None:
        d = description
        norms = d.layers[layer].norms
        self.attention: SelfAttention | LatentSelfAttention
        if d.layers[layer].kind == "latent":
            assert rotary is not None
            self.attention = LatentSelfAttention(reader, d, layer, rotary)
        else:
            self.attention = SelfAttention(reader, d, layer, rotary)
        ffn = d.layers[layer].feed_forward
        has_experts = ffn is not None and ffn.num_experts > 0
        self.mlp: Experts | MLP = Experts(reader, d, layer) if has_experts else MLP(reader, d, layer)
        self.attention_norm, self.attention_output_norm, self.mlp_norm, self.mlp_output_norm = (
            Norm(reader, d, f"model.layers.{layer}.{name}") if name else NoNorm() for name in _NORMS[norms]
        )
        self.parallel = norms.startswith("parallel")
        self.shares_norm = norms == "parallel"
        self.residual_scale = d.residual_scale

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.attention_norm.of_sum(ops, residual, update)
        mixed = self.scaled(ops, self.attention_output_norm(ops, self.attention(ops, x)))
        if self.parallel:
            y = x if self.shares_norm else self.mlp_norm(ops, residual)
            return residual, ops.add(mixed, self.scaled(ops, self.mlp(ops, y)))
        residual, x = self.mlp_norm.of_sum(ops, residual, mixed)
        return residual, self.scaled(ops, self.mlp_output_norm(ops, self.mlp(ops, x)))

    def scaled(self, ops: Ops, update: Value) -> Value:
        return update if self.residual_scale == 1.0 else ops.scale(update, self.residual_scale)


class Decoder:
    features: ClassVar[frozenset[str]] = frozenset(
        {
            "experts",
            "latent attention",
            "attention sinks",
            "chunked attention",
            "queries scaled by position",
            "norms of heads without weights",
            "norms before and after each half",
            "norms after each half only",
            "parallel blocks",
            "norms over whole projections",
            "norms of each head",
            "LayerNorm",
            "MLPs without a gate",
            "layers without rotary embedding",
            "partial rotary embedding",
            "rope scaling 'longrope'",
            "learned positions",
            "a bias of the head",
            "scaled residual branches",
            "scaled logits",
        }
    )
    block_class: type[Block] = Block
    # Layers whose input follows the last state in what `forward` returns: a drafter reads it. See Executor.keep_layers
    kept_layers: tuple[int, ...] = ()

    def __init__(self, reader: WeightReader, description: ModelDescription, num_positions: int) -> None:
        d = self.description = description
        self.embedding = reader.linear("model.embed_tokens", d.vocab_size, d.hidden_size)
        self.positions = None
        if d.positions == "learned":
            if num_positions > d.context_length:
                raise UserError(f"the model has {d.context_length} learned positions", "give at most that as context")
            self.positions = reader.table("model.position_embeddings.weight", d.context_length, d.hidden_size)
        tables = build_rotary_tables(reader, d, num_positions)
        self.blocks = [
            self.block_class(reader, d, number, tables.get(layer.rope))
            for number, layer in enumerate(d.layers)
            if layer != EMPTY_LAYER
        ]
        self.norm = Norm(reader, d, "model.norm")
        if d.tie_embeddings:
            self.head = reader.tied_head(self.embedding)
            if d.head_bias:
                self.head.bias = reader.vector("lm_head.bias", d.vocab_size)
        else:
            self.head = reader.linear("lm_head", d.vocab_size, d.hidden_size, d.head_bias)

    def kv_layers(self) -> list[LayerKV]:
        return self.description.kv_layers()

    def forward(self, ops: Ops) -> Value:
        """The hidden state of every token of the batch, before the final norm; behind it those of `kept_layers`."""
        residual, update = self.embed(ops), None
        kept = []
        for begin, end in pairwise((0, *self.kept_layers, len(self.blocks))):
            residual, update = self.pass_blocks(ops, residual, update, begin, end)
            kept.append(residual if update is None else ops.add(residual, update))
        *inner, last = kept
        return ops.join([last, *inner]) if inner else last

    def embed(self, ops: Ops) -> Value:
        """What the first block reads."""
        residual = ops.embed(self.embedding, self.description.embedding_scale)
        return residual if self.positions is None else ops.add_positions(residual, self.positions)

    def pass_blocks(
        self, ops: Ops, residual: Value, update: Value | None, begin: int = 0, end: int | None = None
    ) -> tuple[Value, Value]:
        """The residual stream behind the blocks, and the update still to be added to it."""
        for block in self.blocks[begin:end]:
            residual, update = block(ops, residual, update)
        return residual, update

    def logits(self, ops: Ops, hidden: Value) -> Value:
        """Logits of the rows that the step selects."""
        d = self.description
        x = ops.select_rows(hidden)
        if self.kept_layers:
            x = ops.split(x, (d.hidden_size,) * (1 + len(self.kept_layers)))[0]
        x = self.norm(ops, x)
        if d.logit_scale != 1.0:  # of the head's input: far fewer numbers than logits
            x = ops.scale(x, d.logit_scale)
        logits = ops.linear(x, [self.head])[0]
        return ops.softcap(logits, d.logit_softcap) if d.logit_softcap else logits
