"""A quantized model gives the same greedy tokens with one, two and more threads: prompts, batches and single rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from tokenmill import LLM, SamplingParams

_GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def _tokens(model: Path, threads: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(100, 20000, (length,), generator=generator).tolist() for length in (40, 3, 17, 25)]
    with LLM(model, context=128, threads=threads) as llm:
        alone = llm.generate(prompts[:1], _GREEDY)
        together = llm.generate(prompts[1:], _GREEDY)
    return [output.outputs[0].token_ids for output in (*alone, *together)]


def test_same_tokens_whatever_the_threads(model_path: Callable[[str], Path]) -> None:
    model = model_path("smollm2")
    expected = _tokens(model, 1)
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
    for threads in (2, 3):
        assert _tokens(model, threads) == expected
