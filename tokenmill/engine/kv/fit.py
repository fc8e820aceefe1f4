"""Whether the KV pages hold one request of the full context: the scheduler counts on it, so that whoever is left alone
advances. Called once, when the scheduler is made.
"""

from __future__ import annotations

from bisect import bisect_right

from tokenmill.engine.kv.manager import KVManager
from tokenmill.errors import UserError


def check_fit(kv: KVManager, context_length: int) -> None:
    """Raises UserError if one request of the full context would not have pages enough."""
    needed = kv.layout.peak_pages(context_length)
    if kv.num_pages < needed:
        longest = bisect_right(range(1, context_length), kv.num_pages, key=kv.layout.peak_pages)
        raise UserError(
            f"a request of the full context of {context_length} tokens needs {needed} KV pages of "
            f"{kv.layout.page_size} tokens, but there are {kv.num_pages}",
            f"lower --context to at most {longest} or raise --memory" if longest > 1 else "raise --memory",
        )
