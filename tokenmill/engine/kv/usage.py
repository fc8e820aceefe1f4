"""How full the KV pages are, and how well used: fills in the page gauges of the statistics record, once per step; and
whether there are enough of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

from tokenmill.engine.kv.holding import Holding
from tokenmill.engine.kv.pages import PagePool
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.types import Request


def measure_pages(
    stats: EngineStats, layout: KVLayout, pool: PagePool, holdings: Mapping[Request, Holding]
) -> EngineStats:
    num_groups = len(layout.groups)
    num_held = pool.num_pages - pool.available
    num_tokens = unused = 0
    for request, holding in holdings.items():
        num_tokens += request.num_computed
        tail = holding.capacity - request.num_computed
        unused += tail // pool.refs[holding.tables[0][-1]] if holding.shared and tail else tail
    padding = 0.0
    unfilled = [1 - layout.filled(group) for group in layout.groups]
    if num_held and any(unfilled):
        pages = [0] * num_groups
        for holding in holdings.values():
            for group, first in enumerate(holding.first_live):
                pages[group] += len(holding.tables[group]) - first
        padding = sum(part * number for part, number in zip(unfilled, pages, strict=True)) / sum(pages)
    stats.num_pages = pool.num_pages
    stats.num_pages_free = pool.num_free
    stats.num_pages_cached = pool.num_cached
    stats.num_pages_held = num_held
    stats.num_context_tokens = num_tokens
    stats.kv_usage = num_held / pool.num_pages
    stats.kv_waste = unused * num_groups / (num_held * layout.page_size) if num_held else 0.0
    stats.kv_padding = padding
    return stats


def check_fit(layout: KVLayout, num_pages: int, context_length: int) -> None:
    """Refuse memory that cannot hold one request of the full context."""
    needed = layout.peak_pages(context_length)
    if num_pages < needed:
        longest = bisect_right(range(1, context_length), num_pages, key=layout.peak_pages)
        raise UserError(
            f"a request of the full context of {context_length} tokens needs {needed} KV pages of "
            f"{layout.page_size} tokens, but there are {num_pages}",
            f"lower --context to at most {longest} or raise --memory" if longest > 1 else "raise --memory",
        )
