"""Every KV dtype through the engine: it answers, says which way its pages are read, and repeats itself whatever the
threads, the executor's chunks and the prefix cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tokenmill import LLM, SamplingParams
from tokenmill.cli.main import main
from tokenmill.engine.build import EngineParts
from tokenmill.model.kvstore import KV_STORES

_PROMPT = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park with her dog. One day"
)
_BY_TORCH = {"kivi4", "kivi2", "kvquant_k3v4", "kvquant3", "turboquant4_prod", "turboquant3_prod", "turboquant2_prod"}
_STORES = [name for name in KV_STORES if name != "fp8_e4m3"]  # a second name


@pytest.fixture(scope="module")
def model(model_path: Callable[[str], Path]) -> Path:
    return model_path("stories15m")


def answer(model: Path, dtype: str, **options: object) -> tuple[list[int], EngineParts]:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    with LLM(model, kv_cache_dtype=dtype, context=160, concurrency=2, **options) as llm:
        first = llm.generate([_PROMPT, _PROMPT + " she"], params)
        again = llm.generate([_PROMPT], params)  # its prefix is cached
        assert len(first[1].outputs[0].token_ids) == 12
        if not dtype.startswith("kivi"):  # recent pages are rounded when their sequence has moved on, not before
            assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
        return list(first[0].outputs[0].token_ids), llm.parts


@pytest.fixture(scope="module")
def native(model: Path) -> list[int]:
    return answer(model, "float32")[0]


@pytest.mark.parametrize("dtype", _STORES)
def test_answers(model: Path, native: list[int], dtype: str) -> None:
    tokens, parts = answer(model, dtype, threads=1)
    assert parts.config.executor == ("eager" if dtype in _BY_TORCH else "recorded")
    if dtype in ("float16", "bfloat16", "fp8", "fp8_per_token_head", "int8", "int8_per_token_head"):
        assert tokens == native
    if dtype in ("int8", "int4", "turboquant3"):
        assert answer(model, dtype, threads=2)[0] == tokens


def test_native_layers(model: Path, native: list[int]) -> None:
    tokens, parts = answer(model, "turboquant2", kv_native_layers=2)
    assert parts.runtime.budget.page_bytes == 8 * 6 * (4 * 2 * 48 * 2 + 2 * 2 * (12 + 2))
    assert len(tokens) == len(native)


@pytest.mark.parametrize(
    ("dtype", "executor", "words"),
    [("int4", "recorded", "C++"), ("kivi2", "eager", "torch"), ("auto", "recorded", "plain")],
)
def test_inspect_says_how_pages_are_read(
    model: Path, dtype: str, executor: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(model), "--kv-cache-dtype", dtype, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["executor"]["chosen"] == executor
    assert words in found["kv_cache"]["read_as"]
    assert found["kv_cache"]["page_size"] == (32 if dtype == "kivi2" else 8)


def test_wrong_options(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, remedy in (
        (["--kv-cache-dtype", "int9"], "int8"),
        (["--kv-cache-dtype", "kivi2"], ""),
        (["--kv-cache-dtype", "kivi2", "--page-size", "8"], "--page-size 32"),
        (["--kv-cache-dtype", "kivi2", "--page-size", "24"], "--page-size 32"),
        (["--kv-cache-dtype", "int4", "--kv-native-layers", "3"], "--kv-native-layers"),
    ):
        code = main(["inspect", str(model), *flags, "--json"])
        assert code == (2 if remedy else 0)
        assert remedy in capsys.readouterr().err
