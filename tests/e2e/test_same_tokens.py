"""A request gives the same greedy tokens alone, in a batch, in any chunks, after a prefix hit and after preemption."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parity.tiny_models import make
from tokenmill import LLM, SamplingParams
from tokenmill.engine.outputs import RequestOutput

_REFERENCE = {"kernels": "ref", "executor": "eager", "threads": 1}
_GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=["stories15m", "gemma3", "mistral", "deepseek_v3-yarn"])
def model(
    request: pytest.FixtureRequest, model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A real model; tiny random ones with sliding windows or latent attention, which borrow its tokenizer files."""
    if request.param == "stories15m":
        return model_path("stories15m")
    folder = tmp_path_factory.mktemp(request.param)
    make(request.param, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text((model_path("stories15m") / name).read_text())
    return folder


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    lengths = [5, 70, 33, 64, 12, 90, 3, 21]
    return [[1, *torch.randint(3, 131, (length,), generator=generator).tolist()] for length in lengths]


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """Each prompt alone, whole, without a prefix cache."""
    with LLM(model, context=128, prefix_caching=False, batch_tokens=256, **_REFERENCE) as llm:
        return [_tokens(llm.generate([prompt], _GREEDY))[0] for prompt in _prompts()]


def test_batch_of_eight(model: Path, expected: list[list[int]]) -> None:
    with LLM(model, context=128, **_REFERENCE) as llm:
        assert _tokens(llm.generate(_prompts(), _GREEDY)) == expected


@pytest.mark.parametrize(("batch_tokens", "page_size"), [(3, 16), (17, 4), (100, 1)])
def test_any_chunk_and_page_size(model: Path, expected: list[list[int]], batch_tokens: int, page_size: int) -> None:
    options = {"context": 128, "batch_tokens": batch_tokens, "page_size": page_size}
    count = 3 if batch_tokens == 3 else 8
    with LLM(model, **options, **_REFERENCE) as llm:
        assert _tokens(llm.generate(_prompts()[:count], _GREEDY)) == expected[:count]


def test_prefix_hit(model: Path, expected: list[list[int]]) -> None:
    with LLM(model, context=128, page_size=4, **_REFERENCE) as llm:
        llm.generate(_prompts(), _GREEDY)
        outputs = llm.generate(_prompts(), _GREEDY)
        assert all(output.num_cached_tokens > 0 for output in outputs if len(output.prompt_token_ids) > 8)
        assert _tokens(outputs) == expected


def test_preemption(model: Path, expected: list[list[int]]) -> None:
    with LLM(model, context=128, page_size=1, **_REFERENCE) as probe:
        page_bytes = probe.parts.runtime.budget.page_bytes
        one = probe.parts.runtime.layout.peak_pages(128)
    # Room for the longest request and little more while eight want to run.
    options = {"context": 128, "page_size": 1, "batch_tokens": 32, "memory": one * 3 // 2 * page_bytes}
    with LLM(model, **options, **_REFERENCE) as llm:
        longer = _tokens(llm.generate(_prompts(), replace(_GREEDY, max_tokens=32)))  # so long that pages run out
        assert [tokens[: _GREEDY.max_tokens] for tokens in longer] == expected
        assert llm.stats.num_preemptions > 0


def test_siblings_share_the_prompt_and_repeat_it_greedily(model: Path, expected: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, n=3)
    with LLM(model, context=128, page_size=4, **_REFERENCE) as llm:
        outputs = llm.generate(_prompts()[:3], params)
    for output, tokens in zip(outputs, expected, strict=False):
        assert [each.token_ids for each in output.outputs] == [tokens] * 3


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(model: Path) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=16, seed=11, ignore_eos=True)
    with LLM(model, context=128, **_REFERENCE) as llm:
        alone = _tokens(llm.generate([_prompts()[2]], params))[0]
        noise = [SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)] * 7
        together = llm.generate([*_prompts()[:7], _prompts()[2]], [*noise, params])
    assert _tokens(together)[-1] == alone
