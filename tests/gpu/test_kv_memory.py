"""Pages that leave the device and come back, and budgets, with the GPU executors: on a GPU if there is one, else under
Triton's interpreter (test_interpreted.py runs this file so)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_executors import COMMON, ON_GPU, config, engine, same_weights  # noqa: F401 (skips without either)
from tokenmill import LLM, SamplingParams
from tokenmill.engine.kv.tier.costs import LoadCosts
from tokenmill.types import CacheControl

_PAGE = 4
_PROMPT = [(7 * place) % 131 for place in range(41 if ON_GPU else 17)]
_LENGTH = 24 if ON_GPU else 3


@pytest.mark.parametrize("executor", ["cuda_eager", "cuda_graph"] if ON_GPU else ["cuda_graph"])
def test_pages_that_left_the_device_come_back(tmp_path: Path, executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadCosts, "record_step", lambda *_: None)  # a busy machine may find computing faster
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with engine(config(tmp_path), executor, page_size=_PAGE, kv_host_memory=16 << 20) as llm:
        kv = llm.parts.core.scheduler.kv
        first = llm.generate(_PROMPT, params)[0]
        assert not kv.save(wait=30.0)
        kv.clear()
        llm.generate([[5] * len(_PROMPT)], params)  # other content in the pages that are free now
        again = llm.generate(_PROMPT, params)[0]
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.cache is not None
        assert again.cache.num_loaded_tokens == (len(_PROMPT) - 1) // _PAGE * _PAGE
        kv.check()


@pytest.mark.usefixtures("same_weights")
@pytest.mark.parametrize("policy", ["streaming_llm", "paged_eviction", "h2o"] if ON_GPU else ["paged_eviction"])
def test_a_budget_is_the_same_mask_as_on_the_cpu(tmp_path: Path, policy: str) -> None:
    folder = config(tmp_path)
    cache = CacheControl(policy=policy, budget=4 * _PAGE)
    params = SamplingParams(temperature=0.0, max_tokens=_LENGTH, ignore_eos=True, logprobs=0, cache=cache)
    with engine(folder, "cuda_graph", page_size=_PAGE) as llm:
        found = llm.generate(_PROMPT, params)[0].outputs[0]
    options = COMMON | {"page_size": _PAGE}
    with LLM(folder, device="cpu", kernels="ref", executor="eager", kv_cache_dtype="float32", **options) as spec:
        expected = spec.generate(_PROMPT, params)[0].outputs[0]
    assert found.num_dropped_tokens == expected.num_dropped_tokens > 0
    assert found.logprobs is not None
    assert expected.logprobs is not None
    shared = 0
    for token, same, mine, theirs in zip(
        found.token_ids, expected.token_ids, found.logprobs, expected.logprobs, strict=True
    ):
        if token != same:
            break  # a near tie; from here on they say different things
        assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=0.1)
        shared += 1
    assert shared > 1
