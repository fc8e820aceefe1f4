"""Every registered architecture inside the engine against transformers: log-probabilities of greedy tokens within 1e-4,
computed alone, in a batch of eight in chunks, with a prefix hit, after preemption and by siblings; the same tokens in
all of them. Run with -s for the table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.tiny_models import CONFIGS, make, write_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.engine.outputs import RequestOutput
from tokenmill.model.architectures import ARCHITECTURES

_REFERENCE = {"kernels": "ref", "executor": "eager", "threads": 1, "context": 96, "kv_cache_dtype": "float32"}
_TOP = 5
_GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=_TOP)
_LENGTHS = [50, 7, 33, 18, 3, 21, 12, 9]
_TOLERANCE = 1e-4


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [[1, *torch.randint(3, 131, (length,), generator=generator).tolist()] for length in _LENGTHS]


class _Oracle:
    """transformers' log-probabilities behind a prompt and each of its generated tokens, computed at once and kept."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    def error(self, output: RequestOutput) -> float:
        worst = 0.0
        for sibling in output.outputs:
            ids = (*output.prompt_token_ids, *sibling.token_ids)
            if ids not in self._known:
                with torch.inference_mode():
                    self._known[ids] = self._model(torch.tensor([ids])).logits[0].log_softmax(-1)
            expected = self._known[ids]
            assert sibling.logprobs is not None
            for place, step in enumerate(sibling.logprobs, len(output.prompt_token_ids) - 1):
                found = torch.tensor([each.logprob for each in step.values()])
                wanted = expected[place][torch.tensor(list(step))]
                worst = max(worst, float((found - wanted).abs().max()))
        return worst


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, dict[str, float]]]:
    rows: dict[str, dict[str, float]] = {}
    yield rows
    for name, row in rows.items():
        print(f"\n{name:12}", *(f"{case} {error:.1e}" for case, error in row.items()), sep="  ", end="")


def test_every_architecture_has_a_config() -> None:
    assert set(ARCHITECTURES) <= set(CONFIGS)


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_engine_matches_transformers(name: str, tmp_path: Path, table: dict[str, dict[str, float]]) -> None:
    oracle = _Oracle(make(name, tmp_path))
    write_tokenizer(tmp_path)
    prompts, cases = _prompts(), {}
    with LLM(tmp_path, batch_tokens=256, prefix_caching=False, **_REFERENCE) as llm:
        cases["alone"] = [llm.generate([prompt], _GREEDY)[0] for prompt in prompts[:3]]
    with LLM(tmp_path, batch_tokens=17, page_size=4, **_REFERENCE) as llm:
        cases["batch of 8"] = llm.generate(prompts, _GREEDY)
        cases["prefix hit"] = llm.generate(prompts[:3], _GREEDY)
        assert all(output.num_cached_tokens > 0 for output in cases["prefix hit"])
        cases["siblings"] = llm.generate(prompts[:3], replace(_GREEDY, n=3))
        page_bytes = llm.parts.runtime.budget.page_bytes
        one = llm.parts.runtime.layout.peak_pages(96)
        states = llm.parts.runtime.layout.state_bytes * llm.parts.config.concurrency
    with LLM(tmp_path, batch_tokens=32, page_size=1, memory=one * 3 // 2 * page_bytes + states, **_REFERENCE) as llm:
        cases["preemption"] = llm.generate(prompts[:6], replace(_GREEDY, max_tokens=16))  # so long that pages run out
        assert llm.stats.num_preemptions > 0 or not page_bytes
    tokens = {number: output.outputs[0].token_ids for number, output in enumerate(cases["batch of 8"])}
    for outputs in cases.values():
        for number, output in enumerate(outputs):
            begins = [each.token_ids[: _GREEDY.max_tokens] for each in output.outputs]
            assert begins == [tokens[number]] * len(output.outputs)
    table[name] = {case: max(map(oracle.error, outputs)) for case, outputs in cases.items()}
    assert max(table[name].values()) < _TOLERANCE, table[name]
