"""A real model on a GPU: smollm2's tokens and log-probabilities are those of the plain torch spec, up to the noise of
16-bit activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.models import greedy, scores
from tokenmill import LLM, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

# How far bf16 activations take this model from float32, in plain torch with every op rounded to bf16 and sums kept in
# float32, the weights as bf16 or in groups as on the GPU (13 prompts of this kind, 48 tokens each): the log-probability
# of a token is off by 0.013 to 0.036 (root mean square over an answer; activations alone 0.017 to 0.031, weights alone
# 0.006 to 0.013, the bf16 cache less), the distance of the two best tokens by up to 0.33, and at most two tokens of an
# answer are not float32's best. The worst of those, 0.21 below it, is in the answer to the second prompt.
TYPICAL_ERROR = 0.05
WORST_CHOICE = 0.4
OTHER_CHOICES = 4  # of 48
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_greedy_tokens_of_smollm2(model_path: Callable[[str], Path], dtype: str) -> None:
    path = model_path("smollm2")
    closer = 1 if dtype == "bfloat16" else 2  # float16 has three bits more; its weights in groups err as much
    with LLM(path, device="cuda", context=512, dtype=dtype) as llm:
        asked = [llm.parts.tokenizer.encode(prompt) for prompt in PROMPTS]
        answers = greedy(llm, asked, 48)
        assert llm.parts.runtime.executor.name == "cuda_graph"
        assert (llm.parts.runtime.model.dtype, llm.parts.config.kv_cache_dtype) == (dtype, dtype)
        reported = _with_logprobs(llm, asked, 48)
    with LLM(path, device="cpu", kernels="ref", executor="eager", context=512) as reference:
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer) == 48
            shortfalls = [best - own for own, best in scores(reference, prompt, answer)]
            assert max(shortfalls) < WORST_CHOICE / closer, shortfalls
            assert sum(each > 0 for each in shortfalls) <= OTHER_CHOICES, shortfalls
        for prompt, (answer, logprobs) in zip(asked, reported, strict=True):
            wanted = [own for own, _ in scores(reference, prompt, answer)]
            squares = [(got - own) ** 2 for got, own in zip(logprobs, wanted, strict=True)]
            assert math.sqrt(sum(squares) / len(squares)) < TYPICAL_ERROR / closer, squares


def _with_logprobs(llm: LLM, prompts: list[list[int]], length: int) -> list[tuple[list[int], list[float]]]:
    """Greedy answers and the log-probability of each of their tokens, as decode steps report it."""
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logprobs=0)
    answers = []
    for output in llm.generate(prompts, params):
        tokens, entries = output.outputs[0].token_ids, output.outputs[0].logprobs
        assert entries is not None
        answers.append((tokens, [entry[token].logprob for token, entry in zip(tokens, entries, strict=True)]))
    return answers
