"""A server's own traffic, recorded and replayed: no text in the log, the same sharing in the replay."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tokenmill.bench.traffic_log import LoggedRequest, read_traffic_log
from tokenmill.checkpoint.tokenizer_files import load_tokenizer
from tokenmill.config import EngineConfig
from tokenmill.optimize.objectives import Objectives
from tokenmill.optimize.rate_search import find_rate
from tokenmill.optimize.replay import Arrivals, LocalServer, ReplayLimits, replay

_STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her big dog. "
    "One day she saw a shiny red ball under the old tree and ran to it. "
)
_TAILS = ("The ball said hello", "A bird came down", "Her mother called", "It began to rain", "Tom was there too")
_CONFIG = EngineConfig(context=256, concurrency=4)
_SECRET_NAME = "rainbow-customer"
_KEY = "key-that-nobody-must-see"


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of 20 requests: 15 begin with one story, five with nothing common."""
    root = tmp_path_factory.mktemp("traffic")
    log, keys = root / "log", root / "keys.json"
    keys.write_text(json.dumps({"keys": [{"name": _SECRET_NAME, "key": _KEY}]}))
    prompts = [_STORY + tail for tail in _TAILS for _ in range(3)] + [f"{tail} and that was all" for tail in _TAILS]
    flags = ["--traffic-log", str(log), "--api-keys-file", str(keys)]
    with LocalServer(model, _CONFIG, flags=flags, log=root / "server.log") as server:
        headers = {"authorization": f"Bearer {_KEY}"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=60) as client:

            def ask(prompt: str) -> None:
                body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                client.post("/v1/completions", json=body).raise_for_status()

            ask(prompts[0])
            with ThreadPoolExecutor(4) as pool:
                list(pool.map(ask, prompts[1:]))
            shown = client.get("/metrics").text
            assert 'outcome="dropped"} 0.0' in shown
            assert 'outcome="failed"} 0.0' in shown
    return log


@pytest.fixture(scope="module")
def requests(folder: Path) -> list[LoggedRequest]:
    return read_traffic_log(folder)


def test_every_request_is_recorded_with_its_numbers(requests: list[LoggedRequest], model: Path) -> None:
    assert len(requests) == 20
    tokenizer = load_tokenizer(model)
    lengths = sorted(len(tokenizer.encode(_STORY + tail)) for tail in _TAILS for _ in range(3))
    assert sorted(request.prompt_tokens for request in requests)[-15:] == lengths
    for request in requests:
        assert (request.output_tokens, request.max_tokens, request.finish_reason, request.error) == (8, 8, "length", "")
        assert request.ttft_ms is not None
        assert request.itl_max_ms is not None
        assert request.e2e_ms is not None
        assert 0 < request.ttft_ms < request.e2e_ms
        assert len(request.prefix_hashes) == request.prompt_tokens // 16
    assert len({request.tenant for request in requests}) == 1
    assert sum(request.cached_tokens > 0 for request in requests) >= 10


def test_shared_prefixes_are_seen_as_shared(requests: list[LoggedRequest]) -> None:
    firsts = [request.prefix_hashes[0] for request in requests if request.prefix_hashes]
    common = max(set(firsts), key=firsts.count)
    assert firsts.count(common) == 15


def test_neither_text_nor_tokens_nor_keys_are_in_the_files(folder: Path, model: Path) -> None:
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    everything = "".join(path.read_text() for path in folder.glob("traffic-*"))
    for word in ("Lily", "park", "ball", "Once", "rain", _SECRET_NAME, _KEY):
        assert word not in everything
    tokenizer = load_tokenizer(model)
    for line in everything.splitlines():
        fields = json.loads(line)
        assert not any(isinstance(value, list | dict) for value in fields.values())
        assert not {"prompt", "text", "token_ids", "messages", "stop"} & set(fields)
    ids = tokenizer.encode(_STORY)
    assert ",".join(map(str, ids[:3])) not in everything.replace(" ", "")


def test_the_log_replays_against_a_fresh_server(folder: Path, requests: list[LoggedRequest], model: Path) -> None:
    arrivals = Arrivals.from_trace(folder, 32_000, ReplayLimits(seconds=60, context=256))
    assert len(arrivals) == 20
    assert [len(prompt) for prompt in arrivals.prompts] == [request.prompt_tokens for request in requests]
    again = folder.parent / "again"
    with LocalServer(model, _CONFIG, flags=["--traffic-log", str(again)]) as server:
        generous = Objectives.parse(["p95=60s"], ["p95=60s"])
        met = replay(server.url, arrivals, generous, model="", time_limit_s=120, is_warm=True)
        missed = replay(
            server.url, arrivals, Objectives.parse(["p95=0.001ms"], []), model=server.model, time_limit_s=120
        )
        calm, generous = arrivals.at_rate(0.1), Objectives.parse(["p95=60s"], [])
        scale, _, sustained = find_rate(server.url, calm, generous, seconds=4.0, model=server.model)
    assert (met.requests, met.failed, met.attainment, met.objective_met) == (20, 0, 1.0, True)
    assert met.goodput_tok_s == met.output_tok_s > 0
    assert (missed.failed, missed.attainment, missed.goodput_tok_s, missed.objective_met) == (0, 0.0, 0.0, False)
    assert "ttft p95" in missed.refusal
    assert scale >= 1
    assert sustained.objective_met
    # The replayed prompts share what the recorded ones did.
    replayed = read_traffic_log(again)[:20]
    firsts = [request.prefix_hashes[0] for request in replayed if request.prefix_hashes]
    assert max(map(firsts.count, firsts)) == 15
    assert sum(request.cached_tokens > 0 for request in replayed) >= 10
    assert all(request.output_tokens == 8 for request in replayed)
