"""The KV layout of a stage: the groups and page tables of the whole model, with room for its own layers only."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.rank_description import local_description
from tokenmill.hardware.kv_layout import KVLayout, build_layout
from tokenmill.hardware.sharding import Place


def stage_layout(description: ModelDescription, place: Place, own: KVLayout) -> KVLayout:
    """`own`: the layout of the stage's layers alone, whose groups may be other ones."""
    if place.grid.pp == 1:
        return own
    whole = build_layout(local_description(description, place, all_stages=True).kv_layers(), own.page_size)
    layers = {layer for group in own.groups for layer in group.layers}
    groups = tuple(
        replace(group, layers=tuple(layer for layer in group.layers if layer in layers)) for group in whole.groups
    )
    largest = max(1, max(len(group.layers) for group in groups))
    return replace(whole, groups=groups, layers_per_page=largest, states=own.states, shared=own.shared)
