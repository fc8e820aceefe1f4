"""Drafts from one layer that came with a published checkpoint: EAGLE's, or a model's own for tokens further ahead.

Such a layer reads, at each position, the target's state there and the token behind it; its last state gives the next
token, and stands for the target's at the next position. Owns when it is computed: its keys and values for every token
that the target computes, prompts included; the rest of it only to draft. Drafted keys are kept for one draft, so a
rejected token leaves nothing. The layers are in eagle_layer.py and mtp.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Drafter, Target
from tokenmill.runtime.speculation.draft_model import full_group
from tokenmill.runtime.speculation.layer_memory import Context, LayerMemory
from tokenmill.types import Request, ScheduledTokens

_MIN_PROBABILITY = 0.05  # drafting ends where that of all tokens of a row together is below this in every row

# Queries [T, heads * head_dim], keys and values [T, kv_heads * head_dim] of the same tokens -> [T, heads * head_dim].
AttendNew = Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor]


class DraftLayer(ABC):
    """What is computed at a position p: from the state there ("features"), and the token at p + 1."""

    key_width: int  # of a token's keys, and of its values
    kept_layers: tuple[int, ...] = ()  # of the target, whose inputs follow its last state
    dtype = torch.float32  # of keys and values
    nbytes: int

    @abstractmethod
    def features(self, hidden: Tensor) -> Tensor:
        """The target's states as `StepOutput.hidden` brings them -> [T, hidden]."""

    @abstractmethod
    def keys(self, features: Tensor, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [T, key_width]."""

    @abstractmethod
    def step(self, features: Tensor, token_ids: Tensor, positions: Tensor, attend: AttendNew) -> Tensor:
        """[T, hidden]: the features that are expected at the next position."""

    @abstractmethod
    def best(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """([T] probability, [T] id) of the most likely token behind the one that made these features."""


class LayerDrafter(Drafter):
    name = "layer"
    computes = True
    needs_hidden = True
    needs_all_states = True
    takes_recurrent = True

    def __init__(self, layer: DraftLayer, target: Target) -> None:
        self.layer = layer
        store, self._device = target.store, target.model.device
        if layer.kept_layers:
            reason = target.executor.keep_layers(layer.kept_layers)
            if reason:
                raise UserError(
                    f"an EAGLE-3 head reads states of layers {', '.join(map(str, layer.kept_layers))}, and {reason}",
                    "use --executor eager",
                )
        like = torch.empty(0, dtype=layer.dtype, device=self._device)
        size, group = store.layout.page_size, full_group(store.layout, "with a draft layer")
        self.memory = LayerMemory(store.num_pages, size, group, layer.key_width, like)
        # By request: how many tokens it has when these features are those before its last token.
        self.states: WeakKeyDictionary[Request, tuple[int, Tensor]] = WeakKeyDictionary()

    @classmethod
    def build(cls, argument: str, target: Target) -> LayerDrafter:
        raise NotImplementedError  # heads.py and mtp.py build them

    @property
    def nbytes(self) -> int:
        return self.layer.nbytes + self.memory.nbytes

    @torch.inference_mode()
    def observe_states(
        self, rows: Sequence[ScheduledTokens], following: Sequence[Sequence[int]], hidden: Tensor
    ) -> None:
        if not len(hidden):
            return
        counts = [len(tokens) for tokens in following]
        positions = [row.start + n for row, count in zip(rows, counts, strict=True) for n in range(count)]
        features = self.layer.features(hidden)
        k, v = self.layer.keys(
            features, self._tensor([each for ids in following for each in ids]), self._tensor(positions)
        )
        kept = [number for number, row in enumerate(rows) if counts[number] and not row.num_dropped]
        ends = torch.tensor(counts).cumsum(0).tolist()
        if kept:
            tokens = [n for number in kept for n in range(ends[number] - counts[number], ends[number])]
            chosen = self._tensor(tokens)
            self.memory.write([rows[n] for n in kept], [following[n] for n in kept], k[chosen], v[chosen])
        for number in kept:
            row = rows[number]
            self.states[row.request] = (row.start + counts[number] + 1, features[ends[number] - 1].clone())

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = [Draft() for _ in rows]
        lengths = [self.states.get(row.request, (0, None))[0] for row in rows]
        ready = [
            number
            for number, row in enumerate(rows)
            if limits[number] and lengths[number] == row.request.num_tokens and not row.num_dropped
        ]
        if not ready:
            return drafts
        own = [rows[number] for number in ready]
        for number, ids, chances in zip(ready, *self.guess(own, max(limits[n] for n in ready)), strict=True):
            drafts[number] = Draft(ids[: limits[number]], chances[: limits[number]])
        return drafts

    def guess(self, rows: Sequence[ScheduledTokens], depth: int) -> tuple[list[list[int]], list[list[float]]]:
        """[rows][up to depth] tokens and their probabilities."""
        known = [row.request.num_tokens for row in rows]
        # The state before the last token is at known - 2: what is in memory there is computed again, with its query.
        context = self.memory.read(rows, [count - 2 for count in known], depth)
        features = torch.stack([self.states[row.request][1] for row in rows])
        last = self._tensor([row.request.token_ids[-1] for row in rows])
        positions = self._tensor([count - 2 for count in known])
        total = torch.ones(len(rows), device=self._device)
        ids, chances = [], []
        for ahead in range(depth):
            features = self.layer.step(features, last, positions + ahead, _attention(context))
            chance, last = self.layer.best(features)
            ids.append(last)
            chances.append(chance)
            total *= chance
            if float(total.max()) < _MIN_PROBABILITY:
                break
        return torch.stack(ids, 1).tolist(), torch.stack(chances, 1).tolist()

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64).to(self._device)


def _attention(context: Context) -> AttendNew:
    """Over what is known of each row and its own drafted tokens, which the new ones join."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        context.append(k.to(context.keys.dtype), v.to(context.values.dtype))
        heads = (len(q), context.length, spec.num_kv_heads, spec.head_dim)
        keys, values = (
            each[:, : context.length].float().view(heads).transpose(1, 2) for each in (context.keys, context.values)
        )
        queries = q.float().view(len(q), spec.num_kv_heads, -1, spec.head_dim)
        scores = queries @ keys.transpose(2, 3) * spec.scale  # [R, kv_heads, heads of each, L]
        seen = context.mask[:, None, None, : context.length]
        chances = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return (chances @ values).flatten(1)

    return attend
