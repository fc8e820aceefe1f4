"""One engine computes prompts, another decodes: the same tokens as from one, whatever happens on the way."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.serving import RunningServer, serving, wait_until
from tests.parity.tiny_models import make
from tests.quantized_files import save_quantized
from tokenmill import LLM, SamplingParams
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError
from tokenmill.model.formats.quantized import Scheme
from tokenmill.types import KvLease

_GREEDY = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
_SEEDED = SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True)
_PROMPT = random.Random(3).choices(range(3, 130), k=100)
_CACHED = 96  # full pages of eight before the last token


@pytest.fixture(autouse=True)
def own_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _model(name: str, folder: Path, model_path: Callable[[str], Path]) -> Path:
    if name == "stories15m":
        return model_path(name)
    if name == "gptq":
        save_quantized(folder, "gptq", Scheme("int", 4, 32), "llama")
    else:
        make(name, folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((model_path("stories15m") / file).read_text())
    return folder


def _run(llm: LLM, params: SamplingParams, **fields: Any) -> RequestOutput:
    request = llm.parts.intake.request(_PROMPT, params)
    for name, value in fields.items():
        setattr(request, name, value)
    output = llm._run([request], [None], False)[0]
    llm.parts.kv.check()
    return output


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("stories15m", "float32"), ("stories15m", "int8"), ("gemma3", "float32"), ("gptq", "float32")],
)
def test_two_engines_say_what_one_says(
    name: str, dtype: str, tmp_path: Path, model_path: Callable[[str], Path]
) -> None:
    model = _model(name, tmp_path / "model", model_path)
    options: dict[str, Any] = {"context": 128, "kv_cache_dtype": dtype, "page_size": 8, "batch_tokens": 40}
    with LLM(model, **options) as alone:
        expected = [_run(alone, params).outputs[0].token_ids for params in (_GREEDY, _SEEDED)]
    with LLM(model, kv_listen="127.0.0.1:0", **options) as prefill:
        address = prefill.parts.config.kv_listen
        with LLM(model, kv_peer=(address,), **options) as decode:
            for number, params in enumerate((_GREEDY, _SEEDED)):
                lease = f"lease-{number}"
                _run(prefill, SamplingParams(max_tokens=1, temperature=0.0), publishes=KvLease(lease))
                output = _run(decode, params, source=KvLease(lease, address))
                assert output.outputs[0].token_ids == expected[number]
                report = output.cache
                assert report is not None
                assert (report.source, report.tier, report.num_loaded_tokens) == ("used", "peer", _CACHED)
                decode.parts.kv.clear()
            (stats,) = decode.stats.tiers
            assert (stats.name, stats.misses, stats.failures, stats.rejected) == ("peer", 0, 0, {})


def test_other_weights_and_other_pages_are_refused(tmp_path: Path, model_path: Callable[[str], Path]) -> None:
    """A rolling update never mixes the pages of two checkpoints."""
    model = model_path("stories15m")
    with LLM(model, context=128, kv_listen="127.0.0.1:0") as prefill:
        address = prefill.parts.config.kv_listen
        other = _model("gemma3", tmp_path / "model", model_path)
        for source, changes in ((model, {"page_size": 16}), (model, {"kv_cache_dtype": "int8"}), (other, {})):
            with LLM(source, context=128, kv_peer=(address,), **changes) as decode:
                output = _run(decode, _GREEDY, source=KvLease("lease-0", address))
                assert output.cache is not None
                assert output.cache.source == "incompatible"
    for changes in ({"kv_listen": "nowhere"}, {"kv_peer": ("host",)}, {"kv_listen": "192.0.2.1:7800"}):
        with pytest.raises(UserError, match=next(iter(changes))):
            LLM(model, context=128, **changes)


def _complete(server: RunningServer, **fields: Any) -> Any:
    body = {"prompt": _PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **fields}
    return server.http.post("/v1/completions", json=body)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_servers_split_long_prompts(model_path: Callable[[str], Path]) -> None:
    model = model_path("stories15m")
    peer = f"127.0.0.1:{_free_port()}"
    common = ("--context", "256", "--threads", "1", "--batch-tokens", "32")
    with serving(model, "--role", "prefill", "--kv-listen", peer, *common) as prefill:
        split = ("--role", "decode", "--kv-peer", peer, "--prefill-url", prefill.url, "--split-min-tokens", "64")
        with serving(model, *split, *common) as decode:
            _check_splitting(prefill, decode)
            _check_stated_sources(prefill, decode, peer)
            expected = _complete(decode, cache_salt="alone", prompt=_PROMPT[:60] + _PROMPT).json()
            os.killpg(prefill.process.pid, signal.SIGKILL)
            prefill.process.wait()
            answer = _complete(decode, cache_salt="another", prompt=_PROMPT[:60] + _PROMPT).json()
            assert answer["choices"] == expected["choices"]
            details = answer["usage"]["prompt_tokens_details"]
            assert details["kv_source"] in ("prefill_failed", "unreachable", "lost", "closed", "unknown")
            assert details["cached_tokens"] == 0
            assert decode.http.get("/readyz").status_code == 200, "a peer's death is not ours"
            decode.wait_idle()


def _check_splitting(prefill: RunningServer, decode: RunningServer) -> None:
    short = _complete(decode, prompt=_PROMPT[:50]).json()
    assert "kv_source" not in short["usage"]["prompt_tokens_details"]
    alone = _complete(decode, cache_salt="must compute", prompt_logprobs=1).json()
    assert alone["usage"]["prompt_tokens_details"]["cache_reason"] == "must_compute"
    answer = _complete(decode, prompt=_PROMPT).json()
    details = answer["usage"]["prompt_tokens_details"]
    # The first pages are those of the short prompt: the rest is too short to be sent elsewhere.
    assert (details["kv_source"], details["cached_tokens"]) == ("short", 48)
    salted = _complete(decode, cache_salt="one").json()
    details = salted["usage"]["prompt_tokens_details"]
    assert (details["kv_source"], details["tier"], details["tier_tokens"]) == ("used", "peer", _CACHED)
    for each in (answer, salted):
        assert each["choices"][0]["text"] == alone["choices"][0]["text"]
    chat = {"messages": [{"role": "user", "content": "word " * 120}], "max_tokens": 4, "stream": False}
    assert decode.http.post("/v1/chat/completions", json=chat).status_code in (200, 400)  # 400: no chat template
    metrics = decode.http.get("/metrics").text
    assert 'outcome="used"} 1.0' in metrics
    assert f'tier="peer"}} {_CACHED:.1f}' in metrics
    refused = _complete(prefill)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "prefill_only")
    assert "tokenmill_kv_pages_published_total" in prefill.http.get("/metrics").text


def _check_stated_sources(prefill: RunningServer, decode: RunningServer, peer: str) -> None:
    """What a router does by itself."""
    prompt = _PROMPT[::-1]
    first = _complete(prefill, prompt=prompt, max_tokens=1, kv_publish={"lease": "by-hand-1"}).json()
    assert first["kv_source"] == {"address": peer, "lease": "by-hand-1"}
    answer = _complete(decode, prompt=prompt, kv_source=first["kv_source"]).json()
    assert answer["usage"]["prompt_tokens_details"]["kv_source"] == "used"
    wait_until(lambda: "tokenmill_kv_leases{" in prefill.http.get("/metrics").text, 10)
    for fields, problem in (
        ({"kv_source": {"address": "169.254.169.254:80", "lease": "by-hand-2"}}, "not a --kv-peer"),
        ({"kv_source": {"address": peer, "lease": "x"}}, "8 to 64"),
        ({"kv_publish": {"lease": "by-hand-2"}}, "--role prefill"),
        ({"kv_source": first["kv_source"], "prompt": [prompt, prompt]}, "one prompt"),
    ):
        refused = _complete(decode, **{"prompt": prompt, **fields})
        assert refused.status_code == 400
        assert problem in refused.json()["error"]["message"]
    late = _complete(decode, prompt=prompt[1:], kv_source={"address": peer, "lease": "by-hand-1"}, cache_salt="x")
    assert late.status_code == 200, "a lease that is over is a miss"
