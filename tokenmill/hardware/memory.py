"""The memory model: how many bytes a deployment needs, by one formula for planner and engine.

Weights by their stored bytes, KV by pages of the layout. Pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout

# Without a stated budget the KV cache takes at most this share of the memory that is free.
DEFAULT_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class KVBudget:
    num_pages: int
    page_bytes: int
    full_requests: float  # how many requests of the whole context fit at once
    reason: str

    @property
    def nbytes(self) -> int:
        return self.num_pages * self.page_bytes


def kv_bytes_per_token(layout: KVLayout, page_bytes: int) -> float:
    """Bytes that one more token costs in a long sequence: only full groups grow."""
    growing = sum(group.kind != "sliding" for group in layout.groups)
    return growing * page_bytes / layout.page_size


def plan_kv(layout: KVLayout, page_bytes: int, context: int, concurrency: int, memory: int, available: int) -> KVBudget:
    """Pages for `concurrency` requests of `context` tokens, within `memory` (stated) or a share of `available`."""
    one = layout.peak_pages(context)
    wanted = one * concurrency
    if memory:
        pages, reason = memory // page_bytes, "memory stated"
        if pages < one:
            raise UserError(
                f"a request of {context} tokens needs {one * page_bytes / 2**20:.1f} MiB of KV cache, "
                f"memory allows {memory / 2**20:.1f} MiB",
                "lower --context or raise --memory",
            )
        pages = min(pages, wanted)
    else:
        share = int(available * DEFAULT_SHARE) // page_bytes
        pages = max(one, min(wanted, share))
        reason = "context x concurrency" if pages == wanted else f"{DEFAULT_SHARE:.0%} of free memory"
    return KVBudget(pages, page_bytes, pages / one, reason)
