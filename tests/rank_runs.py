"""Runs of tiny models on ranks and in one process, to be compared: for tests/conformance/test_ranks*.py."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.parity.tiny_models import make, write_tokenizer
from tests.quantized_files import save_quantized
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.engine.llm import LLM
from tokenmill.model.formats.quantized import Scheme
from tokenmill.quantize.ggml.export import quantize_gguf
from tokenmill.types import SamplingParams

Answer = list[tuple[list[int], list[float]]]  # of each sequence: tokens and their log-probabilities
CONTEXT = 96
_KEPT = TemporaryDirectory()  # removed at the end
FOLDER = Path(_KEPT.name)
FILES = {
    "gptq": ("gptq", Scheme("int", 4, 32)),
    "awq": ("awq", Scheme("int", 4, 32, symmetric=False)),
    "fp8": ("fp8", Scheme("e4m3", 8, 0, 0, activations="fp8_token")),
    "fp8 blocks": ("fp8", Scheme("e4m3", 8, 128, 128, activations="fp8_group128")),
    "w8a8": ("compressed-tensors", Scheme("int", 8, activations="int8_token")),
}


@cache
def model(name: str) -> Path:
    folder = FOLDER / name.replace(" ", "-")
    folder.mkdir()
    if name in FILES:
        file_format, scheme = FILES[name]
        save_quantized(folder, file_format, scheme, "llama")
    elif name == "gguf":
        source = folder / "source"
        make("llama", source)
        save_tokenizer(source, "qwen2")
        quantize_gguf(open_checkpoint(source), folder / "model.gguf", "q8_0")
        return folder / "model.gguf"
    else:
        make(name, folder)
    write_tokenizer(folder)
    return folder


def prompts() -> list[list[int]]:
    """The last two repeat the beginning of another: prefix hits."""
    numbers = random.Random(5)
    made = [[numbers.randrange(3, 131) for _ in range(length)] for length in (5, 19, 44)]
    return [*made, made[2][:32] + made[0], made[2]]


def default_params(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=6, temperature=0.7 * (n % 2), seed=n, logprobs=0, ignore_eos=True)
        for n in range(count)
    ]


def generate(llm: LLM, params: list[SamplingParams] | None = None, lora: list[str | None] | None = None) -> Answer:
    """Two batches: the second one's prompt is cached by then."""
    texts = prompts()
    params, names = params or default_params(len(texts)), lora or [None] * len(texts)
    outputs = llm.generate(texts[:-1], params[:-1], lora=names[:-1]) + llm.generate(
        texts[-1:], params[-1:], lora=names[-1:]
    )
    llm.parts.core.check()
    answers: Answer = []
    for output in outputs:
        for completion in output.outputs:
            ids = list(completion.token_ids)
            records = completion.logprobs or []
            answers.append((ids, [record[token].logprob for record, token in zip(records, ids, strict=True)]))
    return answers


def make_llm(name: str, **options: Any) -> LLM:
    return LLM(
        model(name),
        **{
            "context": CONTEXT,
            "concurrency": 3,
            "batch_tokens": 24,
            "page_size": 8,
            "threads": 1,
            "device": "cpu",
            **options,
        },
    )


def run(name: str, params: list[SamplingParams] | None = None, **options: Any) -> Answer:
    with make_llm(name, **options) as llm:
        return generate(llm, params)


@cache
def alone(name: str, kernels: str | None = None) -> Answer:
    return run(name, executor="eager", kernels=kernels)


def threads(name: str, tp: int = 1, pp: int = 1, **options: Any) -> Answer:
    return run(name, **grid(tp, pp), **options)


def grid(tp: int = 1, pp: int = 1) -> dict[str, Any]:
    """Ranks as threads that take turns: the messages and the code of processes."""
    return {"rank_backend": "threads", "tensor_parallel_size": tp, "pipeline_parallel_size": pp}


def assert_near(found: Answer, wanted: Answer) -> None:
    for (ids, values), (wanted_ids, wanted_values) in zip(found, wanted, strict=True):
        assert ids == wanted_ids
        assert values == pytest.approx(wanted_values, abs=1e-5)
