"""On a CPU a token has the same bits however its prompt was computed: whole, in chunks, beside others, behind a cached
prefix, among drafts. Longer prompts than attention sums up in one go (csrc/cpu/attention.h)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity import tiny_models
from tests.parity.tiny_models import make
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.engine.outputs import RequestOutput
from tokenmill.quantize.ggml.export import quantize_gguf

pytestmark = pytest.mark.usefixtures("same_bits")
_PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=2, ignore_eos=True)
_COMMON, _LENGTHS = 300, (420, 331, 390, 302)  # tokens of all prompts, and of each


@pytest.fixture(scope="module", params=["llama", "gemma3"])  # the second has windows
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        config = tiny_models.CONFIGS[request.param]()
        config.max_position_embeddings = 512
        config.sliding_window, config.query_pre_attn_scalar = 200, 32  # what a GGUF can say
        patch.setitem(tiny_models.CONFIGS, request.param, lambda: config)
        make(request.param, folder)
    save_tokenizer(folder, "llama-bpe")
    quantize_gguf(open_checkpoint(folder), folder / "model.gguf", "Q4_1")
    return folder / "model.gguf"


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(3, 131, (_COMMON,), generator=generator).tolist()
    return [common + torch.randint(3, 131, (length - _COMMON,), generator=generator).tolist() for length in _LENGTHS]


def _bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[float]]]:
    found = [output.outputs[0] for output in outputs]
    return [
        (
            each.token_ids,
            [record[token].logprob for token, record in zip(each.token_ids, each.logprobs or (), strict=True)],
        )
        for each in found
    ]


def test_however_a_prompt_is_computed(model: Path) -> None:
    options = {"context": 512, "device": "cpu", "kv_cache_dtype": "float32"}
    with LLM(model, prefix_caching=False, batch_tokens=512, **options) as llm:
        assert llm.parts.runtime.executor.name == "recorded"
        alone = [_bits(llm.generate([prompt], _PARAMS))[0] for prompt in _prompts()]
        assert all(len(logprobs) == 6 for _, logprobs in alone)
    for batch_tokens in (32, 100, 2048):
        with LLM(model, prefix_caching=False, batch_tokens=batch_tokens, **options) as llm:
            assert _bits(llm.generate(_prompts(), _PARAMS)) == alone
    for batch_tokens in (100, 512):
        with LLM(model, batch_tokens=batch_tokens, **options) as llm:
            for prompt, expected in zip(_prompts(), alone, strict=True):  # behind the first one's prefix
                assert _bits(llm.generate([prompt], _PARAMS)) == [expected]
            outputs = llm.generate(_prompts(), _PARAMS)
            assert all(output.num_cached_tokens >= _COMMON - 32 for output in outputs)
            assert _bits(outputs) == alone
