"""The engine's configuration: one frozen record. CLI flags, Python keywords and config files are all made from it.

Users state intent (`context`, `concurrency`, `memory`), never only a fraction. Names that vLLM users type are
accepted as aliases. Unknown keys are refused with the nearest valid one. Automatic values (0 or "auto") are resolved
once, when the engine is built, and the resolved record is what gets printed and saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tokenmill.errors import UserError, unknown_name

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

_CHOICES = {"device": ("auto", "cpu", "cuda"), "load_format": ("auto", "dummy"), "quantization": ("", "fp8", "int4")}
_GPU_DEFAULTS = {"page_size": 16, "batch_tokens": 8192, "concurrency": 256}


def parse_size(text: str | int) -> int:
    """Bytes: "6GiB", "500MB", "2g", or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if not match or match[2] not in _UNITS:
        raise UserError(f"'{text}' is not a size", "write it like 6GiB, 500MB or 1000000")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_count(text: str | int) -> int:
    """A number of tokens: "8k" means 8192, "32000" means itself."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(k?)\s*", str(text).lower())
    if not match:
        raise UserError(f"'{text}' is not a token count", "write it like 4096 or 8k")
    return int(float(match[1]) * (1024 if match[2] else 1))


def option(default: Any, help: str, *, aliases: tuple[str, ...] = (), parse: Any = None, low: int | None = None) -> Any:
    return field(default=default, metadata={"help": help, "aliases": aliases, "parse": parse, "low": low})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    context: int = option(
        0,
        "Longest prompt + output of a request, such as 4096 or 8k. 0: what the model was trained for, at most 8192.",
        aliases=("max_model_len",),
        parse=parse_count,
        low=0,
    )
    concurrency: int = option(
        64, "Most requests computed at the same time.", aliases=("max_num_seqs", "max_running"), low=1
    )
    memory: int = option(
        0,
        "Memory for the KV cache, such as 2GiB. 0: what context x concurrency needs, at most a quarter of free memory.",
        aliases=("kv_cache_memory_bytes",),
        parse=parse_size,
        low=0,
    )
    batch_tokens: int = option(
        512,
        "Most tokens computed in one step; longer prompts are computed in chunks beside running requests.",
        aliases=("max_num_batched_tokens", "chunk_size"),
        parse=parse_count,
        low=1,
    )
    page_size: int = option(8, "Tokens per KV page.", aliases=("block_size",), low=1)
    kv_cache_dtype: str = option(
        "auto",
        "How KV pages are held: auto (float32, on a GPU bfloat16), float32, float16, bfloat16, fp8, int8, int4, "
        "turboquant4, kivi2, ... (docs/kv_cache.md lists all).",
    )
    kv_native_layers: int = option(
        -1,
        "Layers at either end whose KV stays in 16-bit floats where the others are quantized. -1: as the dtype says.",
        low=-1,
    )
    prefix_caching: bool = option(
        True, "Reuse the KV pages of a prompt's beginning across requests.", aliases=("enable_prefix_caching",)
    )
    scheduling: str = option(
        "fcfs", "Who runs first: fcfs, priority or fair (between API keys).", aliases=("scheduling_policy",)
    )
    kv_policy: str = option(
        "lru", "Which cached prefix pages go first when memory is short: lru or lfu.", aliases=("eviction",)
    )
    kv_host_memory: int = option(
        0, "Host memory for prefix pages that the KV cache evicts, such as 8GiB. For GPUs.", parse=parse_size, low=0
    )
    kv_disk: str = option("", "Directory that keeps prefix pages across restarts. Empty: none.")
    kv_disk_size: int = option(10 << 30, "Most bytes that --kv-disk may take, such as 10GiB.", parse=parse_size, low=1)
    kv_redis: str = option("", "Redis that servers share prefix pages through, such as redis://host:6379/0.")
    kv_budget_policy: str = option(
        "", "What requests drop beyond --kv-budget, at a loss, by default: streaming_llm, paged_eviction or h2o."
    )
    kv_budget: int = option(0, "Tokens that a request holds once its prompt is computed.", parse=parse_count, low=0)
    device: str = option("auto", "Where the model runs: auto (a GPU if there is one), cpu or cuda.")
    load_format: str = option(
        "auto", "Where weights come from: auto (the checkpoint) or dummy (random ones of the shape in config.json)."
    )
    quantization: str = option(
        "", "On a GPU: round the weights to nearest while loading, fp8 (per channel) or int4 (groups of 128)."
    )
    speculate: str = option(
        "off",
        "Guess tokens and check several at once: off, ngram, suffix, draft:MODEL, self:layers=N, self:TYPE (the same "
        "weights as q2_k, ...) or head:DIR (made by train-draft). The output stays what it is without.",
    )
    draft_tokens: int = option(
        8,
        "Most tokens guessed at a time for a request; how many, down to none, is decided by what they gain.",
        aliases=("num_speculative_tokens",),
        low=1,
    )
    executor: str = option("auto", "How a step runs: auto, recorded, eager, cuda_graph or cuda_eager.")
    kernels: str = option("", "Force a kernel backend (cpu, triton, ref). Empty: the fastest that accepts each op.")
    threads: int = option(0, "CPU threads. 0: one per physical core.", low=0)
    seed: int = option(0, "Base of the seeds given to requests that bring none.", low=0)

    def __post_init__(self) -> None:
        for spec in fields(self):
            value, low = getattr(self, spec.name), spec.metadata["low"]
            if isinstance(spec.default, bool):
                valid = isinstance(value, bool)
            else:
                valid = isinstance(value, type(spec.default)) and not isinstance(value, bool)
            if not valid:
                raise UserError(f"{spec.name} must be a {type(spec.default).__name__}, got {value!r}", "correct it")
            if low is not None and value < low:
                raise UserError(f"{spec.name} is {value}", f"give at least {low}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise unknown_name(name, getattr(self, name), [each for each in allowed if each])

    @classmethod
    def default(cls, name: str) -> Any:
        """What a field is where nobody said otherwise."""
        return next(spec.default for spec in fields(cls) if spec.name == name)

    def on_gpu(self) -> EngineConfig:
        """The record for a GPU: values that are the CPU's defaults become the GPU's."""
        default = {spec.name: spec.default for spec in fields(self)}
        changes: dict[str, Any] = {k: v for k, v in _GPU_DEFAULTS.items() if getattr(self, k) == default[k]}
        return replace(self, **changes)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from loose options: aliases are mapped, sizes parsed, unknown names refused with the nearest one."""
        by_name = {name: spec for spec in fields(cls) for name in (spec.name, *spec.metadata["aliases"])}
        values: dict[str, Any] = {}
        for key, value in options.items():
            name = key.replace("-", "_")
            if name not in by_name:
                raise unknown_name("option", key, by_name)
            spec = by_name[name]
            if spec.name in values:
                raise UserError(f"option '{key}' is given twice (it means {spec.name})", "keep one of them")
            parse = spec.metadata["parse"]
            values[spec.name] = parse(value) if parse and isinstance(value, str) else value
        return cls(**values)
