"""Budget policies by name (`kv_policy` of a request). Add one: a file, a line here, its name in types.py."""

from __future__ import annotations

from tokenmill.registry import Registry

BUDGETS = Registry(
    "KV budget policy",
    {
        "streaming_llm": "tokenmill.engine.kv.budget.streaming_llm:StreamingLLM",
        "paged_eviction": "tokenmill.engine.kv.budget.paged_eviction:PagedEviction",
        "h2o": "tokenmill.engine.kv.budget.h2o:HeavyHitters",
    },
)
