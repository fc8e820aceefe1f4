"""`tokenmill bench throughput` with a fixed KV memory: the smaller a token's pages, the more tokens run at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill.bench.throughput import ThroughputJob, ThroughputReport, measure_throughput
from tokenmill.config import EngineConfig

_BUDGET = 2 << 20
_LAYERS, _HEADS = 6, 6  # of stories15m; a head has 48 values
_JOB = ThroughputJob(num_prompts=60, input_len=24, output_len=24)
_BYTES = {"float16": 192, "int8": 100, "fp8": 96, "int4": 56, "turboquant4": 52}  # of a token and head


@pytest.fixture(scope="module")
def native(model_path: Callable[[str], Path]) -> ThroughputReport:
    return _run(model_path, "float16")


def _run(model_path: Callable[[str], Path], dtype: str) -> ThroughputReport:
    config = EngineConfig(kv_cache_dtype=dtype, memory=_BUDGET, concurrency=60, page_size=4)
    return measure_throughput(str(model_path("stories15m")), config, _JOB)


@pytest.mark.parametrize("dtype", ["int8", "fp8", "int4", "turboquant4"])
def test_peak_tokens_follow_the_bytes(dtype: str, native: ThroughputReport, model_path: Callable[[str], Path]) -> None:
    found = _run(model_path, dtype)
    capacity = _BUDGET / (_LAYERS * _HEADS * _BYTES[dtype])
    assert found.peak_tokens <= capacity
    assert found.peak_tokens > 0.9 * capacity  # pages are filled to the last few
    assert found.peak_tokens / native.peak_tokens > 0.9 * _BYTES["float16"] / _BYTES[dtype]
    assert found.peak_running > native.peak_running
