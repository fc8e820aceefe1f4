"""Where the cached prefix of a prompt ended, and why: the earlier prompt of the same key that is most like it, the
token at which the two part, and the text on both sides of that token.

A follow-up of a chat should find the whole conversation in the cache. Where it does not, something at the beginning
changed: a date in the system prompt, tools in another order, an answer that came back in another form. Tokens in, a
plain record out; api/requests.py shows it to the key that sent both prompts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tokenmill.serve.recent import RecentPrompt, RecentRequest

_SHOWN_TOKENS = 24  # of text on each side
_KEPT_BACK = {  # why less was reused than the two prompts share, where the engine says so
    "must_compute": "every token had to be computed: prompt_logprobs or the KV policy of the request needs them",
    "slower": "a tier has them, but recomputing them is faster by measured costs",
    "no_room": "a tier has them, but running requests needed the pages: raise --memory or lower --concurrency",
    "tier_failed": "a tier had them, but did not load them in time: see tokenmill_kv_tier_failures_total",
    "tier_busy": "too many loads from tiers were under way",
    "off": "prefix caching is off: serve without --no-prefix-caching",
}
_EVICTED = "their pages had left the cache: raise --memory, keep the prompt with cache_control, or add --kv-disk"


def prefix_break(
    prompt: RecentPrompt, earlier: Iterable[RecentRequest], page_size: int, decode: Callable[[list[int]], str]
) -> dict[str, Any]:
    """`earlier`: the newest first; of prompts that share as much, the newest is compared with."""
    own = prompt.tokens[: prompt.num_prompt_tokens]
    best, like, request_id = 0, None, None
    for request in earlier:
        for other in request.prompts:
            shared = common_length(own, other.tokens)
            if shared > best:
                best, like, request_id = shared, other, request.request_id
    reusable = min(best, len(own) - 1) // page_size * page_size
    shown: dict[str, Any] = {
        "prompt_tokens": len(own),
        "cached_tokens": prompt.num_cached_tokens,
        "reason": prompt.cache_reason,
        "page_size": page_size,
        "compared_with": request_id,
        "matching_tokens": best,
        "reusable_tokens": reusable,
    }
    if like is not None and best < len(own):
        shown |= _both_sides(own, like, best, decode)
    return shown | {"explanation": _explain(prompt, like, best, reusable, page_size)}


def common_length(one: array[int], other: array[int]) -> int:
    """How many tokens two sequences begin with in common."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # alike up to `low`, not up to `high`
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _both_sides(own: array[int], like: RecentPrompt, offset: int, decode: Callable[[list[int]], str]) -> dict[str, Any]:
    def text(tokens: Sequence[int]) -> str:
        return decode(list(tokens)) if tokens else ""

    end = offset + _SHOWN_TOKENS
    return {
        "offset": offset,
        "within": "prompt" if offset < like.num_prompt_tokens else "answer",
        "text_before": text(own[max(0, offset - _SHOWN_TOKENS) : offset]),
        "text_then": text(like.tokens[offset:end]),
        "text_now": text(own[offset:end]),
    }


def _explain(prompt: RecentPrompt, like: RecentPrompt | None, best: int, reusable: int, page_size: int) -> str:
    if like is None:
        return "no recent prompt of this key and cache_salt begins with the same token"
    if prompt.num_cached_tokens > reusable:
        return "more was cached than the recent prompts share: from a request that is no longer kept"
    if prompt.num_cached_tokens < reusable:
        why = _KEPT_BACK.get(prompt.cache_reason, _EVICTED)
        return f"{reusable - prompt.num_cached_tokens} tokens more are alike, but {why}"
    if best >= prompt.num_prompt_tokens:
        return "the whole prompt was seen before: all but its last tokens came from the cache"
    if best < page_size:
        return f"the prompts part before the first page of {page_size} tokens is full: begin with what they share"
    if best >= len(like.tokens):
        return "the earlier conversation is a prefix of this one: all its full pages were reused"
    if best >= like.num_prompt_tokens:
        return (
            "the earlier answer comes back in another form than it was generated: the client or the template changed it"
        )
    return "the text differs from this token on: keep what changes (dates, ids, the order of tools) behind what stays"
