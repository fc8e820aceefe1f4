"""Perplexity of a text: how well a model predicts it, by one of the protocols in windows.py.

With llama.cpp's protocol the figures can be compared with those of llama-perplexity, with `stride` and a context of
2048 with those of the papers on quantization. Called by `tokenmill eval perplexity`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.evaluate.likelihood import Progress, no_progress, window_logprobs
from tokenmill.evaluate.statistics import exponential_of_mean
from tokenmill.evaluate.windows import TextJob, read_text

WINDOWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class PerplexityReport:
    perplexity: float
    tokens: int  # scored
    stderr: float  # of the perplexity
    chunks: int
    context: int
    text_tokens: int
    protocol: str
    stride: int  # between the beginnings of windows


def measure_perplexity(
    model: str, config: EngineConfig, job: TextJob, on_progress: Progress = no_progress
) -> PerplexityReport:
    """`on_progress` is told how many windows of how many are done."""
    text = read_text(job.text, job.limit_bytes)
    with LLM(model, scoring_config(config, job.context)) as llm:
        llm.use_only_lora()
        tokens = llm.parts.tokenizer.encode(text)
        windows = job.windows(tokens, llm.parts.tokenizer)
        logprobs = window_logprobs(llm.parts, windows, on_progress)
    losses = -np.concatenate(logprobs)
    perplexity = exponential_of_mean(losses)
    return PerplexityReport(
        perplexity.value,
        len(losses),
        perplexity.stderr,
        len(windows),
        job.context,
        len(tokens),
        job.protocol,
        job.stride or job.context,
    )


def scoring_config(config: EngineConfig, context: int) -> EngineConfig:
    """An engine for windows of this size: few at a time keep its memory small and the cores as busy."""
    return replace(config, context=context).fill("windows scored at a time", concurrency=WINDOWS_AT_ONCE)
