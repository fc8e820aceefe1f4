"""Latency of one batch: how fast prompts are read and how fast tokens follow, as medians over repeats.

Drives the engine core step by step, so that the moment at which every sequence has its first token is exact: what comes
before is prefill, what comes after is decoding. Called by `tokenmill bench latency`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from tokenmill.bench.context import benchmark_context
from tokenmill.bench.lora_mix import assign, parse_mix
from tokenmill.bench.prompts import longest_request, random_requests
from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.resolution import reserve_concurrency
from tokenmill.runtime.report import kernel_names, num_threads
from tokenmill.types import SamplingParams


@dataclass(frozen=True, slots=True)
class LatencyJob:
    input_len: int = 512
    output_len: int = 128
    batch_size: int = 1
    repeat: int = 3
    warmup: int = 1
    lora_mix: str = ""  # shares of the adapters; empty: equal ones

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("repeat", 1), ("warmup", 0)):
            if getattr(self, name) < low:
                raise UserError(f"--{name.replace('_', '-')} is {getattr(self, name)}", f"give at least {low}")


@dataclass(frozen=True, slots=True)
class LatencyReport:
    prefill_tok_s: float
    decode_tok_s: float | None  # None: one token each, nothing was decoded
    ttft_ms: float  # until every sequence of the batch has its first token
    tpot_ms: float | None
    threads: int
    kernels: dict[str, str]
    executor: str
    input_len: int
    output_len: int
    batch_size: int
    repeat: int
    load_s: float


@dataclass(frozen=True, slots=True)
class _Timing:
    prefill: float  # seconds
    decode: float
    decoded: int  # tokens that came after the prefill


def measure_latency(
    model: str, config: EngineConfig, job: LatencyJob, on_repeat: Callable[[int], None] = lambda _done: None
) -> LatencyReport:
    """`on_repeat` is told how many runs, warm-ups included, are done."""
    context = benchmark_context(model, config, longest_request(job.input_len, job.output_len))
    config = reserve_concurrency(config.fill("the longest request", context=context), job.batch_size, "--batch-size")
    with LLM(model, config) as llm:
        timings = []
        for number in range(job.warmup + job.repeat):
            timing = _run_once(llm, job, config.seed + number)
            if number >= job.warmup:
                timings.append(timing)
            on_repeat(number + 1)
        parts = llm.parts
        prefill = median(timing.prefill for timing in timings)
        step = median(timing.decode / timing.decoded for timing in timings) if timings[0].decoded else None
        return LatencyReport(
            prefill_tok_s=job.batch_size * job.input_len / prefill,
            decode_tok_s=None if step is None else 1 / step,
            ttft_ms=prefill * 1000,
            tpot_ms=None if step is None else step * job.batch_size * 1000,
            threads=num_threads(parts.config),
            kernels=kernel_names(parts.runtime.model, parts.runtime.executor.name),
            executor=parts.runtime.executor.name,
            input_len=job.input_len,
            output_len=job.output_len,
            batch_size=job.batch_size,
            repeat=job.repeat,
            load_s=parts.load_seconds,
        )


def _run_once(llm: LLM, job: LatencyJob, seed: int) -> _Timing:
    core, intake = llm.parts.core, llm.parts.intake
    params = SamplingParams(max_tokens=job.output_len, temperature=0.0, ignore_eos=True)
    synthetic = random_requests(
        llm.parts.description.vocab_size, job.batch_size, job.input_len, job.output_len, seed=seed
    )
    requests = [intake.request(each.prompt_ids, params) for each in synthetic]
    for request, lora in zip(requests, assign(parse_mix(job.lora_mix, llm.loras), len(requests)), strict=True):
        request.adapter = llm.parts.adapters.find(lora) if lora else None
    started = time.perf_counter()
    for request in requests:
        core.add(request)
    without_token = {request.request_id for request in requests}
    decoded = 0
    first = started
    while core.has_work:
        decoding = not without_token
        for event in core.step():
            without_token.discard(event.request_id)
            decoded += len(event.token_ids) if decoding else 0
        if not decoding:
            first = time.perf_counter()
    return _Timing(first - started, time.perf_counter() - first, decoded)
