"""What the executors of a rank share, however they compute: rank 0 tells the others every call before it makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tokenmill.model.group import RankError
from tokenmill.runtime.executors.batched import BatchedExecutor
from tokenmill.runtime.ranks.wire import Message, head_of

if TYPE_CHECKING:
    from tokenmill.runtime.ranks.seat import Seat


class RankDuties(BatchedExecutor):
    name = "ranks"
    seat: Seat
    number = 0  # steps so far
    num_pieces = 1  # in which the step passes the stages

    def tell(self, message: Message, ranks: Sequence[int] = ()) -> None:
        if self.seat.crew is not None:
            self.seat.crew.tell(message, ranks)

    def tell_frame(self, frame: bytes) -> None:
        if self.seat.crew is not None:
            self.seat.crew.tell_frame(frame)

    def reason(self, error: RankError) -> RankError:
        return error if self.seat.crew is None else self.seat.crew.failure(error)

    def compare(self) -> None:
        if self.seat.crew is not None:
            self.seat.crew.compare(self.seat.group.trace, self.seat.place.team)

    @torch.inference_mode()
    def token_logits(self, states: Tensor, token_ids: Sequence[int], adapter_slot: int = 0) -> Tensor:
        if self.seat.place.grid.tp == 1:
            return super().token_logits(states, token_ids, adapter_slot)
        self.tell(head_of(states, adapter_slot), self.seat.place.team)
        return self.multiply_head(states, adapter_slot)[:, list(token_ids)]

    @torch.inference_mode()
    def multiply_head(self, states: Tensor, adapter_slot: int = 0) -> Tensor:
        """Of states as the final norm gives them, the logits of all tokens."""
        head, d = self.model.decoder.head, self.model.decoder.description
        assert head.kernel is not None
        x = states.float() * d.logit_scale
        own: Tensor = head.kernel.run(x)
        site = self.adapters.site([head]) if self.adapters is not None and adapter_slot else None
        if site is not None:
            site.adapt(x, torch.full((len(x),), adapter_slot, dtype=torch.int32, device=x.device), [own])
        logits = self.seat.group.gather(own, head.shares)
        return torch.tanh(logits / d.logit_softcap) * d.logit_softcap if d.logit_softcap else logits
