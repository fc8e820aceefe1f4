"""What the planner knows of a model: its layers by kind, with every matrix they multiply.

Broader than the engine's `ModelDescription` (mixtures of experts, latent attention, recurrent state, vision towers that
this engine does not run yet). One list of matrices serves both the memory and the time model. Made by model_config.py
and model_names.py; knows nothing of files, devices or formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.hardware.memory import KVNeed


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `copies` x [outputs, inputs]. `split` says how tensor parallelism cuts it; `part` what it is for."""

    part: str  # "attention" | "mlp" | "expert" | "shared" | "router" | "embedding" | "head" | "state" | "vision"
    inputs: int
    outputs: int
    split: str = "column"  # "column" (outputs) | "row" (inputs) | "none" (every rank holds it)
    copies: int = 1  # experts

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.copies

    def shard(self, tp: int) -> tuple[int, int]:
        """(outputs, inputs) of one rank."""
        if self.split == "column":
            return -(-self.outputs // tp), self.inputs
        if self.split == "row":
            return self.outputs, -(-self.inputs // tp)
        return self.outputs, self.inputs


@dataclass(frozen=True, slots=True)
class Attention:
    """One layer's token mixer. `kind`: "full" | "sliding" | "latent" | "recurrent"."""

    kind: str
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    window: int = 0
    output_gate: bool = False  # the query projection also makes a gate
    query_rank: int = 0  # latent: 0 means no low-rank query
    kv_rank: int = 0  # latent
    rope_dim: int = 0  # latent: the part of the key shared by all heads
    nope_dim: int = 0
    value_dim: int = 0
    state_values: int = 0  # recurrent: numbers of state per sequence (held in float32)
    conv_values: int = 0  # recurrent: numbers of convolution state per sequence (held in 16 bits)
    projections: tuple[tuple[int, int], ...] = ()  # recurrent: (inputs, outputs) of its matrices


@dataclass(frozen=True, slots=True)
class FeedForward:
    intermediate_size: int = 0  # dense; 0: none
    gated: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0  # width of the experts that every token passes


@dataclass(frozen=True, slots=True)
class LayerKind:
    count: int
    attention: Attention
    feed_forward: FeedForward


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: tuple[LayerKind, ...]
    tie_embeddings: bool = False
    vision_parameters: int = 0
    stored_format: str = "bf16"  # what the checkpoint holds
    stored_bytes: int = 0  # of the file at hand, if there is one

    @property
    def num_layers(self) -> int:
        return sum(kind.count for kind in self.layers)

    @property
    def is_moe(self) -> bool:
        return any(kind.feed_forward.num_experts for kind in self.layers)

    def matrices(self) -> Iterator[tuple[int, Matrix]]:
        """(how many layers have it, matrix), layers first, then embedding, head and vision tower."""
        for kind in self.layers:
            for matrix in (*attention_matrices(self.hidden_size, kind.attention), *self._feed_forward(kind)):
                yield kind.count, matrix
        yield 1, Matrix("embedding", self.hidden_size, self.vocab_size)
        if not self.tie_embeddings:
            yield 1, Matrix("head", self.hidden_size, self.vocab_size)
        if self.vision_parameters:
            yield 1, Matrix("vision", 1, self.vision_parameters, "none")

    def _feed_forward(self, kind: LayerKind) -> Iterator[Matrix]:
        ffn, hidden = kind.feed_forward, self.hidden_size
        if ffn.intermediate_size:
            yield from _mlp("mlp", hidden, ffn.intermediate_size, ffn.gated)
        if ffn.num_experts:
            yield Matrix("router", hidden, ffn.num_experts, "none")
            yield from _mlp("expert", hidden, ffn.expert_size, ffn.gated, ffn.num_experts)
        if ffn.shared_size:
            yield from _mlp("shared", hidden, ffn.shared_size, ffn.gated)

    @property
    def parameters(self) -> int:
        return sum(count * matrix.parameters for count, matrix in self.matrices())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with; the embedding is looked up, not multiplied (the head is)."""
        total = 0
        for kind in self.layers:
            ffn = kind.feed_forward
            for matrix in (*attention_matrices(self.hidden_size, kind.attention), *self._feed_forward(kind)):
                share = ffn.experts_per_token / ffn.num_experts if matrix.part == "expert" else 1.0
                total += round(kind.count * matrix.parameters * share)
        return total + self.hidden_size * self.vocab_size

    def kv_needs(self, tp: int = 1, value_bytes: float = 2.0, state_bytes: float = 4.0) -> list[KVNeed]:
        """What one rank keeps, by kind of layer: the input of hardware/memory.py. See there for the rules."""
        needs = []
        for kind in self.layers:
            a = kind.attention
            if a.kind == "latent":  # every rank needs the whole latent
                needs.append(KVNeed("full", kind.count, (a.kv_rank + a.rope_dim) * value_bytes))
            elif a.kind == "recurrent":
                state = (a.state_values * state_bytes + a.conv_values * 2) / tp
                needs.append(KVNeed("state", kind.count, 0.0, 0, state))
            elif a.num_kv_heads:
                heads = max(1, -(-a.num_kv_heads // tp))  # past one head per rank, heads are replicated
                needs.append(KVNeed(a.kind, kind.count, 2 * heads * a.head_dim * value_bytes, a.window))
        return needs

    def kv_bytes_per_token(self, tp: int = 1, value_bytes: float = 2.0) -> float:
        """Bytes that one more token costs on one rank in a short sequence (every window still open)."""
        return sum(need.layers * need.bytes_per_token for need in self.kv_needs(tp, value_bytes))


def _mlp(part: str, hidden: int, width: int, gated: bool, copies: int = 1) -> Iterator[Matrix]:
    yield Matrix(part, hidden, width * (2 if gated else 1), "column", copies)
    yield Matrix(part, width, hidden, "row", copies)


def attention_matrices(hidden: int, a: Attention) -> Iterator[Matrix]:
    if a.kind == "recurrent":
        for inputs, outputs in a.projections:
            yield Matrix("attention", inputs, outputs, "row" if outputs == hidden else "column")
        return
    if a.kind == "latent":
        key_dim = a.nope_dim + a.rope_dim
        yield Matrix("attention", hidden, a.query_rank + a.kv_rank + a.rope_dim, "none")
        yield Matrix("attention", a.query_rank or hidden, a.num_heads * key_dim)
        yield Matrix("attention", a.kv_rank, a.num_heads * (a.nope_dim + a.value_dim))
        yield Matrix("attention", a.num_heads * a.value_dim, hidden, "row")
        return
    if a.num_heads:
        queries = a.num_heads * (2 if a.output_gate else 1)
        yield Matrix("attention", hidden, (queries + 2 * a.num_kv_heads) * a.head_dim)
        yield Matrix("attention", a.num_heads * a.head_dim, hidden, "row")
