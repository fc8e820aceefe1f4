"""Writes pages of the prefix tree to the tiers: those that make room, and in idle moments all others ahead of need.

What is written already costs nothing when it is evicted, and survives a restart. Pages are immutable once they are in
the tree, so they can be copied while requests hold them. The KV manager owns it and calls it from the engine thread.
"""

from __future__ import annotations

import time

from tokenmill.engine.kv.prefix_tree import PrefixNode, PrefixTree
from tokenmill.engine.kv.tier.stack import TierStack
from tokenmill.engine.stats import EngineStats
from tokenmill.types import StepPlan

_PAGES_AT_ONCE = 8


class Saver:
    def __init__(self, tree: PrefixTree, tiers: TierStack, stats: EngineStats) -> None:
        self._tree = tree
        self._tiers = tiers
        self._stats = stats
        self._unsaved: list[tuple[int, PrefixNode]] = []  # of the pass under way, what comes first at the end

    def offer(self, page: int, name: bytes, group: int) -> None:
        """A page that makes room: it is copied at the next `export`, together with others."""
        self._stats.num_pages_unwritten += not self._tiers.offer(self._tiers.key(name, group), page)

    def save(self, wait: float = 0.0) -> bool:
        """Have a few more pages written; False: there was nothing to write. The next call looks at the tree anew.

        With `wait` all of them, blocking until they are written or these seconds have passed: False if they are.
        """
        if not wait:
            return self._save_some()
        deadline = time.monotonic() + wait
        while (left := deadline - time.monotonic()) > 0:
            if not self._save_some():
                return not self._tiers.flush(left)
            if not self._tiers.has_space:
                self._tiers.flush(0.01)
        return True

    def _save_some(self) -> bool:
        if not self._unsaved:
            self._unsaved = [
                (page, node)
                for node in self._tree.nodes()  # parents first: a beginning is of use without its end
                for group, page in enumerate(node.pages)
                if page >= 0 and not self._tiers.holds(self._tiers.key(node.name, group))
            ][::-1]
        if not self._unsaved:
            return False
        for _ in range(_PAGES_AT_ONCE):
            if not self._unsaved or not self._tiers.has_space:
                break
            page, node = self._unsaved.pop()
            if self._tree.owner.get(page) is node:
                self.offer(page, node.name, node.pages.index(page))
        self._tiers.export()
        return True

    def export(self) -> None:
        """Pages that were offered are about to be overwritten."""
        self._tiers.export()

    def record_step(self, plan: StepPlan, seconds: float) -> None:
        """How long a step took: what computing a page costs, if it was mostly prompts."""
        prompt = sum(row.count for row in plan.scheduled if row.count > 1)
        if prompt >= 2 * self._tree.page_size and 2 * prompt > plan.num_tokens:
            self._tiers.costs.record_step(plan.num_tokens, seconds)

    def close(self, timeout: float) -> None:
        """Save what time allows and close the tiers."""
        deadline = time.monotonic() + timeout
        self.save(timeout)
        self._tiers.close(max(0.0, deadline - time.monotonic()))
