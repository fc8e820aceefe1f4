"""Throughput of many requests sent at once: tokens per second, and how well the KV memory was used.

Waste is the share of token slots in held pages that hold no token, averaged over steps. Called by `tokenmill bench
throughput`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.bench.context import benchmark_context
from tokenmill.bench.lora_mix import assign, parse_mix
from tokenmill.bench.prompts import SyntheticRequest, longest_request, random_requests
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.outputs import RequestOutput
from tokenmill.types import SamplingParams


@dataclass(frozen=True, slots=True)
class ThroughputJob:
    num_prompts: int = 16
    input_len: int = 256
    output_len: int = 128
    range_ratio: float = 0.0
    shared_prefix: int = 0
    lora_mix: str = ""  # shares of the adapters; empty: equal ones


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    output_tok_s: float
    total_tok_s: float  # prompt tokens included, also those from the prefix cache
    requests_s: float
    elapsed_s: float
    num_prompts: int
    input_tokens: int
    output_tokens: int
    kv_waste: float
    kv_use: float
    peak_running: int  # sequences at once
    peak_tokens: int  # in their contexts together
    prefix_hit_rate: float
    preemptions: int
    draft_acceptance: float | None  # of drafted tokens; None: none were drafted
    draft_length: float | None  # tokens drafted at a time, mean
    draft_gain: float  # time without drafts over time with, by the engine's own measurements


def measure_throughput(
    model: str, config: EngineConfig, job: ThroughputJob, progress: bool = False
) -> ThroughputReport:
    needed = longest_request(job.input_len, job.output_len, job.range_ratio, job.shared_prefix)
    _requests(2, job, config.seed)  # refuse a bad job before the model is loaded
    config = config.fill("the longest request", context=benchmark_context(model, config, needed))
    with LLM(model, config) as llm:
        requests = _requests(llm.parts.description.vocab_size, job, config.seed)
        warm_up(llm, requests[0])
        loras = assign(parse_mix(job.lora_mix, llm.loras), len(requests))
        return run_requests(llm, requests, progress, loras)[0]


def run_requests(
    llm: LLM, requests: list[SyntheticRequest], progress: bool = False, loras: Sequence[str | None] | None = None
) -> tuple[ThroughputReport, list[RequestOutput]]:
    """One timed pass over requests that are all there at once, by an engine that is already warm."""
    stats = llm.stats
    stats.reset()
    started = time.perf_counter()
    prompts = [each.prompt_ids for each in requests]
    outputs = llm.generate(prompts, _params(requests), lora=loras, progress=progress)
    elapsed = time.perf_counter() - started
    input_tokens = sum(len(each.prompt_ids) for each in requests)
    output_tokens = sum(len(each.outputs[0].token_ids) for each in outputs)
    report = ThroughputReport(
        output_tok_s=output_tokens / elapsed,
        total_tok_s=(input_tokens + output_tokens) / elapsed,
        requests_s=len(requests) / elapsed,
        elapsed_s=elapsed,
        num_prompts=len(requests),
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        kv_waste=stats.mean_kv_waste,
        kv_use=stats.mean_kv_usage,
        peak_running=stats.peak_running,
        peak_tokens=stats.peak_tokens,
        prefix_hit_rate=stats.prefix_hit_rate,
        preemptions=stats.num_preemptions,
        draft_acceptance=stats.num_accepted / stats.num_drafted if stats.num_drafted else None,
        draft_length=stats.num_drafted / stats.num_drafts if stats.num_drafted else None,
        draft_gain=1.0 + stats.saved_seconds / elapsed,
    )
    return report, outputs


def _requests(vocab_size: int, job: ThroughputJob, seed: int) -> list[SyntheticRequest]:
    return random_requests(
        vocab_size, job.num_prompts, job.input_len, job.output_len, job.range_ratio, job.shared_prefix, seed
    )


def _params(requests: list[SyntheticRequest]) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=each.output_len, temperature=0.0, ignore_eos=True) for each in requests]


def warm_up(llm: LLM, request: SyntheticRequest) -> None:
    """Two steps on a few tokens that no prompt begins with: starts threads and touches memory before the clock."""
    prompt = [(token_id + 1) % llm.parts.description.vocab_size for token_id in request.prompt_ids[:8]]
    llm.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
