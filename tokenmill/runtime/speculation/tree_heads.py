"""A trained head that drafts trees: where the first guess is doubtful, the second and third are checked beside it.

`--speculate tree:DIR`. Guesses level by level with a beam, then keeps the tokens with the best chances of being right;
their number is the row's number of draft slots. Everything else is as in heads.py; verify.py follows the branches.
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

MAX_NODES = 63  # the ancestors of a token, the known one among them, are bits of one word
_BRANCHES = 3  # guesses for the position after a token
_BEAM = 3  # tokens of a level that are followed


@dataclass(slots=True)
class _Node:
    token_id: int
    confidence: float
    chance: float  # of being reached and right
    parent: int


class TreeHeads(HeadDrafter):
    name = "tree"

    @classmethod
    def build(cls, argument: str, target: Target) -> TreeHeads:
        if not argument:
            raise UserError("--speculate tree names no directory", "write --speculate tree:DIR, made by train-draft")
        if not target.executor.takes_trees:
            raise UserError(
                f"executor {target.executor.name} does not check trees of drafts over {target.store.name} pages",
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
            if levels is not None:  # a medusa head guesses a depth whatever came before it
                states = levels[depth : depth + 1].expand(len(beam), -1)
            else:
                ids = torch.tensor([last if node < 0 else nodes[node].token_id for node in beam])
                attend = None if views is None else views.look(views.batch([row] * len(beam)))
                states = self.head(hidden, self.words.embed(ids.to(hidden.device)), attend)
            chances, guesses = (each.tolist() for each in self.words.top(states, _BRANCHES))
            first = len(nodes)
            for place, node in enumerate(beam):
                reached = 1.0 if node < 0 else nodes[node].chance
                nodes += [
                    _Node(token_id, chance, reached * chance, node)
                    for token_id, chance in zip(guesses[place], chances[place], strict=True)
                ]
            order = sorted(range(first, len(nodes)), key=lambda node: -nodes[node].chance)[:_BEAM]
            if levels is None:
                hidden = states[[beam.index(nodes[node].parent) for node in order]]
            beam = order
        return nodes


def _best(nodes: list[_Node], limit: int) -> Draft:
    """The most likely ones, parents before children: a token's chance is never above its parent's."""
    order = sorted(range(len(nodes)), key=lambda node: (-nodes[node].chance, node))[:limit]
    place = {node: number for number, node in enumerate(order)}
    return Draft(
        [nodes[node].token_id for node in order],
        [nodes[node].confidence for node in order],
        parents=[place[nodes[node].parent] if nodes[node].parent >= 0 else -1 for node in order],
    )
