"""Eviction policies by name. To add one: a file here that implements `EvictionPolicy`, and its line in this table."""

from __future__ import annotations

from tokenmill.registry import Registry

POLICIES = Registry(
    "KV eviction policy",
    {
        "lru": "tokenmill.engine.kv.policy.lru:LeastRecentlyUsed",
        "lfu": "tokenmill.engine.kv.policy.lfu:LeastFrequentlyUsed",
    },
)
