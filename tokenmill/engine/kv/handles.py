"""What the KV manager hands to the scheduler: a match to admit a request with, and the slots it then gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenmill.engine.kv.prefix_tree import PrefixNode
from tokenmill.types import CacheReport, Request


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What `match` found: a handle for `reserve`, stale after any other call that moves pages."""

    num_tokens: int = 0
    max_tokens: int = 0  # that any cache could have given this request; 0: it must compute every token itself
    fits: bool = True
    num_unheld: int = 0  # matched pages without a holder: taking them makes that many fewer available
    nodes: list[PrefixNode] = field(default_factory=list)
    branch: int = 0  # tokens up to which pages are cached; more than `num_tokens` where there is no snapshot


@dataclass(slots=True)
class Reservation:
    """Slots that a request may write its next tokens to. False where there are none."""

    num_tokens: int
    block_tables: tuple[list[int], ...]  # per group: page id by page index, NO_PAGE where the window left it; live
    num_dropped: int  # tokens whose pages a budget took out of the tables
    state_slot: int = 0  # of recurrent layers

    def __bool__(self) -> bool:
        return self.num_tokens > 0


NO_MATCH = PrefixMatch()
NO_SLOTS = Reservation(0, (), 0)


@dataclass(slots=True)
class Restored:
    """What the tiers gave a request, and why no more (empty if it got all there was)."""

    reason: str = ""
    num_tokens: int = 0
    tier: str = ""
    source: str = ""  # of a request whose pages a peer had: "used", or a word for why not all came from there


def wants_prompt_logprobs(request: Request) -> bool:
    """Whether every prompt token must be computed by this very request, for its log-probabilities."""
    return request.params.prompt_logprobs is not None and request.index == 0 and request.num_output_tokens == 0


def report_of(match: PrefixMatch, max_pages: int, restored: Restored, reason: str) -> CacheReport:
    """How the cache served a request that is admitted. `reason`: why it could not, empty if it could."""
    if not reason and len(match.nodes) >= max_pages:
        reason = "hit" if max_pages else "short"
    reason = reason or restored.reason or ("partial" if match.nodes else "cold")
    loaded = min(restored.num_tokens, match.num_tokens)
    return CacheReport(reason, restored.tier if loaded else "", loaded, source=restored.source)
