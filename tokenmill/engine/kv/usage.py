"""How full the KV pages are, and how well used, for statistics and metrics. The KV manager calls it each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.pages import PagePool
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Request


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Pages by state, and how well the held ones are used."""

    num_free: int
    num_cached: int
    num_held: int
    num_tokens: int  # in the contexts of all requests; one that several share counts for each
    waste: float  # of the token slots in held pages, the fraction that holds no token
    padding: float  # of the layer slots in held pages, the fraction that belongs to no layer


def usage_of(layout: KVLayout, pool: PagePool, holdings: Mapping[Request, Holding]) -> KVUsage:
    num_groups = len(layout.groups)
    num_held = pool.num_pages - pool.available
    num_tokens = unused = 0
    for request, holding in holdings.items():
        num_tokens += request.num_computed
        tail = holding.capacity - request.num_computed
        unused += tail // pool.refs[holding.tables[0][-1]] if holding.shared and tail else tail
    waste = unused * num_groups / (num_held * layout.page_size) if num_held else 0.0
    padding = 0.0
    unfilled = [1 - layout.filled(group) for group in layout.groups]
    if num_held and any(unfilled):
        pages = [0] * num_groups
        for holding in holdings.values():
            for group, first in enumerate(holding.first_live):
                pages[group] += len(holding.tables[group]) - first
        padding = sum(part * number for part, number in zip(unfilled, pages, strict=True)) / sum(pages)
    return KVUsage(pool.num_free, pool.num_cached, num_held, num_tokens, waste, padding)
