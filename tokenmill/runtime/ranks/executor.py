"""The executor of a rank: the eager one over the rank's part of the model, stage by stage.

On rank 0 every call is told to the others first, so that they make the same one. recorded.py is faster where it can be
used. The head is computed by the first stage, to which the last one returns the hidden states: it has the embedding,
which many models share with the head, and it is where tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.model.group import RankError
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.model.rank_adapters import RankAdapterBank
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import StepInput, StepOutput
from tokenmill.runtime.executors.batched import copied_rows
from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.runtime.ranks.context import ContextOps, is_divided
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.pieces import in_pieces, num_pieces
from tokenmill.runtime.ranks.seat import Seat
from tokenmill.runtime.ranks.wire import Logits, Settle, step_of
from tokenmill.types import Batch


class RankExecutor(RankDuties, EagerExecutor):
    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig, seat: Seat) -> None:
        EagerExecutor.__init__(self, model, store, config)
        self.seat = seat
        self._last = torch.empty(0)  # what this stage made of the last piece

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        """With stages the output may be on its way when this returns: `hidden` and `logits` wait for it."""
        layout = self.store.layout
        batch = build_batch(
            work, layout.page_size, self.store.device, self.store.states.places if layout.states else None
        )
        states = self.begin_forward(batch)
        return StepOutput(
            logits=lambda begin, end: self.logits(states(), batch, begin, end),
            hidden=lambda tokens: copied_rows(states(), tokens),
        )

    def forward(self, batch: Batch) -> Tensor:
        return self.begin_forward(batch)()

    @torch.inference_mode()
    def begin_forward(self, batch: Batch) -> Callable[[], Tensor]:
        """This rank's part of a step; what is returned waits for the whole."""
        self.number += 1
        if self.seat.crew is not None:
            self.num_pieces = num_pieces(batch, self.seat.place.grid.pp)
        self.tell(step_of(batch, self.number, self.num_pieces))
        try:
            if self.seat.place.grid.pp == 1 or self.seat.place.stage:
                states = self._forward(batch)
                return lambda: states
            pieces = self._pass_on(batch)
        except RankError as error:
            raise self.reason(error) from None
        return cache(partial(self._returned, pieces, self.number))

    @torch.inference_mode()
    def _returned(self, pieces: Sequence[Batch], step: int) -> Tensor:
        """On the first stage: what the last one made of a step."""
        group, width = self.seat.group, self.model.decoder.description.hidden_size
        try:
            states = [
                group.receive((piece.token_ids.shape[0], width), self.seat.place.previous_stage, _tag(step, number))
                for number, piece in enumerate(pieces)
            ]
            group.release()
        except RankError as error:
            raise self.reason(error) from None
        return states[0] if len(states) == 1 else torch.cat(states)

    def _forward(self, batch: Batch) -> Tensor:
        place, group, decoder = self.seat.place, self.seat.group, self.model.decoder
        if place.grid.cp > 1 and is_divided(batch, place.grid.cp):
            self.begin(batch)
            ops = ContextOps(self, batch, group)
            return ops.whole(decoder.forward(ops))
        if place.grid.pp == 1:
            return EagerExecutor.forward(self, batch)
        self._pass_on(batch)
        group.release()
        return self._last

    def _pass_on(self, batch: Batch) -> list[Batch]:
        """This stage's blocks over the pieces of a step, one after the other."""
        self.begin(batch)
        pieces = in_pieces(batch, self.num_pieces)
        for number, piece in enumerate(pieces):
            self._last = self._pass(piece, _tag(self.number, number))
        return pieces

    def _pass(self, batch: Batch, number: int) -> Tensor:
        """This stage's blocks over one piece of the step; the result goes to the next stage."""
        place, group, decoder = self.seat.place, self.seat.group, self.model.decoder
        ops = EagerOps(self, batch)
        update: Tensor | None = None
        if place.stage:
            # Both halves of the residual stream: adding them here could round differently from the fused norm.
            shape = (2, batch.token_ids.shape[0], decoder.description.hidden_size)
            residual, update = group.receive(shape, place.previous_stage, number)
        else:
            residual = decoder.embed(ops)
        residual, update = decoder.pass_blocks(ops, residual, update)
        assert update is not None
        last = place.stage == place.grid.pp - 1
        result: Tensor = ops.add(residual, update) if last else torch.stack((residual, update))
        group.send(result, place.next_stage, number)
        return result

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        place = self.seat.place
        if place.grid.tp > 1:
            self.tell(Logits(begin, end), place.team)
        try:
            logits = EagerExecutor.logits(self, hidden, batch, begin, end)
        except RankError as error:
            raise self.reason(error) from None
        self.compare()
        return logits

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        """All ranks call it, after they agreed on the number of slots."""
        bank = RankAdapterBank(self.model, num_slots, max_rank, self.make_site, self.seat.place, self.seat.exact)
        bank.know(self.seat.collect_names(bank.names))
        self.adapters = bank

    def settle_drafts(self, kept: Sequence[int]) -> None:
        self.tell(Settle(list(kept)))
        EagerExecutor.settle_drafts(self, kept)


def _tag(step: int, piece: int) -> int:
    """Of a message between stages: several steps may be under way."""
    return step % 4096 * 64 + piece
