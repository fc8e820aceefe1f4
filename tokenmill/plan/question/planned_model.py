"""What planning adds to a model description: equal layers counted, products as engines make them, KV needs of a rank.

Arithmetic over checkpoint/description.py, which is the same record that the engine runs; here are only the facts of the
file that was described (its format and size). Made by model_names.py; knows nothing of devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription
from tokenmill.checkpoint.matrices import Matrix, edge_matrices, layer_matrices
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Mixer, Recurrent
from tokenmill.hardware.memory import KVNeed
from tokenmill.hardware.sharding import heads_problem

_NO_FEED_FORWARD = FeedForward()


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike, with the width of the model that they belong to."""

    count: int
    layer: LayerDescription
    hidden_size: int

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return self.layer.mixers

    @property
    def feed_forward(self) -> FeedForward:
        return self.layer.feed_forward or _NO_FEED_FORWARD

    def matrices(self) -> Iterator[Matrix]:
        """The products of one such layer: matrices that read the same input are one."""
        pending: Matrix | None = None
        for matrix in layer_matrices(self.hidden_size, self.layer):
            if pending is not None and matrix.joined and matrix.joined == pending.joined:
                pending = replace(pending, outputs=pending.outputs + matrix.outputs)
                continue
            if pending is not None:
                yield pending
            pending = matrix
        if pending is not None:
            yield pending

    def share(self, matrix: Matrix) -> float:
        """Of a matrix of this layer, the part that one token multiplies with."""
        ffn = self.feed_forward
        return ffn.experts_per_token / ffn.num_experts if matrix.part == "expert" else 1.0

    @property
    def mixer_width(self) -> int:
        """Numbers of one token's activations in the mixers, roughly: heads, or what recurrent layers project to."""
        total = 0
        for mixer in self.mixers:
            if isinstance(mixer, Attention):
                total += (mixer.num_heads + mixer.num_kv_heads) * mixer.head_dim
            elif isinstance(mixer, LatentAttention):
                total += mixer.num_heads * mixer.nope_dim
            else:
                total += sum(
                    m.outputs for m in layer_matrices(self.hidden_size, self.layer) if m.name.startswith("mixer.")
                )
        return total


@dataclass(frozen=True)
class PlannedModel:
    description: ModelDescription
    name: str
    stored_format: str = "bf16"  # what the checkpoint holds
    stored_bytes: int = 0  # of the file at hand, if there is one

    def __hash__(self) -> int:
        """Without the layers: models are keys of many caches, and hashing hundreds of layers takes longer than most
        of what is kept there. Equal models still compare whole."""
        return hash((self.name, self.description.hidden_size, self.description.vocab_size, self.stored_format))

    @property
    def hidden_size(self) -> int:
        return self.description.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.description.vocab_size

    @property
    def context_length(self) -> int:
        return self.description.context_length

    @property
    def num_layers(self) -> int:
        return self.description.num_layers

    @cached_property
    def layers(self) -> tuple[LayerKind, ...]:
        """Equal layers counted, in the order in which their kinds first occur."""
        counts = Counter(_as_planned(layer) for layer in self.description.layers)
        return tuple(LayerKind(count, layer, self.hidden_size) for layer, count in counts.items())

    @property
    def mixer_kinds(self) -> set[str]:
        return {mixer.kind for kind in self.layers for mixer in kind.mixers}

    @property
    def head_counts(self) -> set[int]:
        """How many query heads the attention layers have."""
        mixers = [mixer for kind in self.layers for mixer in kind.mixers]
        return {mixer.num_heads for mixer in mixers if not isinstance(mixer, Recurrent)}

    def heads_divide(self, tp: int) -> bool:
        """Whether `tp` ranks can share the heads of every attention layer."""
        mixers = [mixer for kind in self.layers for mixer in kind.mixers if not isinstance(mixer, Recurrent)]
        return not any(heads_problem(mixer.num_heads, mixer.num_kv_heads, tp) for mixer in mixers)

    @property
    def is_moe(self) -> bool:
        return any(kind.feed_forward.num_experts for kind in self.layers)

    def matrices(self) -> Iterator[tuple[int, Matrix]]:
        """(how many layers have it, matrix), layers first, then embedding, head and vision tower."""
        for kind in self.layers:
            for matrix in kind.matrices():
                yield kind.count, matrix
        for matrix in edge_matrices(self.description):
            yield 1, matrix

    @cached_property
    def parameters(self) -> int:
        return sum(count * matrix.parameters for count, matrix in self.matrices())

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with; the embedding is looked up, not multiplied (the head is)."""
        total = 0
        for kind in self.layers:
            total += sum(round(kind.count * matrix.parameters * kind.share(matrix)) for matrix in kind.matrices())
        return total + self.hidden_size * self.vocab_size

    def kv_needs(self, tp: int = 1, value_bytes: float = 2.0) -> list[KVNeed]:
        """What one rank keeps, by kind of layer: the input of hardware/memory.py. See there for the rules."""
        return [
            need
            for kind in self.layers
            for mixer in kind.mixers
            for need in _mixer_needs(mixer, kind.count, tp, value_bytes)
        ]

    def kv_bytes_per_token(self, tp: int = 1, value_bytes: float = 2.0) -> float:
        """Bytes that one more token costs on one rank in a short sequence (every window still open)."""
        return sum(need.layers * need.bytes_per_token for need in self.kv_needs(tp, value_bytes))


def _mixer_needs(mixer: Mixer, count: int, tp: int, value_bytes: float) -> Iterator[KVNeed]:
    if isinstance(mixer, Recurrent):
        yield KVNeed("state", count, 0.0, 0, mixer.kv_need().state_bytes / tp)
    elif isinstance(mixer, LatentAttention):  # every rank needs the whole latent
        yield KVNeed("full", count, (mixer.kv_rank + mixer.rope_dim) * value_bytes)
    elif mixer.kv_source is None:
        need = mixer.kv_need()
        heads = max(1, -(-mixer.num_kv_heads // tp))  # past one head per rank, heads are replicated
        width = need.values_per_token // mixer.num_kv_heads
        yield KVNeed(need.kind, count, heads * width * value_bytes, need.window)


def _as_planned(layer: LayerDescription) -> LayerDescription:
    """Without what costs nothing: layers that differ only in their rotary table or its absence are one kind."""
    mixers = tuple(replace(mixer, rope="") if isinstance(mixer, Attention) else mixer for mixer in layer.mixers)
    return replace(layer, mixers=mixers)
