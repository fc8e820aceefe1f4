"""Real engines over real tiers: a second start and a second engine take up the prefix and say the same tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import RunningServer, serving
from tests.redis_server import RedisServer
from tokenmill import LLM, SamplingParams
from tokenmill.engine.kv.tier import redis, stack
from tokenmill.engine.kv.tier.costs import LoadCosts
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError

_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_PROMPT = random.Random(3).choices(range(300, 30_000), k=100)
_CACHED = 96  # full pages of eight before the last token


def _ask(model: Path, prompt: list[int] = _PROMPT, **options: Any) -> tuple[RequestOutput, list[int]]:
    with LLM(model, context=256, concurrency=4, **options) as llm:
        output = llm.generate(prompt, _GREEDY)[0]
        llm.parts.kv.check()
        return output, output.outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "kvquant3"])
def test_a_second_start_reads_the_prefix_from_disk(
    model_path: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    model = model_path("stories15m")
    options = {"kv_disk": str(tmp_path), "kv_cache_dtype": dtype}
    computed, tokens = _ask(model, **options)
    assert (computed.num_cached_tokens, computed.cache.reason) == (0, "cold")  # type: ignore[union-attr]
    loaded, again = _ask(model, **options)
    assert again == tokens
    report = loaded.cache
    assert report is not None
    assert (loaded.num_cached_tokens, report.num_loaded_tokens, report.tier) == (_CACHED, _CACHED, "disk")
    assert report.reason == "hit"


def test_another_dtype_or_page_size_finds_nothing(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("stories15m")
    _ask(model, kv_disk=str(tmp_path))
    for options in ({"kv_cache_dtype": "bfloat16"}, {"page_size": 16}):
        before = set(tmp_path.rglob("*.kv"))
        with LLM(model, context=256, kv_disk=str(tmp_path), **options) as llm:
            output = llm.generate(_PROMPT, _GREEDY)[0]
            assert not llm.stats.tiers[0].rejected, "the others' pages are left alone"
        assert output.num_cached_tokens == 0
        assert before <= set(tmp_path.rglob("*.kv"))


def test_a_damaged_page_is_computed_again(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("stories15m")
    with LLM(model, context=256, kv_disk=str(tmp_path)) as llm:
        tokens = llm.generate(_PROMPT, _GREEDY)[0].outputs[0].token_ids
        fifth = llm.parts.kv._tree.match(_PROMPT, 5)[-1].name.hex()
    (path,) = tmp_path.rglob(f"*{fifth}*")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    output, again = _ask(model, kv_disk=str(tmp_path))
    assert again == tokens
    assert (output.num_cached_tokens, output.cache.reason) == (32, "tier_failed")  # type: ignore[union-attr]
    output, again = _ask(model, kv_disk=str(tmp_path))  # written anew meanwhile
    assert (again, output.num_cached_tokens) == (tokens, _CACHED)


def test_pages_that_memory_has_no_place_for_come_back(
    model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A KV cache for one request only, host memory for the rest."""
    monkeypatch.setattr(LoadCosts, "record_step", lambda *_: None)  # a busy machine may find computing faster
    model = model_path("stories15m")
    page = 6 * 2 * 8 * 6 * 48 * 4
    with LLM(model, context=256, concurrency=1, memory=33 * page, kv_host_memory=64 << 20) as llm:
        first = llm.generate(_PROMPT, _GREEDY)[0].outputs[0].token_ids
        for seed in range(3):
            other = random.Random(seed).choices(range(300, 30_000), k=200)
            llm.generate(other, _GREEDY)
        again = llm.generate(_PROMPT, _GREEDY)[0]
        assert again.outputs[0].token_ids == first
        assert again.cache is not None
        assert again.cache.num_loaded_tokens > 0


def test_two_engines_share_a_prefix_through_redis(
    model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "_LOOKUP_TIMEOUT", 30.0)  # a busy machine may find computing faster
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    model = model_path("stories15m")
    server = RedisServer(tmp_path)
    try:
        with (
            LLM(model, context=256, kv_redis=server.url) as first,
            LLM(model, context=256, kv_redis=server.url) as second,
        ):
            tokens = first.generate(_PROMPT, _GREEDY)[0].outputs[0].token_ids
            assert not first.parts.kv.save(wait=30.0)
            shared = second.generate(_PROMPT, _GREEDY)[0]
            assert shared.outputs[0].token_ids == tokens
            assert shared.cache is not None
            assert (shared.cache.num_loaded_tokens, shared.cache.tier) == (_CACHED, "redis")
            server.stop()  # from now on each computes for itself
            other = second.generate([7, *_PROMPT], _GREEDY)[0]
            assert other.num_cached_tokens == 0
    finally:
        server.stop()


def test_an_engine_starts_without_its_tiers(
    model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    monkeypatch.setattr(stack, "_OPEN_SECONDS", 0.1)
    model = model_path("stories15m")
    (tmp_path / "file").write_text("")
    (tmp_path / "secret").write_text("0123456789abcdef")
    options = {"kv_disk": str(tmp_path / "file"), "kv_redis": "redis://127.0.0.1:1"}
    with LLM(model, context=256, kv_secret_file=str(tmp_path / "secret"), **options) as llm:
        assert len(llm.generate(_PROMPT, _GREEDY)[0].outputs[0].token_ids) == 12
        assert [tier.up for tier in llm.stats.tiers] == [0, 0]


def test_options_that_make_no_sense_are_refused(
    model_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    model = model_path("stories15m")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    for options, problem in (
        ({"kv_disk": str(tmp_path), "kv_disk_size": 1000}, "less than one page"),
        ({"kv_disk": str(tmp_path), "kv_secret_file": str(tmp_path / "file")}, "at least 16"),
        ({"kv_redis": "redis://127.0.0.1:1"}, "--kv-secret-file"),
        ({"kv_redis": "http://127.0.0.1", "kv_secret_file": __file__}, "redis://host:6379/0"),
        ({"kv_disk": str(tmp_path), "prefix_caching": False}, "prefix cache, which is off"),
        ({"kv_budget_policy": "h2o", "kv_budget": 8}, "kv_budget is 8"),
        ({"kv_budget_policy": "h2o"}, "belong together"),
    ):
        with pytest.raises(UserError, match=problem):
            LLM(model, context=64, **options)


def _complete(server: RunningServer, **fields: Any) -> Any:
    body = {"prompt": _PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return server.http.post("/v1/completions", json=body)


def test_a_server_keeps_its_prefixes_across_a_restart(model_path: Callable[[str], Path], tmp_path: Path) -> None:
    model = model_path("stories15m")
    flags = ("--context", "256", "--kv-disk", str(tmp_path), "--kv-policy", "lfu")
    with serving(model, *flags) as server:
        first = _complete(server).json()
        assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_reason": "cold"}
        lossy = _complete(server, kv_policy="paged_eviction", kv_budget=40, max_tokens=30).json()
        assert lossy["usage"]["kv_policy"] == {"name": "paged_eviction", "budget": 40, "dropped_tokens": 96}
        assert "kv_policy" not in first["usage"]
        for fields, problem in (
            ({"cache_control": {"type": "ephemeral", "ttl": 100_000}}, "ttl"),
            ({"cache_control": {"type": "ephemeral", "ttl": "soon"}}, "ttl"),
            ({"kv_policy": "h2o", "kv_budget": 3}, "kv_budget"),
            ({"kv_policy": "h2o"}, "belong together"),
            ({"kv_policy": "lru", "kv_budget": 30}, "kv_policy"),
        ):
            refused = _complete(server, **fields)
            assert refused.status_code == 400
            assert problem in refused.json()["error"]["message"]
        assert _complete(server, cache_control={"ttl": "5m"}).json()["choices"] == first["choices"]
        assert "tokenmill_kv_pages_kept" in server.http.get("/metrics").text
    for _ in range(3):
        with serving(model, *flags) as server:
            second = _complete(server).json()
            metrics = server.http.get("/metrics").text
        assert second["choices"] == first["choices"]
        found = second["usage"]["prompt_tokens_details"]
        if found["cache_reason"] != "tier_failed":  # a busy machine may read later than it would compute
            break
    assert found == {"cached_tokens": _CACHED, "cache_reason": "hit", "tier": "disk", "tier_tokens": _CACHED}
    assert f'tokenmill_kv_loaded_tokens_total{{model_name="{model}",tier="disk"}} {_CACHED:.1f}' in metrics
    assert f'tokenmill_prefix_cache_requests_total{{model_name="{model}",outcome="hit"}} 1.0' in metrics
