"""What `bench serve` is asked to do: one frozen record, whose fields are the flags, named as in `vllm bench serve`.

Checks values, does no work. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from tokenmill.config import option, parse_count
from tokenmill.errors import UserError, unknown_name

ENDPOINTS = {"openai": "/v1/completions", "vllm": "/v1/completions", "openai-chat": "/v1/chat/completions"}
DATASETS = ("random", "prefix_repetition", "custom", "timed_trace", "azure", "mooncake")
METRICS = ("ttft", "tpot", "itl", "e2el")
PROMPT_FORMATS = ("auto", "ids", "text")


@dataclass(frozen=True, slots=True)
class ServeJob:
    backend: str = option("openai", "openai (completions) or openai-chat.", aliases=("endpoint_type",))
    base_url: str = option("http://127.0.0.1:8000", "The server; https works too.")
    endpoint: str = option("", "Path under the base URL. Empty: the backend's usual one.")
    model: str = option("", "Model name in the API. Empty: the first that /v1/models lists.")
    header: tuple[str, ...] = option((), "An extra header, as NAME=VALUE. Repeatable. OPENAI_API_KEY is the key.")
    extra_body: str = option("", "JSON object merged into each request.")
    dataset_name: str = option("random", f"One of {', '.join(DATASETS)}.")
    dataset_path: str = option("", "File of a custom dataset or a trace; .gz is read as it is.")
    num_prompts: int = option(1000, "Requests to send; a trace may have fewer.", low=1)
    random_input_len: int = option(1024, "random: prompt tokens.", aliases=("input_len",), parse=parse_count, low=1)
    random_output_len: int = option(128, "random: output tokens.", aliases=("output_len",), parse=parse_count, low=1)
    random_range_ratio: float = option(0.0, "random: lengths vary uniformly by this share, up and down.", low=0)
    random_prefix_len: int = option(0, "random: tokens that all prompts begin with, on top.", low=0)
    prefix_repetition_prefix_len: int = option(256, "prefix_repetition: tokens of a shared prefix.", low=1)
    prefix_repetition_suffix_len: int = option(256, "prefix_repetition: tokens after it, never shared.", low=1)
    prefix_repetition_num_prefixes: int = option(10, "prefix_repetition: how many prefixes.", low=1)
    prefix_repetition_output_len: int = option(128, "prefix_repetition: output tokens.", low=1)
    custom_output_len: int = option(256, "custom: output tokens of lines that do not say.", low=1)
    trace_speedup: float = option(1.0, "Traces: replay this many times as fast.", low=0)
    trace_length_scale: float = option(1.0, "Traces: multiply all lengths, for models of shorter context.", low=0)
    prompt_format: str = option("auto", "ids: prompts as token ids; text: words. auto: ids, or text for a chat.")
    vocab_size: int = option(30000, "Token ids are drawn below this.", low=1)
    request_rate: float = option(math.inf, "Requests per second; inf sends all at once, or as slots become free.")
    burstiness: float = option(1.0, "Shape of the gamma intervals: 1 is Poisson, less is burstier.")
    max_concurrency: int = option(0, "Most requests in flight; 0: no limit.", low=0)
    ignore_eos: bool = option(False, "Generate to the full length. An extension that not all servers have.")
    temperature: float = option(0.0, "Sampling temperature sent.", low=0)
    seed: int = option(0, "Same seed, same prompts and arrivals.")
    num_warmups: int = option(0, "Requests sent before the clock starts.", low=0)
    request_timeout: float = option(3600.0, "Seconds after which a request counts as failed.", low=0)
    goodput: tuple[str, ...] = option((), "Limit in ms, as ttft:500 tpot:50 itl:80 e2el:9000 (one flag, many values).")
    percentile_metrics: str = option("ttft,tpot,itl", f"Which of {','.join(METRICS)} to print.")
    metric_percentiles: str = option("99", "Percentiles, such as 50,90,99.")
    save_result: bool = option(False, "Write the result to a JSON file.")
    save_detailed: bool = option(False, "With times, texts and errors of each request in the file.")
    append_result: bool = option(False, "Append to the file instead.")
    result_dir: str = option("", "Folder of the file; the current one if empty.")
    result_filename: str = option("", "Its name; empty: from backend, rate, model and time.")
    label: str = option("", "Name in the result; the backend if empty.")
    disable_tqdm: bool = option(False, "No progress bar.")

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
            raise UserError("a chat takes no token ids", "use --prompt-format text or --backend openai")
        self.extra(), self.limits(), self.percentiles(), self.headers(), self.shown_metrics()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> ServeJob:
        """From flags by name; an alias counts as the flag it means, and lists become tuples."""
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
            raise UserError("a --header is not NAME=VALUE", "correct it")
        return {name: value for name, _, value in pairs}

    def limits(self) -> dict[str, float]:
        """Goodput limits in milliseconds, by metric."""
        found: dict[str, float] = {}
        for each in " ".join(self.goodput).replace(",", " ").split():
            name, _, text = each.partition(":")
            if name not in METRICS:
                raise unknown_name("goodput metric", name, METRICS)
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = math.nan
            if not found[name] > 0:
                raise UserError(f"goodput limit '{each}' is not a time", f"write {name}:500 for 500 ms")
        return found

    def percentiles(self) -> list[float]:
        try:
            found = [float(each) for each in self.metric_percentiles.split(",")]
        except ValueError:
            found = [math.nan]
        if not all(0 <= each <= 100 for each in found):
            raise UserError(f"percentiles '{self.metric_percentiles}'", "write them like 50,90,99")
        return found

    def shown_metrics(self) -> list[str]:
        names = [each for each in self.percentile_metrics.split(",") if each]
        for name in names:
            _choice("metric", name, METRICS)
        return names


def _choice(kind: str, name: str, valid: tuple[str, ...]) -> None:
    if name not in valid:
        raise unknown_name(kind, name, valid)
