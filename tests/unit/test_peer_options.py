"""Options of other engines: each is translated to options that exist, or refused by name with a remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from tokenmill.cli.peer_flags import rewrite
from tokenmill.config import EngineConfig, option_fields
from tokenmill.errors import UserError
from tokenmill.peer_options import PEER_OPTIONS, translate
from tokenmill.serve.config import ServeConfig, split_options
from tokenmill.types import SamplingParams

OURS = {spec.name for record in (EngineConfig, ServeConfig) for spec in option_fields(record)}
OURS |= {spec.name for spec in fields(SamplingParams)}
_TRIALS: tuple[Any, ...] = (True, False, 1, "1", 0.5, "auto", "ngram", "on", "f16", "all", "x", {"method": "ngram"})


@pytest.mark.parametrize(
    ("method", "speculate"),
    [("eagle", "head:m"), ("eagle3", "head:m"), ("mtp", "mtp"), ("deepseek_mtp", "mtp"), ("draft_model", "draft:m")],
)
def test_published_drafters(method: str, speculate: str) -> None:
    config = EngineConfig.from_options({"speculative_config": {"method": method, "model": "m"}})
    assert config.speculate == speculate


@pytest.mark.parametrize("name", PEER_OPTIONS)
def test_every_entry_answers_with_ours_or_with_a_remedy(name: str) -> None:
    for value in _TRIALS:
        refusal, means = _answer(name, value)
        if refusal is None:
            assert means is not None
            assert set(means) <= OURS
        else:
            assert name.replace("_", "-") in refusal.problem
            assert refusal.remedy


def _answer(name: str, value: Any) -> tuple[UserError | None, Mapping[str, Any] | None]:
    try:
        return None, translate(name, value)
    except UserError as error:
        return error, None


def test_no_entry_hides_an_option_of_ours() -> None:
    assert not set(PEER_OPTIONS) & OURS


def test_the_common_vllm_options_mean_ours() -> None:
    config = EngineConfig.from_options(
        {
            "max_model_len": 4096,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 2048,
            "block_size": 16,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": True,
            "enforce_eager": True,
            "tensor_parallel_size": 1,
            "dtype": "auto",
            "load_format": "safetensors",
            "swap_space": 4,
            "trust_remote_code": False,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 5},
        },
        environment={},
    )
    assert config == EngineConfig(
        context=4096,
        concurrency=8,
        batch_tokens=2048,
        page_size=16,
        gpu_memory_utilization=0.85,
        prefix_caching=False,
        executor="eager",
        kv_host_memory=4 << 30,
        speculate="ngram",
        draft_tokens=5,
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("distributed_executor_backend", "ray", "processes of one host"),
        ("trust_remote_code", True, "never run"),
        ("enable_chunked_prefill", False, "--batch-tokens"),
        ("dtype", "float32", "bfloat16"),
        ("quantization", "awq", "recognised by their content"),
        ("quantization", "bitsandbytes", "use --quantization fp8 or int4"),
        ("load_format", "tensorizer", "safetensors and GGUF"),
        ("num_gpu_blocks_override", 100, "--memory"),
        ("speculative_config", '{"method": "medusa", "model": "m"}', "train-draft"),
        ("speculative_config", '{"method": "ngram", "prompt_lookup_max": 4}', "prompt_lookup_max"),
        ("speculative_config", "[1]", "JSON object"),
        ("n_gpu_layers", 12, "one device as a whole"),
        ("swap_space", "much", "GiB"),
        ("num_predict", 5, "not available here"),
    ],
)
def test_what_we_lack_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineConfig.from_options({name: value}, environment={})


@pytest.mark.parametrize(("given", "meant"), [("auto", None), ("half", "float16"), ("bfloat16", "bfloat16")])
def test_dtypes_by_the_names_of_peers(given: str, meant: str | None) -> None:
    assert EngineConfig.from_options({"dtype": given}, environment={}).dtype == meant


def test_server_options_are_translated_too() -> None:
    server, engine = split_options(
        {"allowed_origins": "https://a.example", "disable_uvicorn_access_log": True, "ctx_size": "2k", "alias": "m"}
    )
    assert (server.cors_origin, server.access_log, server.served_model_name) == (("https://a.example",), False, ("m",))
    assert engine.context == 2048


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("lora_modules", "sql=/a", ("sql=/a",)),
        ("lora_modules", ["sql=/a", '{"name": "chat", "path": "/b", "base_model_name": "m"}'], ("sql=/a", "chat=/b")),
        ("lora_modules", [{"name": "sql", "path": "/a"}], ("sql=/a",)),
        ("loras", {"sql": "/a", "chat": "/b"}, ("sql=/a", "chat=/b")),
    ],
)
def test_adapters_as_vllm_names_them(name: str, value: Any, means: tuple[str, ...]) -> None:
    assert EngineConfig.from_options({name: value, "enable_lora": True, "max_loras": 4}).lora == means


def test_several_adapters_after_one_flag() -> None:
    written = rewrite(["m", "--lora-modules", "a=x", "b=y", "--port", "1"], {"--lora", "--port"}, "serve")
    assert written == ["m", "--lora", "a=x", "--lora", "b=y", "--port", "1"]
