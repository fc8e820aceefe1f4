"""The target's KV pages as a draft head sees them: some layers, up to the last token whose hidden state is known.

Read-only; the pages are read by the attention backend of their store. Queries get the rotary position of that last
token, whatever their depth. Used by heads.py; captured_views.py is the GPU form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.kernels.ref import rope
from tokenmill.model.architectures.decoder import Decoder
from tokenmill.model.attention import choose_attention
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.attention import SelfAttention
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import StepInput
from tokenmill.runtime.speculation.head_modules import Attend
from tokenmill.types import Batch, ScheduledTokens


class PageViews:
    def __init__(self, model: LoadedModel, store: KVStore, layers: Sequence[int]) -> None:
        self.store = store
        self.specs, self.rotary = attention_specs(model.decoder, layers)
        self.group_slots = [store.layout.place(layer) for layer in layers]
        self.kernels = model.kernels  # a forced backend of the op table, or empty

    def batch(self, rows: Sequence[ScheduledTokens]) -> Batch:
        """The rows as of one token ago: the last token whose state is known, and the keys up to it."""
        before = [replace(row, start=row.request.num_tokens - 2, count=1) for row in rows]
        return build_batch(StepInput(before), self.store.layout.page_size, self.store.device)

    def attend_fn(self, batch: Batch) -> Attend:
        """Attention for one query of each row of `batch`."""
        backend = choose_attention(self.store, self.kernels)

        def attend(queries: Tensor) -> Tensor:
            spec, table = self.specs[0], self.rotary
            rotated = rope(queries, batch.positions, table.cos, table.sin, spec.head_dim, table.interleaved)
            attended = []
            for part, spec, (group, slot) in zip(
                rotated.chunk(len(self.specs), 1), self.specs, self.group_slots, strict=True
            ):
                attended.append(backend.attend(part.contiguous(), slot, batch.block_tables[group], batch, spec))
            return torch.cat(attended, 1)

        return attend


def attention_specs(decoder: Decoder, layers: Sequence[int]) -> tuple[list[AttentionSpec], RotaryTable]:
    """The attention of a head over these layers (no windows, no caps), and the rotary table of their keys."""
    found = [decoder.blocks[layer].attention for layer in layers]
    attentions = [attention for attention in found if isinstance(attention, SelfAttention)]
    if len(attentions) < len(found):
        raise UserError("a draft head cannot read latent attention", "use another drafter")
    rotary = attentions[0].rotary
    if rotary is None or not rotary.rotates_keys or any(attention.rotary is not rotary for attention in attentions):
        raise UserError(
            "a draft head reads layers of one rotary table only",
            "train it on layers that rotate, or use another drafter",
        )
    return [replace(attention.spec, window=0, softcap=0.0, chunk=0, sinks=None) for attention in attentions], rotary


def choose_layers(decoder: Decoder, count: int) -> tuple[int, ...]:
    """`count` of the layers with full attention, evenly spaced, including the last of them."""
    full = [layer for layer, kind in enumerate(decoder.description.layer_kinds) if kind == "full"]
    if count > len(full):
        raise UserError(
            f"the draft head cannot read {count} layers: the target has {len(full)} with full attention",
            f"give 0 to {len(full)}",
        )
    return tuple(full[(number + 1) * len(full) // count - 1] for number in range(count))
