"""Engines over latent pages: a disk tier, memory as promised, and what `inspect` says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.tiny_models import make
from tokenmill import LLM, SamplingParams
from tokenmill.config import EngineConfig
from tokenmill.runtime.report import inspect_model

_GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_PROMPT = [3 + (7 * position) % 120 for position in range(100)]
_CACHED = 96  # full pages of eight before the last token


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model that borrows the tokenizer files of a real one."""
    folder = tmp_path_factory.mktemp("deepseek")
    make("deepseek_v2-yarn", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((model_path("stories15m") / name).read_text())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
def test_a_second_start_reads_the_rows_from_disk(model: Path, dtype: str, tmp_path: Path) -> None:
    tokens = []
    for cached in (0, _CACHED):
        with LLM(model, context=256, concurrency=4, kv_disk=str(tmp_path), kv_cache_dtype=dtype) as llm:
            runtime = llm.parts.runtime
            assert runtime.store.nbytes == runtime.budget.nbytes
            output = llm.generate([_PROMPT], _GREEDY)[0]
            llm.parts.kv.check()
        assert output.num_cached_tokens == cached
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


def test_inspect(model: Path) -> None:
    report = inspect_model(model, EngineConfig(device="cpu", kv_cache_dtype="bfloat16"))
    assert (report.kv.latent_layers, report.kv.full_layers) == (3, 0)
    config = json.loads((model / "config.json").read_text())
    assert report.kv.bytes_per_token == 3 * 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    assert any("projections by head" in each.runs_on for each in report.kernels)
