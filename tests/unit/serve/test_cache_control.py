"""What clients may ask of the KV cache, in each API's words, and what they are told about it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from tokenmill.engine.stats import EngineStats, TierStats
from tokenmill.serve.api.adapter_protocol import AnthropicBody
from tokenmill.serve.api.anthropic_messages import cache_control
from tokenmill.serve.api.protocol import CompletionBody
from tokenmill.serve.api.sampling import build_params
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.errors import ApiError
from tokenmill.serve.metrics import Metrics
from tokenmill.types import CacheControl


def _cache(**fields: Any) -> CacheControl | None:
    return build_params(CompletionBody(prompt="x", **fields), ServeConfig(), 4).cache


@pytest.mark.parametrize(
    ("fields", "cache"),
    [
        ({}, None),
        ({"cache_control": {"type": "ephemeral"}}, CacheControl(ttl=300.0)),
        ({"cache_control": {"ttl": "1h"}}, CacheControl(ttl=3600.0)),
        ({"cache_control": {"ttl": 90}}, CacheControl(ttl=90.0)),
        ({"cache_control": {"ttl": "2.5m"}}, CacheControl(ttl=150.0)),
        ({"cache_control": {"type": "pin"}}, CacheControl(pin=True)),
        ({"kv_policy": "h2o", "kv_budget": 512}, CacheControl(policy="h2o", budget=512)),
        ({"kv_policy": "full"}, CacheControl(policy="full")),
    ],
    ids=str,
)
def test_what_a_body_asks_for(fields: dict[str, Any], cache: CacheControl | None) -> None:
    assert _cache(**fields) == cache


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": {"ttl": 0}},
        {"cache_control": {"ttl": "0.1s"}},
        {"cache_control": {"ttl": "25h"}},
        {"cache_control": {"ttl": -5}},
        {"cache_control": {"ttl": "5 minutes"}},
        {"cache_control": {"ttl": float("inf")}},
        {"cache_control": {"type": "pin", "ttl": 5}},
        {"kv_policy": "h2o"},
        {"kv_budget": 100},
        {"kv_policy": "lru", "kv_budget": 100},
        {"kv_policy": "h2o", "kv_budget": -100},
        {"kv_policy": "h2o", "kv_budget": 2**40},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_a_400(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        _cache(**fields)
    assert refused.value.status == 400


def test_a_kind_that_does_not_exist_is_no_body() -> None:
    with pytest.raises(ValidationError):
        CompletionBody(prompt="x", cache_control={"type": "forever"})


def _anthropic(**fields: Any) -> AnthropicBody:
    return AnthropicBody(**{"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields})


def _block(ttl: str | None = None) -> dict[str, Any]:
    return {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}}


def test_anthropic_breakpoints_ask_for_the_longest_promise() -> None:
    assert cache_control(_anthropic()) is None
    everywhere = _anthropic(
        system=[_block("5m")],
        messages=[{"role": "user", "content": [_block("1h"), {"type": "text", "text": "b"}]}],
        tools=[{"name": "f", "cache_control": {"type": "ephemeral"}}],
    )
    found = cache_control(everywhere)
    assert found is not None
    assert found.seconds() == 3600.0
    default = cache_control(_anthropic(cache_control={"type": "ephemeral"}))
    assert default is not None
    assert default.seconds() == 300.0


@pytest.mark.parametrize(
    "fields",
    [
        {"system": [_block("2h")]},
        {"system": [_block()] * 5},
        {"cache_control": {"type": "pin"}},
        {"system": [{"type": "text", "text": "a", "cache_control": "yes"}]},
    ],
    ids=str,
)
def test_anthropic_breakpoints_that_api_does_not_know(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="cache_control"):
        cache_control(_anthropic(**fields))


def test_tiers_are_metrics_by_name_and_survive_a_restart() -> None:
    metrics = Metrics("m")
    disk = TierStats("disk", entries=3, bytes=300, hits=5, misses=1, rejected={"hash": 1, "name": 2})
    metrics.on_step(EngineStats(tiers=[disk], num_pages_retained=4, num_promises_broken=2, num_pages_unwritten=1))
    metrics.on_restart("killed")
    metrics.on_step(EngineStats(tiers=[disk, TierStats("redis", entries=1, hits=7, failures=9)]))
    text = metrics.render().decode()
    for line in (
        'kv_tier_hits_total{model_name="m",tier="disk"} 10.0',
        'kv_tier_rejected_total{model_name="m",reason="hash",tier="disk"} 2.0',
        'kv_tier_rejected_total{model_name="m",reason="name",tier="disk"} 4.0',
        'kv_tier_bytes{model_name="m",tier="disk"} 300.0',
        'kv_tier_failures_total{model_name="m",tier="redis"} 9.0',
        'kv_promises_broken_total{model_name="m"} 2.0',
    ):
        assert f"tokenmill_{line}" in text
