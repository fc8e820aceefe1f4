"""A trained head that drafts trees: the second and third most likely tokens are verified together with the first.

`--speculate tree:DIR`. Grows the tree level by level with a beam, then keeps the most probable tokens, as many as the
row has draft slots. Everything else is as in heads.py; verify.py follows the branches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.runtime.executors.base import Draft
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.head_modules import MedusaHeads
from tokenmill.runtime.speculation.heads import HeadDrafter, load_head
from tokenmill.types import ScheduledTokens

MAX_NODES = 63  # ancestors of a token, including the known one, are the bits of an int64
_BRANCHES = 3  # children of a token
_BEAM = 3  # tokens of a level that get children


@dataclass(slots=True)
class _Node:
    token_id: int
    confidence: float
    chance: float  # that it and all its ancestors are right
    parent: int


class TreeHeads(HeadDrafter):
    name = "tree"

    @classmethod
    def build(cls, argument: str, target: Target) -> TreeHeads:
        if not argument:
            raise UserError("--speculate tree needs a directory", "write --speculate tree:DIR, made by train-draft")
        if not target.executor.takes_trees:
            raise UserError(
                f"executor {target.executor.name} cannot verify draft trees over {target.store.name} pages",
                "use --speculate head:DIR, or --device cpu with --kv-cache-dtype auto",
            )
        return cls(load_head(Path(argument), target.model), target.model, target.store)

    @torch.inference_mode()
    def draft(self, rows: Sequence[ScheduledTokens], limits: Sequence[int]) -> list[Draft]:
        drafts = [Draft() for _ in rows]
        for number in self.ready(rows, limits):
            nodes = self._grow(self.states[rows[number].request][1].float()[None], rows[number])
            drafts[number] = _best(nodes, min(limits[number], MAX_NODES))
        return drafts

    def _grow(self, hidden: Tensor, row: ScheduledTokens) -> list[_Node]:
        nodes: list[_Node] = []
        last, views = row.request.token_ids[-1], self.views
        beam = [-1]
        levels = self.head(hidden)[0] if isinstance(self.head, MedusaHeads) else None
        for depth in range(self.head.depth):
            if levels is not None:  # a medusa head predicts each depth independently of the tokens before it
                states = levels[depth : depth + 1].expand(len(beam), -1)
            else:
                ids = torch.tensor([last if node < 0 else nodes[node].token_id for node in beam])
                attend = None if views is None else views.attend_fn(views.batch([row] * len(beam)))
                states = self.head(hidden, self.vocabulary.embed(ids.to(hidden.device)), attend)
            chances, guesses = (values.tolist() for values in self.vocabulary.top(states, _BRANCHES))
            first = len(nodes)
            for row_in_beam, node in enumerate(beam):
                reached = 1.0 if node < 0 else nodes[node].chance
                nodes += [
                    _Node(token_id, chance, reached * chance, node)
                    for token_id, chance in zip(guesses[row_in_beam], chances[row_in_beam], strict=True)
                ]
            order = sorted(range(first, len(nodes)), key=lambda node: -nodes[node].chance)[:_BEAM]
            if levels is None:
                hidden = states[[beam.index(nodes[node].parent) for node in order]]
            beam = order
        return nodes


def _best(nodes: list[_Node], limit: int) -> Draft:
    """The most probable nodes, parents before children: no node is more probable than its parent."""
    order = sorted(range(len(nodes)), key=lambda node: (-nodes[node].chance, node))[:limit]
    index = {node: number for number, node in enumerate(order)}
    return Draft(
        [nodes[node].token_id for node in order],
        [nodes[node].confidence for node in order],
        parents=[index[nodes[node].parent] if nodes[node].parent >= 0 else -1 for node in order],
    )
