"""The loop of every rank but the first: take a message, do it, take the next, until told to end or rank 0 is gone."""

from __future__ import annotations

from torch import Tensor

from tokenmill.checkpoint.adapters.adapter import Adapter
from tokenmill.log import get_logger
from tokenmill.model.group import RankError
from tokenmill.runtime.ranks.duties import RankDuties
from tokenmill.runtime.ranks.seat import Link, Seat
from tokenmill.runtime.ranks.wire import (
    Adapt,
    Broken,
    Compare,
    Copies,
    Head,
    Logits,
    Message,
    Move,
    Numbers,
    Settle,
    Step,
    Stop,
    Use,
    adapter_of,
    batch_of,
    decode,
    encode,
    states_of,
)
from tokenmill.types import Batch

_log = get_logger(__name__)
_MAX_REASON = 500  # characters


class Follower:
    def __init__(self, executor: RankDuties, seat: Seat) -> None:
        self._executor, self._seat = executor, seat
        self._batch: Batch | None = None
        self._hidden: Tensor | None = None
        self._adapter: Adapter | None = None  # on its way into a slot

    def run(self, link: Link) -> None:
        while True:
            try:
                message = decode(link.receive())
            except (EOFError, OSError):
                return
            if isinstance(message, Stop):
                return
            self._handle(message, link)

    def _handle(self, message: Message, link: Link) -> None:
        executor, store = self._executor, self._executor.store
        match message:
            case Step():
                self._batch = batch_of(message, store.device)
                executor.num_pieces = message.num_pieces
                self._hidden = executor.forward(self._batch)
            case Logits(begin, end):
                assert self._batch is not None
                assert self._hidden is not None
                executor.logits(self._hidden, self._batch, begin, end)
            case Head():
                executor.multiply_head(states_of(message).to(store.device), message.adapter_slot)
            case Adapt():
                self._adapter = adapter_of(message)
            case Use(slot, is_empty):
                assert executor.adapters is not None
                if is_empty:
                    executor.adapters.clear(slot)
                else:
                    assert self._adapter is not None
                    executor.adapters.load(slot, self._adapter)
                    self._adapter = None
            case Settle(kept):
                executor.settle_drafts(kept)
            case Copies(pages, states):
                if pages:
                    store.copy_pages(pages)
                if states:
                    store.states.copy(states)
            case Move(tables, first, path):
                store.move_tokens(tuple(tables), first, path)
            case Compare():
                link.send(encode(Numbers([self._seat.group.trace])))
            case _:
                raise AssertionError(f"rank {self._seat.place.rank} cannot follow {message}")


def report(link: Link, error: BaseException) -> None:
    """Tell rank 0 why this rank ends, if it still listens."""
    text = f"{type(error).__name__}: {error}" if not isinstance(error, RankError) else str(error)
    try:
        link.send(encode(Broken(text[:_MAX_REASON], isinstance(error, RankError))))
    except (OSError, ValueError):
        _log.error("rank 0 is gone; this rank ends: %s", text)
