"""A model as one rank sees it: the same record with fewer heads, narrower MLPs and only its own layers.

An architecture built from it is a smaller model. What cannot be divided without changing the numbers is computed whole
by every rank of a stage: recurrent mixers, and attention whose norms run over all heads. Layers of other stages stay in
the list, so that layers keep their numbers, but are empty. Used by the loader (model/rank_reader.py), the engine and
the planner. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tokenmill.checkpoint.description import FeedForward, LayerDescription, ModelDescription
from tokenmill.checkpoint.matrices import layer_matrices
from tokenmill.checkpoint.mixers import Attention, LatentAttention, Mixer
from tokenmill.errors import UserError
from tokenmill.hardware.sharding import (
    Grid,
    HeadShare,
    LayerTraffic,
    Place,
    heads_of,
    heads_problem,
    stages,
    width_problem,
)

EMPTY_LAYER = LayerDescription(mixers=(), feed_forward=None)  # of another stage


def is_divided(mixer: Mixer) -> bool:
    """Whether ranks share it; else each computes it whole."""
    if isinstance(mixer, Attention):
        return mixer.head_norms != "projection"
    return isinstance(mixer, LatentAttention)


def head_share(mixer: Attention | LatentAttention, place: Place) -> HeadShare:
    """Latent rows are kept by every rank: only the heads that read them are divided."""
    if isinstance(mixer, LatentAttention):
        return HeadShare(heads_of(mixer.num_heads, 1, place.grid.tp, place.part).queries, range(1))
    return heads_of(mixer.num_heads, mixer.num_kv_heads, place.grid.tp, place.part)


def stage_layers(description: ModelDescription, grid: Grid) -> list[range]:
    """The layers of each stage, balanced by the parameters that a token passes; the first stage has the head too."""
    d = description
    costs = [float(sum(_active(d, layer))) for layer in d.layers]
    return stages(costs, grid.pp, float(d.vocab_size * d.hidden_size))


def _active(description: ModelDescription, layer: LayerDescription) -> Iterator[int]:
    for matrix in layer_matrices(description.hidden_size, layer):
        share = 1.0
        if matrix.part == "expert" and layer.feed_forward is not None:
            share = layer.feed_forward.experts_per_token / layer.feed_forward.num_experts
        yield int(matrix.parameters * share)


def grid_problem(description: ModelDescription, grid: Grid) -> str:
    """Why this model cannot run on these ranks; empty if it can."""
    if grid.pp > description.num_layers:
        return f"{description.num_layers} layers cannot be divided among {grid.pp} stages"
    if grid.experts and not any(layer.feed_forward and layer.feed_forward.num_experts for layer in description.layers):
        return "it has no experts to divide"
    if grid.tp == 1:
        return ""
    if any(isinstance(mixer, Attention) and mixer.kv_source is not None for mixer in _mixers(description)):
        return "some layers read the KV of another"
    problems = [_layer_problem(layer, grid) for layer in dict.fromkeys(description.layers)]
    return next(filter(None, problems), "")


def check_grid(description: ModelDescription, grid: Grid) -> None:
    problem = grid_problem(description, grid)
    if problem:
        sizes = [tp for tp in range(2, 17) if not grid_problem(description, replace(grid, tp=tp))]
        fitting = f"tensor parallel sizes that fit: {', '.join(map(str, sizes)) or 'only 1'}"
        raise UserError(f"the model cannot be divided among {grid.tp} x {grid.pp} ranks: {problem}", fitting)


def _mixers(description: ModelDescription) -> Iterator[Mixer]:
    for layer in description.layers:
        yield from layer.mixers


def _layer_problem(layer: LayerDescription, grid: Grid) -> str:
    for mixer in layer.mixers:
        if is_divided(mixer):
            kv = mixer.num_kv_heads if isinstance(mixer, Attention) else 1
            problem = heads_problem(mixer.num_heads, kv, grid.tp)
            if problem:
                return problem
    ffn = layer.feed_forward
    if ffn is None:
        return ""
    if grid.experts and 0 < ffn.num_experts < grid.tp:
        return f"{ffn.num_experts} experts do not suffice for {grid.tp} ranks"
    expert_size = 0 if grid.experts or not ffn.num_experts else ffn.expert_size
    widths = (ffn.intermediate_size, ffn.shared_size, expert_size)
    return next((problem for width in widths if (problem := width_problem(width, grid.tp))), "")


def local_description(description: ModelDescription, place: Place, all_stages: bool = False) -> ModelDescription:
    """`all_stages`: with the layers of every stage, for what must be alike on all ranks (page tables)."""
    own = range(description.num_layers) if all_stages else stage_layers(description, place.grid)[place.stage]
    layers = tuple(
        _local_layer(layer, place) if number in own else EMPTY_LAYER for number, layer in enumerate(description.layers)
    )
    return replace(description, layers=layers)


def _local_layer(layer: LayerDescription, place: Place) -> LayerDescription:
    if place.grid.tp == 1:
        return layer
    mixers = tuple(_local_mixer(mixer, place) for mixer in layer.mixers)
    return replace(layer, mixers=mixers, feed_forward=_local_mlp(layer.feed_forward, place))


def _local_mixer(mixer: Mixer, place: Place) -> Mixer:
    if not is_divided(mixer):
        return mixer
    assert isinstance(mixer, Attention | LatentAttention)
    share = head_share(mixer, place)
    if isinstance(mixer, LatentAttention):
        return replace(mixer, num_heads=len(share.queries))
    return replace(mixer, num_heads=len(share.queries), num_kv_heads=len(share.kv))


def _local_mlp(ffn: FeedForward | None, place: Place) -> FeedForward | None:
    """Experts keep their number and size here: they are cut when they have been read."""
    if ffn is None:
        return None
    tp = place.grid.tp
    return replace(ffn, intermediate_size=ffn.intermediate_size // tp, shared_size=ffn.shared_size // tp)


def layer_traffic(description: ModelDescription, layer: LayerDescription) -> LayerTraffic:
    """What ranks exchange in a layer. Experts are counted as one MLP: their outputs are added once per token."""
    attended = 0
    for mixer in layer.mixers:
        if is_divided(mixer):
            assert isinstance(mixer, Attention | LatentAttention)
            attended = mixer.num_heads * mixer.value_dim
    ffn = layer.feed_forward
    return LayerTraffic(description.hidden_size, attended, 0 if ffn is None else ffn.width)
