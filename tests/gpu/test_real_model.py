"""A real model on a GPU: smollm2's greedy tokens are those of the plain torch spec, up to near-ties."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.gpu.models import greedy, worst_choice
from tokenmill import LLM

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

NEAR_TIE = 0.1  # in log-probability: bf16 activations through 30 layers against float32
PROMPTS = ["The capital of France is", "def fibonacci(n):", "Once upon a time, in a small village,"]


def test_greedy_tokens_of_smollm2(model_path: Callable[[str], Path]) -> None:
    path = model_path("smollm2")
    with LLM(path, device="cuda", context=512) as llm:
        asked = [llm.parts.tokenizer.encode(prompt) for prompt in PROMPTS]
        answers = greedy(llm, asked, 48)
        assert llm.parts.runtime.executor.name == "cuda_graph"
    with LLM(path, device="cpu", kernels="ref", executor="eager", context=512) as reference:
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer) == 48
            assert worst_choice(reference, prompt, answer) < NEAR_TIE
