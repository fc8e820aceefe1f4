"""The weight matrices of a model, from its description: one list for memory, time and the forecast of a quantization.

Names are canonical (Hugging Face style) and relative to the layer. Vectors (norms, biases, convolutions) are left out:
they are less than a thousandth of a model. Read by the planner and the memory model; test_matrices.py compares it with
what the architectures really load.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Mixer, Recurrent


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of `copies` x [outputs, inputs]. `split` says how tensor parallelism cuts it; `part` what it is for.

    Matrices of equal `joined` (not empty) read the same input, and engines multiply them as one.
    """

    name: str
    part: str  # "attention" | "mlp" | "expert" | "shared" | "router" | "embedding" | "head" | "vision"
    inputs: int
    outputs: int
    split: str = "column"  # "column" (outputs) | "row" (inputs) | "none" (every rank holds it)
    copies: int = 1  # experts
    joined: str = ""

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


def layer_matrices(hidden_size: int, layer: LayerDescription) -> Iterator[Matrix]:
    for mixer in layer.mixers:
        yield from _mixer(hidden_size, mixer)
    if layer.feed_forward is not None:
        yield from _feed_forward(hidden_size, layer.feed_forward)


def edge_matrices(description: ModelDescription) -> Iterator[Matrix]:
    """Embedding, head, and an image tower as one."""
    d = description
    yield Matrix("model.embed_tokens", "embedding", d.hidden_size, d.vocab_size)
    if not d.tie_embeddings:
        yield Matrix("lm_head", "head", d.hidden_size, d.vocab_size)
    if d.vision_parameters:
        yield Matrix("vision_tower", "vision", 1, d.vision_parameters, "none")


def _mixer(hidden: int, mixer: Mixer) -> Iterator[Matrix]:
    if isinstance(mixer, Attention):
        return _attention(hidden, mixer)
    return _latent(hidden, mixer) if isinstance(mixer, LatentAttention) else _recurrent(hidden, mixer)


def _attention(hidden: int, a: Attention) -> Iterator[Matrix]:
    queries = a.num_heads * a.head_dim * (2 if a.output_gate else 1)
    for name, width in (("q", queries), ("k", a.num_kv_heads * a.head_dim), ("v", a.num_kv_heads * a.value_dim)):
        yield Matrix(f"self_attn.{name}_proj", "attention", hidden, width, joined="qkv")
    yield Matrix("self_attn.o_proj", "attention", a.num_heads * a.value_dim, hidden, "row")


def _latent(hidden: int, a: LatentAttention) -> Iterator[Matrix]:
    def matrix(name: str, inputs: int, outputs: int, split: str = "column", joined: str = "") -> Matrix:
        return Matrix(f"self_attn.{name}", "attention", inputs, outputs, split, joined=joined)

    queries = a.num_heads * (a.nope_dim + a.rope_dim)
    if a.query_rank:
        yield matrix("q_a_proj", hidden, a.query_rank, "none", "down")
    yield matrix("kv_a_proj_with_mqa", hidden, a.kv_rank + a.rope_dim, "none", "down")
    yield matrix("q_b_proj" if a.query_rank else "q_proj", a.query_rank or hidden, queries)
    yield matrix("kv_b_proj", a.kv_rank, a.num_heads * (a.nope_dim + a.value_dim))
    yield matrix("o_proj", a.num_heads * a.value_dim, hidden, "row")


def _recurrent(hidden: int, a: Recurrent) -> Iterator[Matrix]:
    def matrix(name: str, inputs: int, outputs: int, split: str = "column") -> Matrix:
        return Matrix(f"mixer.{name}", "attention", inputs, outputs, split)

    if a.style == "delta":
        keys, values = a.num_key_heads * a.key_dim, a.num_heads * a.value_dim
        inputs: tuple[tuple[str, int], ...]
        if a.joined_inputs:
            inputs = (("qkvz", 2 * keys + 2 * values), ("ba", 2 * a.num_heads))
        else:
            inputs = (("qkv", 2 * keys + values), ("z", values), ("b", a.num_heads), ("a", a.num_heads))
        for name, width in inputs:
            yield matrix(f"in_proj_{name}", hidden, width)
        yield matrix("out_proj", values, hidden, "row")
        return
    if a.style == "mamba2":
        yield matrix("in_proj", hidden, a.inner + a.convolved + a.num_heads)
    else:
        yield matrix("in_proj", hidden, 2 * a.inner)
        yield matrix("x_proj", a.inner, a.rank + 2 * a.state_size)
        yield matrix("dt_proj", a.rank, a.inner)
    yield matrix("out_proj", a.inner, hidden, "row")


def _feed_forward(hidden: int, ffn: FeedForward) -> Iterator[Matrix]:
    if ffn.intermediate_size:
        yield from _mlp("mlp", "mlp", hidden, ffn.intermediate_size, ffn.gated)
    if ffn.num_experts:
        yield Matrix("mlp.gate", "router", hidden, ffn.num_experts, "none")
        yield from _mlp("mlp.experts", "expert", hidden, ffn.expert_size, ffn.gated, ffn.num_experts)
    if ffn.shared_size:
        yield from _mlp("mlp.shared_expert", "shared", hidden, ffn.shared_size, ffn.gated)


def _mlp(prefix: str, part: str, hidden: int, width: int, gated: bool, copies: int = 1) -> Iterator[Matrix]:
    if gated:
        yield Matrix(f"{prefix}.gate_proj", part, hidden, width, "column", copies, joined=f"{part} inputs")
    yield Matrix(f"{prefix}.up_proj", part, hidden, width, "column", copies, joined=f"{part} inputs")
    yield Matrix(f"{prefix}.down_proj", part, width, hidden, "row", copies)
