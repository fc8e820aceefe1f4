"""The last requests of each API key: when what happened to them, and the tokens of their prompts and answers.

Bounded by number and by tokens, in memory only, gone with the process. It answers a key's questions about its own
requests (where did the time go, where did the cached prefix end), and nobody else's. Knows tokens and times, no HTTP;
the service tells it what begins and ends, api/requests.py reads it.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tokenmill.serve.generation import Generation, Member

_MAX_TOKENS = 1 << 18  # of one key, prompts and answers: 1 MiB
_MAX_PROMPTS = 16  # of one request: texts to embed come by the thousand, and each is compared with all before it
_MAX_KEYS = 4096  # those that sent something last; names in a keys file may change for ever


@dataclass(slots=True)
class RecentPrompt:
    tokens: array[int]  # of the prompt, then of its first answer
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    cache_reason: str = ""  # of CACHE_REASONS; empty before the first token
    finish_reasons: tuple[str, ...] = ()


@dataclass(slots=True)
class RecentRequest:
    request_id: str  # as the header X-Request-Id has it
    created: float
    salt: bytes  # of the prompt cache: what is cached under another one is never shared
    prompts: list[RecentPrompt]  # the first ones
    timeline: dict[str, Any] = field(default_factory=dict)  # empty while it runs

    @property
    def num_tokens(self) -> int:
        return sum(len(prompt.tokens) for prompt in self.prompts)


class RecentRequests:
    def __init__(self, max_requests: int, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._by_key: OrderedDict[str, list[RecentRequest]] = OrderedDict()  # oldest request first
        self._running: dict[Generation, RecentRequest] = {}

    @property
    def enabled(self) -> bool:
        return self._max_requests > 0

    def open(self, key: str, request_id: str, generation: Generation) -> None:
        if not self.enabled:
            return
        prompts = [RecentPrompt(array("i", each.request.prompt_ids), len(each.request.prompt_ids))
                   for each in generation.members[:_MAX_PROMPTS]]  # fmt: skip
        salt = generation.members[0].request.cache_salt
        own = RecentRequest(request_id, time.time(), salt, prompts)
        self._running[generation] = own
        self._by_key.setdefault(key, []).append(own)
        self._by_key.move_to_end(key)
        self._trim(key)

    def close(self, key: str, generation: Generation) -> None:
        own = self._running.pop(generation, None)
        if own is None:
            return
        own.timeline = timeline_of(generation, _MAX_PROMPTS)
        for prompt, member in zip(own.prompts, generation.members, strict=False):
            _finish(prompt, member)
        self._trim(key)

    def of(self, key: str) -> list[RecentRequest]:
        """The newest first."""
        return self._by_key.get(key, [])[::-1]

    def find(self, key: str, request_id: str) -> RecentRequest | None:
        return next((each for each in self.of(key) if each.request_id == request_id), None)

    def running(self, generation: Generation) -> RecentRequest | None:
        """The record of a request that has not ended, with what is known of its prompts by now."""
        own = self._running.get(generation)
        if own is not None:
            for prompt, member in zip(own.prompts, generation.members, strict=False):
                _take_cache(prompt, member)
        return own

    def before(self, key: str, request: RecentRequest) -> list[RecentRequest]:
        """What the key sent before this request under the same salt, the newest first."""
        requests = self._by_key.get(key, [])
        place = next((number for number, each in enumerate(requests) if each is request), 0)
        return [each for each in requests[:place][::-1] if each.salt == request.salt]

    def _trim(self, key: str) -> None:
        """The oldest go first; the newest stays unless it alone is too long to keep."""
        requests = self._by_key.get(key, [])
        left = sum(each.num_tokens for each in requests)
        while requests and (len(requests) > self._max_requests or left > self._max_tokens):
            left -= requests.pop(0).num_tokens
        if not requests:
            self._by_key.pop(key, None)
        while len(self._by_key) > _MAX_KEYS:
            self._by_key.popitem(last=False)


def timeline_of(generation: Generation, max_prompts: int | None = None) -> dict[str, Any]:
    """What took how long, in seconds from the arrival of the request (`at`) and in length. `max_prompts`: of the first
    ones only."""
    stages = generation.stages
    began, submitted = stages.received, stages.submitted
    return {
        "received_at": round(time.time() - (time.monotonic() - began), 6),
        "read": _span(began, began, stages.read),
        "tokenize": _span(began, stages.read, stages.tokenized),
        "admit": _span(began, stages.tokenized, submitted),
        "prompts": [_prompt_times(member, began, submitted) for member in generation.members[:max_prompts]],
        "seconds": _rounded(time.monotonic() - began),
    }


def _prompt_times(member: Member, began: float, submitted: float) -> dict[str, Any]:
    output, line = member.output, member.timeline
    shown: dict[str, Any] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "cached_tokens": output.num_cached_tokens,
        "output_tokens": sum(len(each.token_ids) for each in output.outputs),
        "finish_reasons": [each.finish_reason for each in output.outputs],
        "stop_reasons": [each.stop_reason for each in output.outputs],
    }
    if line is None or not line.chunks:  # no token yet, or none will come: it only waited
        return shown | {"queue": _span(began, submitted, time.monotonic())}
    started, first = line.chunks[0].began, member.first_token or line.chunks[-1].ended
    shown["queue"] = _span(began, submitted, started)
    if line.queued - submitted > 0.0:
        shown["queue"]["before_scheduler"] = _rounded(line.queued - submitted)  # sending, and compiling of a grammar
    shown["prefill"] = _span(began, started, first) | {
        "num_chunks": line.num_chunks,
        "chunks": [
            {**_span(began, each.began, each.ended), "offset": each.start, "tokens": each.count, "rows": each.num_rows}
            for each in line.chunks
        ],
    }
    shown["first_token_at"] = _rounded(first - began)
    shown["decode"] = _span(began, first, max(first, member.last_token))
    shown["decode"]["longest_gap"] = _rounded(member.longest_gap)
    return shown | {"preemptions": line.num_preemptions}


def _span(began: float, start: float, end: float) -> dict[str, Any]:
    return {"at": _rounded(start - began), "seconds": _rounded(max(0.0, end - start))}


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _take_cache(prompt: RecentPrompt, member: Member) -> None:
    output = member.output
    prompt.num_cached_tokens = output.num_cached_tokens
    prompt.cache_reason = output.cache.reason if output.cache is not None else ""


def _finish(prompt: RecentPrompt, member: Member) -> None:
    _take_cache(prompt, member)
    prompt.tokens.extend(member.output.outputs[0].token_ids)
    prompt.finish_reasons = tuple(each.finish_reason or "abort" for each in member.output.outputs)
