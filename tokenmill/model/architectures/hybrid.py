"""Models with recurrent layers: all layers (Mamba), some of them (Jamba, Qwen3-Next), or beside attention (Falcon-H1).

What a layer mixes with comes from the description; what families differ in beyond that is what they call their tensors.
Norms come before each half. Registered in architectures/__init__.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import SCALED_PROJECTIONS, Attention, Recurrent
from tokenmill.checkpoint.rank_description import EMPTY_LAYER
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.experts import Experts
from tokenmill.model.layers.norm import Norm
from tokenmill.model.layers.recurrent import RecurrentMixer, make_recurrent
from tokenmill.model.layers.rotary import RotaryTable, build_rotary_tables
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
    mlp_is_shared: bool = False  # layers with experts have the MLP too


class HybridMLP:
    """output(activation(gate_scale * gate(x)) * up(x)) * output_scale; gate and up are one matrix or two."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, names: TensorNames) -> None:
        hidden, mlp = description.hidden_size, description.layers[layer].feed_forward
        assert mlp is not None
        prefix = f"{names.layers}.{layer}"
        size = mlp.intermediate_size or mlp.shared_size
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


class HybridExperts:
    """Experts, and Granite's shared MLP beside them, which is named like its dense one."""

    def __init__(self, reader: WeightReader, description: ModelDescription, layer: int, names: TensorNames) -> None:
        d, shared = description, names.mlp_is_shared
        if shared:
            alone = tuple(
                replace(each, feed_forward=replace(each.feed_forward, shared_size=0)) if each.feed_forward else each
                for each in d.layers
            )
            d = replace(d, layers=alone)
        self.experts = Experts(reader, d, layer)
        self.shared = HybridMLP(reader, description, layer, names) if shared else None

    def __call__(self, ops: Ops, x: Value) -> Value:
        y = self.experts(ops, x)
        return y if self.shared is None else ops.add(y, self.shared(ops, x))


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
        self.mixer_norm = Norm(reader, d, f"{prefix}.{names.mixer_norm}")
        self.residual_scale = d.residual_scale
        self.mlp: HybridMLP | HybridExperts | None = None
        feed_forward = d.layers[layer].feed_forward
        if feed_forward is not None:
            has_experts = feed_forward.num_experts > 0
            self.mlp = HybridExperts(reader, d, layer, names) if has_experts else HybridMLP(reader, d, layer, names)
            self.mlp_norm = Norm(reader, d, f"{prefix}.{names.mlp_norm}")

    def __call__(self, ops: Ops, residual: Value, update: Value | None) -> tuple[Value, Value]:
        residual, x = self.mixer_norm.of_sum(ops, residual, update)
        update = self.mixers[0](ops, x)
        for mixer in self.mixers[1:]:
            update = ops.add(update, mixer(ops, x))
        update = _scaled(ops, update, self.residual_scale)
        if self.mlp is None:
            return residual, update
        residual, x = self.mlp_norm.of_sum(ops, residual, update)
        return residual, _scaled(ops, self.mlp(ops, x), self.residual_scale)


class Hybrid(Decoder):
    """Jamba, Bamba and Falcon-H1 as they are; others name tensors differently."""

    features = _RECURRENT | {
        "experts",
        "layers without rotary embedding",
        "layers without an MLP",
        "mixers side by side",
        "gated attention output",
        "partial rotary embedding",
        "scaled residual branches",
        "scaled logits",
        SCALED_PROJECTIONS,
    }
    names = TensorNames()

    def __init__(self, reader: WeightReader, description: ModelDescription, num_positions: int) -> None:
        d, names = description, self.stored_names(reader)
        self.description = d
        self.embedding = reader.linear(names.embedding, d.vocab_size, d.hidden_size)
        self.positions = None
        tables = build_rotary_tables(reader, d, num_positions)
        own = [number for number, layer in enumerate(d.layers) if layer != EMPTY_LAYER]
        self.blocks = [HybridBlock(reader, d, layer, tables, names) for layer in own]  # type: ignore[misc]
        self.norm = Norm(reader, d, names.final_norm)
        if d.tie_embeddings:
            self.head = reader.tied_head(self.embedding)
        else:
            self.head = reader.linear("lm_head", d.vocab_size, d.hidden_size)

    def stored_names(self, reader: WeightReader) -> TensorNames:  # noqa: ARG002
        """As this file has them."""
        return self.names


class Mamba(Hybrid):
    """Mamba, Mamba 2 and Falcon-Mamba: nothing but recurrent layers."""

    names = TensorNames(final_norm="model.norm", recurrent="mixer")


class GraniteHybrid(Hybrid):
    names = TensorNames(
        final_norm="model.norm",
        mlp_norm="post_attention_layernorm",
        mlp_inputs=("shared_mlp.input_linear",),
        mlp_output="shared_mlp.output_linear",
        mlp_is_shared=True,
    )

    def stored_names(self, reader: WeightReader) -> TensorNames:
        """A GGUF has gate and up apart."""
        apart = ("shared_mlp.gate_proj", "shared_mlp.up_proj")
        return replace(self.names, mlp_inputs=apart) if reader.has_prefix(f"model.layers.0.{apart[0]}") else self.names


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
