"""Models with recurrent layers: all layers (Mamba), some of them (Jamba, Qwen3-Next), or beside attention (Falcon-H1).

What a layer mixes with comes from the description; what families differ in beyond that is what they call their tensors.
Norms come before each half. Registered in architectures/__init__.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import SCALED_PROJECTIONS, Attention, Recurrent
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.recurrent import RecurrentMixer, make_recurrent
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_table
from tokenmill.model.ops import Ops, Value
from tokenmill.model.reader import WeightReader

_RECURRENT = frozenset({"Mamba layers", "Mamba 2 layers", "gated delta rule layers"})


@dataclass(frozen=True, slots=True)
class TensorNames:
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.final_layernorm"
    layers: str = "model.layers"
    recurrent: str = "mamba"
    mixer_norm: str = "input_layernorm"
    mlp_norm: str = "pre_ff_layernorm"
    mlp_inputs: tuple[str, ...] = ("feed_forward.gate_proj", "feed_forward.up_proj")  # one: gate and up rows
    mlp_output: str = "feed_forward.down_proj"


class HybridMLP:
    """output(activation(gate_scale * gate(x)) * up(x)) * output_scale; gate and up are one matrix or two."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, names: TensorNames) -> None:
        hidden, mlp = description.hidden_size, description.layers[layer].feed_forward
        assert mlp is not None
        prefix = f"{names.layers}.{layer}"
        size = mlp.intermediate_size
        width = 2 * size // len(names.mlp_inputs)
        self.inputs = [reader.linear(f"{prefix}.{name}", width, hidden, mlp.bias) for name in names.mlp_inputs]
        self.output = reader.linear(f"{prefix}.{names.mlp_output}", hidden, size, mlp.bias)
        self.size, self.activation = size, mlp.activation
        self.gate_scale, self.output_scale = mlp.gate_scale, mlp.output_scale

    def __call__(self, ops: Ops, x: Value) -> Value:
        values = ops.linear(x, self.inputs)
        gate, up = values if len(values) == 2 else ops.split(values[0], (self.size, self.size))
        y = ops.gated(_scaled(ops, gate, self.gate_scale), up, self.activation)
        return _scaled(ops, ops.linear(y, [self.output])[0], self.output_scale)


class HybridBlock:
    """x += mixers(norm(x)), which all read the same norm; x += mlp(norm(x)), where the layer has one."""

    def __init__(
        self,
        reader: WeightReader,
        description: ModelDescription,
        layer: int,
        tables: dict[str, RotaryTable],
        names: TensorNames,
    ) -> None:
        d = description
        prefix = f"{names.layers}.{layer}"
        self.mixers: list[RecurrentMixer] = []
        for mixer in d.layers[layer].mixers:
            if isinstance(mixer, Recurrent):
                self.mixers.append(make_recurrent(reader, d, layer, f"{prefix}.{names.recurrent}"))
            else:
                assert isinstance(mixer, Attention)
                self.mixers.append(SelfAttention(reader, d, layer, tables.get(mixer.rope)))
        self.mixer_norm = reader.vector(f"{prefix}.{names.mixer_norm}.weight", d.hidden_size, d.norm_offset)
        self.eps, self.residual_scale = d.norm_eps, d.residual_scale
        self.mlp: HybridMLP | None = None
        if d.layers[layer].feed_forward is not None:
            self.mlp = HybridMLP(reader, d, layer, names)
            self.mlp_norm = reader.vector(f"{prefix}.{names.mlp_norm}.weight", d.hidden_size, d.norm_offset)

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        if update is None:
            x = ops.rms_norm(residual, self.mixer_norm, self.eps)
        else:
            residual, x = ops.add_rms_norm(residual, update, self.mixer_norm, self.eps)
        update = self.mixers[0](ops, x)
        for mixer in self.mixers[1:]:
            update = ops.add(update, mixer(ops, x))
        update = _scaled(ops, update, self.residual_scale)
        if self.mlp is None:
            return residual, update
        residual, x = ops.add_rms_norm(residual, update, self.mlp_norm, self.eps)
        return residual, _scaled(ops, self.mlp(ops, x), self.residual_scale)


class Hybrid(Decoder):
    """Jamba, Bamba and Falcon-H1 as they are; others name tensors differently."""

    features = _RECURRENT | {
        "layers without rotary embedding",
        "layers without an MLP",
        "mixers side by side",
        "gated attention output",
        "partial rotary embedding",
        "scaled residual branches",
        "scaled logits",
        SCALED_PROJECTIONS,
    }
    names: ClassVar[TensorNames] = TensorNames()

    def __init__(self, reader: WeightReader, description: ModelDescription, num_positions: int) -> None:
        d, names = description, self.names
        self.description = d
        self.embedding = reader.linear(names.embedding, d.vocab_size, d.hidden_size)
        tables = {
            rope.name: build_rotary_table(rope.rotary_dim, num_positions, rope.theta, rope.scaling, d.rope_interleaved)
            for rope in d.rope_tables
        }
        self.blocks = [HybridBlock(reader, d, layer, tables, names) for layer in range(d.num_layers)]  # type: ignore[misc]
        self.norm = reader.vector(f"{names.final_norm}.weight", d.hidden_size, d.norm_offset)
        if d.tie_embeddings:
            self.head = self.embedding
            reader.ignore("lm_head.weight")
        else:
            self.head = reader.linear("lm_head", d.vocab_size, d.hidden_size)

    def logits(self, ops: Ops, hidden: Value) -> Value:
        return _scaled(ops, super().logits(ops, hidden), self.description.logit_scale)


class Mamba(Hybrid):
    """Mamba, Mamba 2 and Falcon-Mamba: nothing but recurrent layers."""

    names = TensorNames("backbone.embeddings", "backbone.norm_f", "backbone.layers", "mixer", "norm")


class GraniteHybrid(Hybrid):
    names = TensorNames(
        final_norm="model.norm",
        mlp_norm="post_attention_layernorm",
        mlp_inputs=("shared_mlp.input_linear",),
        mlp_output="shared_mlp.output_linear",
    )


class QwenNext(Hybrid):
    """Qwen3-Next and Qwen3.5."""

    names = replace(
        TensorNames(),
        final_norm="model.norm",
        recurrent="linear_attn",
        mlp_norm="post_attention_layernorm",
        mlp_inputs=("mlp.gate_proj", "mlp.up_proj"),
        mlp_output="mlp.down_proj",
    )


def _scaled(ops: Ops, x: Value, factor: float) -> Value:
    return x if factor == 1.0 else ops.scale(x, factor)
