"""The further sequences of a request with `n` above 1: same prompt, own seed. The scheduler forks them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tokenmill.types import MAX_SEED, Request


def make_sibling(parent: Request, index: int) -> Request:
    """Sibling i has the parent's seed plus i."""
    return Request(
        parent.request_id,
        parent.prompt_ids,
        parent.params,
        parent.stop_ids,
        seed=(parent.seed + index) % (MAX_SEED + 1),
        priority=parent.priority,
        arrival=parent.arrival,
        index=index,
        tenant=parent.tenant,
        grammar=parent.grammar,
        weight=parent.weight,
        max_pinned_share=parent.max_pinned_share,
        cache_salt=parent.cache_salt,
        adapter=parent.adapter,
        num_cached_tokens=parent.num_cached_tokens,
        cache=replace(parent.cache),
        forked=True,
    )


def using_adapter(groups: Iterable[list[Request]], digest: bytes) -> list[Request]:
    """The sequences of a version of an adapter."""
    requests = (request for siblings in groups for request in siblings)
    return [each for each in requests if each.adapter is not None and each.adapter.digest == digest]
