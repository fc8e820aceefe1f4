"""The options of `bench serve`: one frozen record, whose fields are the flags, named as in `vllm bench serve`.

Checks values, does no work. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.bench.lora_mix import parse_mix
from tokenmill.config import option, parse_count
from tokenmill.errors import UserError, unknown_name

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "prefix_repetition", "custom", "timed_trace", "azure", "mooncake", "traffic_log")
METRICS = ("ttft", "tpot", "itl", "e2el")
PROMPT_FORMATS = ("auto", "ids", "text")


@dataclass(frozen=True, slots=True)
class ServeJob:
    backend: str = option(
        "openai", "API to call: openai (completions) or openai-chat.", metavar="NAME", aliases=("endpoint_type",)
    )
    base_url: str = option("http://127.0.0.1:8000", "Base URL of the server.", metavar="URL")
    endpoint: str = option("", "Path under the base URL. Default: the backend's.", metavar="PATH")
    model: str = option("", "Model name in the API. Default: the first in /v1/models.", metavar="NAME")
    lora_mix: str = option(
        "",
        "Adapters to ask for instead of --model, such as sql,chat (evenly), or with shares of the requests: sql=0.5.",
        metavar="NAME=SHARE,...",
        aliases=("lora_modules",),
    )
    header: tuple[str, ...] = option(
        (), "Additional HTTP header. Repeatable. The API key is read from OPENAI_API_KEY.", metavar="NAME=VALUE"
    )
    extra_body: str = option("", "JSON object merged into every request body.", metavar="JSON")
    dataset_name: str = option("random", f"Dataset: {', '.join(DATASETS)}.", metavar="NAME")
    dataset_path: str = option(
        "", "File of a custom dataset or a trace, plain or .gz, or a traffic log's folder.", metavar="FILE"
    )
    num_prompts: int = option(1000, "Number of requests to send; a trace may have fewer.", metavar="REQUESTS", low=1)
    random_input_len: int = option(
        1024, "random: prompt length.", metavar="TOKENS", aliases=("input_len",), parse=parse_count, low=1
    )
    random_output_len: int = option(
        128, "random: output length.", metavar="TOKENS", aliases=("output_len",), parse=parse_count, low=1
    )
    random_range_ratio: float = option(
        0.0, "random: lengths are uniform in length x (1 - RATIO) to length x (1 + RATIO).", metavar="RATIO", low=0
    )
    random_prefix_len: int = option(
        0,
        "random: length of a prefix shared by all prompts, in addition to the prompt length.",
        metavar="TOKENS",
        low=0,
    )
    prefix_repetition_prefix_len: int = option(
        256, "prefix_repetition: length of each shared prefix.", metavar="TOKENS", low=1
    )
    prefix_repetition_suffix_len: int = option(
        256, "prefix_repetition: length of the unique suffix.", metavar="TOKENS", low=1
    )
    prefix_repetition_num_prefixes: int = option(
        10, "prefix_repetition: number of distinct prefixes.", metavar="N", low=1
    )
    prefix_repetition_output_len: int = option(128, "prefix_repetition: output length.", metavar="TOKENS", low=1)
    custom_output_len: int = option(
        256, "custom: output length of lines that do not state one.", metavar="TOKENS", low=1
    )
    trace_speedup: float = option(
        1.0, "Traces: factor by which arrivals are accelerated; 2 halves the intervals.", metavar="FACTOR", low=0
    )
    trace_length_scale: float = option(
        1.0, "Traces: factor applied to all lengths, for models with a shorter context.", metavar="FACTOR", low=0
    )
    prompt_format: str = option(
        "auto", "Send prompts as token ids (ids) or as words (text). auto: text for chat, else ids.", metavar="FORMAT"
    )
    vocab_size: int = option(30000, "Upper bound of random token ids, exclusive.", metavar="TOKENS", low=1)
    request_rate: float = option(
        math.inf, "Requests per second; inf sends as fast as --max-concurrency allows.", metavar="RATE"
    )
    burstiness: float = option(
        1.0, "Shape of the gamma distribution of arrivals: 1 is Poisson, less is burstier.", metavar="SHAPE"
    )
    max_concurrency: int = option(0, "Maximum number of requests in flight; 0: unlimited.", metavar="REQUESTS", low=0)
    ignore_eos: bool = option(False, "Generate the full output length (an extension that not every server has).")
    temperature: float = option(0.0, "Sampling temperature.", metavar="TEMPERATURE", low=0)
    seed: int = option(0, "Seed of prompts and arrivals.", metavar="SEED")
    num_warmups: int = option(0, "Number of warm-up requests before the measurement.", metavar="REQUESTS", low=0)
    request_timeout: float = option(3600.0, "Time after which a request counts as failed.", metavar="SECONDS", low=0)
    goodput: tuple[str, ...] = option(
        (),
        "Latency limits in ms that a request must meet to count, such as ttft:500 tpot:50 (also itl, e2el).",
        metavar="METRIC:MS",
    )
    percentile_metrics: str = option(
        "ttft,tpot,itl", f"Metrics to print percentiles of: {','.join(METRICS)}.", metavar="METRICS"
    )
    metric_percentiles: str = option("99", "Percentiles to print, such as 50,90,99.", metavar="PERCENTILES")
    save_result: bool = option(False, "Write the result to a JSON file.")
    save_detailed: bool = option(False, "Include times, texts and errors of every request in the file.")
    append_result: bool = option(False, "Append to the file instead of replacing it.")
    result_dir: str = option("", "Directory of the file. Default: the current one.", metavar="DIR")
    result_filename: str = option("", "Name of the file. Default: from backend, rate, model and time.", metavar="NAME")
    label: str = option("", "Label in the result. Default: the backend.", metavar="TEXT")
    disable_tqdm: bool = option(False, "Show no progress bar.")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, low = getattr(self, spec.name), spec.metadata["low"]
            if low is not None and value < low:
                raise UserError(f"{spec.name} is {value}", f"give at least {low}")
        _choice("backend", self.backend, tuple(ENDPOINTS))
        _choice("dataset", self.dataset_name, DATASETS)
        _choice("prompt format", self.prompt_format, PROMPT_FORMATS)
        for name in ("request_rate", "burstiness", "trace_speedup", "trace_length_scale", "request_timeout"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}", "give more than 0")
        if self.dataset_name in DATASETS[2:] and not self.dataset_path:
            raise UserError(f"dataset {self.dataset_name} needs a file", "give --dataset-path")
        if self.is_chat and self.prompt_format == "ids":
            raise UserError("the chat API takes no token ids", "use --prompt-format text or --backend openai")
        self.extra(), self.limits(), self.percentiles(), self.headers(), self.shown_metrics(), parse_mix(self.lora_mix)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServeJob:
        """From flags by name; aliases are mapped and lists become tuples."""
        names = {name: spec for spec in fields(cls) for name in (spec.name, *spec.metadata["aliases"])}
        values: dict[str, Any] = {}
        for name, value in options.items():
            spec = names[name]
            if spec.name in values:
                raise UserError(f"--{name.replace('_', '-')} is given twice (it means {spec.name})", "keep one of them")
            values[spec.name] = tuple(value) if isinstance(value, list) else value
        return cls(**values)

    @property
    def is_chat(self) -> bool:
        return ENDPOINTS[self.backend] == ENDPOINTS["openai-chat"]

    @property
    def wants_text(self) -> bool:
        return self.prompt_format == "text" or (self.prompt_format == "auto" and self.is_chat)

    @property
    def replays(self) -> bool:
        """Whether requests are sent at the trace's own times."""
        return self.dataset_name in DATASETS[3:] and math.isinf(self.request_rate) and not self.max_concurrency

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    def extra(self) -> dict[str, Any]:
        try:
            value = json.loads(self.extra_body or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise UserError("--extra-body is not a JSON object", """write it like '{"top_p": 0.9}'""")
        return value

    def headers(self) -> dict[str, str]:
        pairs = [each.partition("=") for each in self.header]
        if not all(name and equals for name, equals, _ in pairs):
            raise UserError("--header must be NAME=VALUE", "write it like X-Tenant=a")
        return {name: value for name, _, value in pairs}

    def limits(self) -> dict[str, float]:
        """Goodput limits in milliseconds, by metric."""
        limit_ms: dict[str, float] = {}
        for each in " ".join(self.goodput).replace(",", " ").split():
            name, _, text = each.partition(":")
            if name not in METRICS:
                raise unknown_name("goodput metric", name, METRICS)
            try:
                limit_ms[name] = float(text)
            except ValueError:
                limit_ms[name] = math.nan
            if not limit_ms[name] > 0:
                raise UserError(f"goodput limit '{each}' is not a time", f"write {name}:500 for 500 ms")
        return limit_ms

    def percentiles(self) -> list[float]:
        try:
            values = [float(each) for each in self.metric_percentiles.split(",")]
        except ValueError:
            values = [math.nan]
        if not all(0 <= each <= 100 for each in values):
            raise UserError(f"percentiles '{self.metric_percentiles}'", "write them like 50,90,99")
        return values

    def shown_metrics(self) -> list[str]:
        names = [each for each in self.percentile_metrics.split(",") if each]
        for name in names:
            _choice("metric", name, METRICS)
        return names


def _choice(kind: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        raise unknown_name(kind, name, valid)
