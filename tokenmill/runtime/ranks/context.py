"""A prompt's tokens divided among ranks that each have the whole model (context parallelism): Ops over one rank's part.

Each rank computes neighbouring tokens of a step; before attention the keys and values of all are put together in the
order of tokens, and every rank stores all of them. So any rank has what later steps read, and the bits are those of one
process: rows of a step do not depend on each other but through what is stored. Steps of few tokens, with drafts, or of
models with recurrent layers are computed whole by every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.runtime.ranks.pieces import piece
from tokenmill.types import Batch

if TYPE_CHECKING:
    from tokenmill.model.group import Group

MIN_TOKENS = 32  # of a rank: reading the weights takes as long for one token as for some tens


def is_divided(batch: Batch, ranks: int) -> bool:
    whole = batch.drafted or batch.ancestors is not None or batch.state_slots is not None
    return not whole and batch.token_ids.shape[0] >= MIN_TOKENS * ranks


def bounds_of(batch: Batch, ranks: int) -> list[int]:
    """Where the tokens of each rank begin, and the end."""
    tokens = batch.token_ids.shape[0]
    return [tokens * rank // ranks for rank in range(ranks + 1)]


class ContextOps(EagerOps):
    def __init__(self, executor: EagerExecutor, batch: Batch, group: Group) -> None:
        self._bounds = bounds_of(batch, group.size)
        begin, end = self._bounds[group.part : group.part + 2]
        # As long as the longest row of the step, which decides how latent attention is computed.
        super().__init__(executor, replace(piece(batch, begin, end), max_query=batch.max_query))
        self._whole, self._group = batch, group

    def store(self, slot: int, group: int, k: Tensor, v: Tensor) -> None:
        if v is k:
            k = v = self.whole(k)
        else:
            k, v = self.whole(torch.cat((k, v), -1)).split((k.shape[-1], v.shape[-1]), -1)
        self._executor.store.write(slot, self._whole.slots[group], k.contiguous(), v.contiguous())

    def whole(self, x: Tensor) -> Tensor:
        """The rows of all ranks."""
        return self._group.gather_rows(x, self._counts)

    @property
    def _counts(self) -> Sequence[int]:
        return [end - begin for begin, end in pairwise(self._bounds)]
