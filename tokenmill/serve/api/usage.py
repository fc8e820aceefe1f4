"""Token counts of an answer as the OpenAI API reports them, and for the access log; with additional
fields for what the KV cache did. Called by all generating routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenmill.serve.api.exchange import DONE, Record, event
from tokenmill.serve.api.protocol import GenerationBody
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation


def usage_of(generation: Generation, record: Record) -> dict[str, Any]:
    outputs = generation.outputs
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    completion = sum(len(each.token_ids) for output in outputs for each in output.outputs)
    record.prompt_tokens, record.cached_tokens, record.completion_tokens = prompt, cached, completion
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, **_cache_details(generation)},
    }
    if generation.num_truncated_tokens:
        usage["prompt_tokens_details"]["truncated_tokens"] = generation.num_truncated_tokens
    if generation.num_reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": generation.num_reasoning_tokens}
    return usage | cost_of(generation) | lossy_policy(generation)


def cost_of(generation: Generation) -> dict[str, float]:
    """Dollars, on a server that has prices."""
    cost = generation.cost
    return {} if cost is None else {"cost": round(cost, 12)}


class StreamUsage:
    """The `usage` of the chunks of a stream: absent, None until the end, or what was sent so far in each chunk."""

    def __init__(
        self,
        body: GenerationBody,
        generation: Generation,
        record: Record,
        diagnose: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`diagnose`: further fields of the last chunk."""
        self._diagnose = diagnose
        self._included, self._continuous = body.include_usage(), body.continuous_usage()
        self._generation, self._record = generation, record
        self._num_sent = sum(member.num_resumed for member in generation.members)

    def count(self, delta: Delta) -> None:
        self._num_sent += len(delta.token_ids)

    def fields(self) -> dict[str, Any]:
        if not self._continuous:
            return {"usage": None} if self._included else {}
        usage = usage_of(self._generation, self._record)  # of all that came, which may be more than was sent
        sent = {"completion_tokens": self._num_sent, "total_tokens": usage["prompt_tokens"] + self._num_sent}
        return {"usage": usage | sent}

    def end(self, head: dict[str, Any], error: ApiError | None = None) -> bytes:
        """The last events of a stream: what went wrong, or the usage where it was asked for."""
        if error is not None:
            self._record.error = error.message
            return event(error.body()) + DONE
        usage = usage_of(self._generation, self._record)
        last = ({"usage": usage} if self._included else {}) | self._diagnose()
        return (event({**head, "choices": [], **last}) if last else b"") + DONE


def lossy_policy(generation: Generation) -> dict[str, Any]:
    """Tokens that a lossy KV budget policy dropped: part of every response that a budget may have changed."""
    control = generation.members[0].request.params.cache
    if control is None or not control.budget:
        return {}
    dropped = sum(each.num_dropped_tokens for output in generation.outputs for each in output.outputs)
    return {"kv_policy": {"name": control.policy, "budget": control.budget, "dropped_tokens": dropped}}


def _cache_details(generation: Generation) -> dict[str, Any]:
    """Why no more of the prompt was cached, and what was loaded from a tier; empty before the first token."""
    reports = [output.cache for output in generation.outputs if output.cache is not None]
    if not reports:
        return {}
    loaded = sum(report.num_loaded_tokens for report in reports)
    details: dict[str, Any] = {"cache_reason": ",".join(dict.fromkeys(report.reason for report in reports))}
    if any(report.retention == "over_quota" for report in reports):
        details["cache_control"] = "over_quota"  # the prompt is cached, but not kept as the request asked
    sources = dict.fromkeys(report.source for report in reports if report.source)
    if sources:
        details["kv_source"] = ",".join(sources)  # "used", or why the prompt was not computed elsewhere
    if loaded:
        details["tier"] = ",".join(dict.fromkeys(report.tier for report in reports if report.tier))
        details["tier_tokens"] = loaded
    return details
