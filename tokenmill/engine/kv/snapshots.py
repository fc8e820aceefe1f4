"""Where snapshots of recurrent states are taken, and how rows are cut so that they end there.

Worth a snapshot: the last page end of the known tokens (what preemption and the next turn of a conversation go on
from), the place where a prompt parts from what is cached (others may do so too), and now and then in a long prompt. Of
a request's output only the last one is kept. Siblings begin one token before the end of the prompt, so a request that
is still to be forked keeps a copy of its own there. The KV manager calls it.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.prefix_tree import PrefixNode
from tokenmill.engine.kv.states import NO_STATE, SnapshotOwner, StateSlots
from tokenmill.types import Request

_INTERVAL_TOKENS = 2048  # of a long prompt, between two snapshots
_UNLIMITED = 1 << 30


class Snapshots:
    def __init__(self, slots: StateSlots, page_size: int, prefix_caching: bool) -> None:
        self.slots = slots
        self._page_size = page_size
        self._interval = max(1, _INTERVAL_TOKENS // page_size) * page_size
        self._prefix_caching = prefix_caching

    def row_limit(self, request: Request, start: int, branch: int) -> int:
        """The most tokens that a row from `start` on may have, so that it ends where the state is kept."""
        ends = [_fork_point(request)]
        if self._prefix_caching:
            last = self._last_page_end(request)
            ends += [branch, (start // self._interval + 1) * self._interval]
            ends.append(last if start < last else last + self._page_size)
        return min((end - start for end in ends if end > start), default=_UNLIMITED)

    def keep(self, request: Request, holding: Holding) -> None:
        """Take a snapshot where the last row of a request ended, if one is wanted there."""
        computed, size, node = request.num_computed, self._page_size, holding.cursor
        if request.forked:
            self.slots.drop(holding)
        elif computed == _fork_point(request) and (computed % size or not self._prefix_caching):
            self.slots.drop(holding)
            self.slots.take_snapshot(holding.state_slot, holding)
        if not self._prefix_caching or not computed or computed != holding.committed * size:
            return
        if node.snapshot != NO_STATE or min(node.pages) < 0 or not self._is_wanted(request, holding.branch):
            return
        if computed > len(request.prompt_ids):
            if holding.trailing is not None:
                self.slots.drop_unread(holding.trailing)
            holding.trailing = node
        self.slots.take_snapshot(holding.state_slot, node)

    def fork(self, parent: Holding, cursor: PrefixNode, num_computed: int, committed: int) -> int | None:
        """A slot with the states of the parent after `num_computed` tokens; None if there is no copy of them. `cursor`:
        the node of the parent's first `committed` pages."""
        if num_computed == 0:
            return self.slots.allocate()
        source = cursor.snapshot if num_computed == committed * self._page_size else parent.snapshot
        return None if source == NO_STATE else self.slots.allocate(source)

    def release(self, holding: Holding) -> None:
        self.slots.release(holding.state_slot)
        self.slots.drop(holding)

    def check(self, holdings: Iterable[Holding], nodes: Iterable[PrefixNode]) -> None:
        """Raise AssertionError if a slot is not as it should be."""
        holdings = list(holdings)
        owners: list[SnapshotOwner] = [*nodes, *holdings]
        self.slots.check(
            [holding.state_slot for holding in holdings], [owner for owner in owners if owner.snapshot != NO_STATE]
        )

    def _is_wanted(self, request: Request, branch: int) -> bool:
        """At the page end where the last row ended."""
        computed = request.num_computed
        return computed >= self._last_page_end(request) or computed == branch or computed % self._interval == 0

    def _last_page_end(self, request: Request) -> int:
        """Before the last known token: a prefix hit leaves at least that one to compute."""
        return (request.num_tokens - 1) // self._page_size * self._page_size


def _fork_point(request: Request) -> int:
    """Tokens after which the siblings of a request begin; 0: it has none to come, or they begin at the start."""
    return len(request.prompt_ids) - 1 if request.params.n > 1 and not request.forked else 0
