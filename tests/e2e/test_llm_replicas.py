"""An LLM with two engines: the outputs of one, in the order of the prompts, also after one of them was killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.parity.tiny_models import make, write_tokenizer
from tests.random_adapters import make_adapter
from tokenmill.engine import replicas
from tokenmill.engine.async_engine import AsyncEngine
from tokenmill.engine.llm import LLM
from tokenmill.engine.replicas import divided
from tokenmill.errors import UserError
from tokenmill.types import Request, SamplingParams

_PROMPTS = [[3 + (7 * n + i) % 120 for i in range(4 + 3 * n)] for n in range(6)]
_PARAMS = [SamplingParams(max_tokens=8, temperature=0.8 * (n % 2), ignore_eos=True, n=1 + n % 2) for n in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    make("llama", folder)
    write_tokenizer(folder)
    return folder


def _tokens(llm: LLM, lora: str | None = None) -> list[list[list[int]]]:
    return [[each.token_ids for each in output.outputs] for output in llm.generate(_PROMPTS, _PARAMS, lora=lora)]


def test_two_engines_give_the_tokens_of_one(model: Path, tmp_path: Path) -> None:
    adapter = make_adapter(model, tmp_path / "a", 1)
    options = {"context": 64, "threads": 1, "loras": {"a": str(adapter)}}
    with LLM(model, **options) as llm:
        right = _tokens(llm), _tokens(llm), _tokens(llm, "a")
    with LLM(model, **options, data_parallel_size=2) as llm:
        assert _tokens(llm) == right[0]
        assert llm.stats.num_finished < sum(params.n for params in _PARAMS), "one engine computed everything"
        (other,) = llm._others
        os.kill(other.pid, signal.SIGKILL)
        assert _tokens(llm) == right[1]  # by the one that is left
        assert _tokens(llm, "a") == right[2]  # by both again


def test_a_frozen_engine_is_replaced(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SILENCE_SECONDS", 3.0)
    with LLM(model, context=64, threads=1) as llm:
        right = _tokens(llm), _tokens(llm)
    with LLM(model, context=64, threads=1, data_parallel_size=2) as llm:
        assert _tokens(llm) == right[0]
        (other,) = llm._others
        frozen = other.pid
        os.kill(frozen, signal.SIGSTOP)
        assert _tokens(llm) == right[1]
        assert other.pid != frozen


def test_parts_keep_common_beginnings_together() -> None:
    requests = [Request(str(n), [n % 3, 5, 6, n], SamplingParams(max_tokens=4)) for n in range(12)]
    parts = divided(requests, 3)
    assert sorted(number for part in parts for number in part) == list(range(12))
    assert all(len({requests[number].prompt_ids[0] for number in part}) == 1 for part in parts)
    assert divided(requests[:1], 3).count([]) == 2


def test_what_has_no_other_engines_refuses_them(model: Path) -> None:
    with pytest.raises(UserError, match="for serve and LLM"):
        AsyncEngine(model, data_parallel_size=2)
