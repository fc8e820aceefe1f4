"""The engine's options: one frozen record. CLI flags, Python keywords, config files and environment variables fill it.

`EngineConfig` is what was asked for: an option that hardware or the model decides is None, "automatic", until it is
set, and each value remembers who set it. `ResolvedConfig` is what the engine runs with; resolution.py makes one from
the other. Unknown names are refused with the nearest valid one; peer_options.py has those of other engines.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, Self

from tokenmill.errors import UserError
from tokenmill.options import automatic as automatic
from tokenmill.options import by_option_name as by_option_name
from tokenmill.options import check as check
from tokenmill.options import from_environment as from_environment
from tokenmill.options import is_automatic
from tokenmill.options import option as option
from tokenmill.options import option_fields as option_fields
from tokenmill.options import parse_count as parse_count
from tokenmill.options import parse_milliseconds as parse_milliseconds
from tokenmill.options import parse_size as parse_size
from tokenmill.options import size_option as size_option

# Where adapters are kept; and all their options, for verbs that have no use for some.
ADAPTER_MEMORY = ("enable_lora", "max_loras", "max_lora_rank", "lora_memory", "lora_host_memory", "max_cpu_loras")
ADAPTER_OPTIONS = ("lora", *ADAPTER_MEMORY)
# Of engines that send pages to each other: of use in servers only
TRANSFER_OPTIONS = ("kv_listen", "kv_staging", "kv_peer", "kv_source_timeout")
BY_USER = "set by you"
BY_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Setting:
    """One option, for people: its value and who set it."""

    name: str
    value: Any
    source: str  # "set by you" | "from file X" | "from environment variable X" | "automatic: REASON" | "default"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    context: int | None = automatic(
        int,
        "Maximum length of a request in tokens, prompt and output together, such as 4096 or 8k. "
        "Automatic: the model's trained length, at most 8192.",
        metavar="TOKENS",
        parse=parse_count,
        low=1,
    )
    concurrency: int | None = automatic(
        int,
        "Maximum number of requests computed at the same time. Automatic: 64, on a GPU 256.",
        metavar="REQUESTS",
        low=1,
    )
    memory: int | None = automatic(
        int,
        "Maximum size of the KV cache, such as 2GiB. Automatic: what context x concurrency needs, at most a quarter of "
        "the free memory, on a GPU 95 % of what weights and activations leave free.",
        metavar="SIZE",
        parse=parse_size,
        low=1,
    )
    gpu_memory_utilization: float | None = automatic(
        float,
        "Share of the GPU's total memory that weights, KV cache and activations may take together, such as 0.9. "
        "Automatic: no such limit, see --memory.",
        metavar="SHARE",
        low=0.01,
        high=1.0,
    )
    batch_tokens: int | None = automatic(
        int,
        "Maximum number of tokens computed in one step; longer prompts are computed in chunks, together with running "
        "requests. Automatic: 512, on a GPU 8192.",
        metavar="TOKENS",
        parse=parse_count,
        low=1,
    )
    page_size: int | None = automatic(
        int,
        "Tokens per KV page. Automatic: 8, on a GPU 16, or what the KV dtype requires.",
        metavar="TOKENS",
        low=1,
    )
    kv_cache_dtype: str | None = automatic(
        str,
        "Data type of the KV cache: float32, float16, bfloat16, fp8, int8, int4, turboquant4, kivi2, ... "
        "(docs/kv_cache.md lists all). Automatic: on a GPU the type of --dtype, on a CPU float32, or float16 where it "
        "multiplies in that and the weights are rounded as far.",
        metavar="DTYPE",
    )
    kv_native_layers: int | None = automatic(
        int,
        "Number of layers at each end of the model whose KV cache stays in 16-bit floats when the rest is quantized. "
        "Automatic: what the KV dtype recommends.",
        metavar="LAYERS",
        low=0,
    )
    kv_calibration: str = option(
        "",
        "Text file that KV dtypes with measured codes (kvquant3) are calibrated on when the engine starts: some 2,000 "
        "tokens of its beginning. Empty: a built-in text.",
        metavar="FILE",
    )
    itl: float = option(
        0.0,
        "Objective for the time between two tokens of a request, such as 40ms: prompts are computed in chunks that "
        "keep steps below it, by measured step costs. 0: no objective.",
        metavar="TIME",
        parse=parse_milliseconds,
        low=0.0,
    )
    prefix_caching: bool = option(True, "Reuse the KV pages of prompt prefixes across requests.")
    scheduling: str = option("fcfs", "Scheduling policy: fcfs, priority, or fair (between API keys).", metavar="POLICY")
    max_tenant_slowdown: float | None = automatic(
        float,
        "With --scheduling fair: how many times longer the steps of one API key may become by what other keys send; "
        "those that send more take turns. 0: no limit. Automatic: 2, on a GPU 6.",
        metavar="FACTOR",
        low=0.0,
    )
    kv_policy: str = option(
        "lru", "Eviction policy for cached prefix pages when memory is short: lru or lfu.", metavar="POLICY"
    )
    kv_host_memory: int = size_option("Host memory for prefix pages evicted from the GPU's KV cache, such as 8GiB.")
    kv_disk: str = option("", "Directory that keeps prefix pages across restarts.", metavar="DIR")
    kv_disk_size: int = size_option("Maximum size of --kv-disk, such as 10GiB.", 10 << 30, low=1)
    kv_redis: str = option("", "Redis server for sharing prefix pages, such as redis://host:6379/0.", metavar="URL")
    kv_secret_file: str = option(
        "",
        "File with the secret that pages on disk and in Redis are signed with; the same for all servers that share "
        "them. Without it, one is generated (docs/kv_tiers.md).",
        metavar="FILE",
    )
    kv_listen: str = option(
        "",
        "Address at which other engines fetch the KV pages of prompts computed here, such as 10.0.0.5:7800 "
        "(docs/split.md).",
        metavar="HOST:PORT",
    )
    kv_staging: int = size_option("Host memory for pages that wait to be fetched by other engines.", 1 << 30, low=1)
    kv_peer: tuple[str, ...] = option(
        (), "Engine that KV pages may be fetched from, by its --kv-listen address. Repeatable.", metavar="HOST:PORT"
    )
    kv_source_timeout: float = option(
        60.0,
        "Seconds to wait for the pages of a prompt that another engine computes; it is then computed here.",
        metavar="SECONDS",
        low=0.1,
        high=3600.0,
    )
    kv_budget_policy: str = option(
        "",
        "Which tokens a request drops beyond --kv-budget (lossy): streaming_llm, paged_eviction or h2o.",
        metavar="POLICY",
    )
    kv_budget: int = option(
        0,
        "Number of tokens whose KV a request keeps once its prompt is computed.",
        metavar="TOKENS",
        parse=parse_count,
        low=0,
    )
    device: str | None = automatic(
        str,
        "Device the model runs on: cpu or cuda. Automatic: a GPU if one can be used.",
        choices=("cpu", "cuda"),
        metavar="DEVICE",
    )
    dtype: str | None = automatic(
        str,
        "Type that a GPU computes in, between float32 sums: bfloat16 or float16. Automatic: the checkpoint's own; "
        "bfloat16 where that is float32 or not known, and for models that do not run in float16.",
        choices=("bfloat16", "float16"),
        metavar="DTYPE",
        parse=lambda text: {"half": "float16", "bf16": "bfloat16", "fp16": "float16"}.get(text, text),
    )
    load_format: str = option(
        "auto",
        "Source of the weights: auto (the checkpoint) or dummy (random weights of the shape in config.json).",
        choices=("auto", "dummy"),
        metavar="FORMAT",
    )
    quantization: str | None = automatic(
        str,
        "Round the weights to nearest while loading, on a GPU: fp8 (per channel) or int4 (groups of 128). "
        "Automatic: as stored in the checkpoint.",
        choices=("fp8", "int4"),
        metavar="FORMAT",
    )
    expert_memory: int = size_option(
        "GPU memory for experts, such as 8GiB: all are then kept in host memory, and the most used ones on the GPU as "
        "well. 0: all experts on the GPU."
    )
    lora: tuple[str, ...] = option(
        (), "LoRA adapter in PEFT format, served under NAME; repeatable. See docs/adapters.md.", metavar="NAME=DIR"
    )
    enable_lora: bool = option(False, "Reserve memory for adapters that are loaded later, also without --lora.")
    max_loras: int | None = automatic(
        int,
        "Number of adapters that lie on the device at a time. Automatic: as many as --lora-memory holds, or 8.",
        metavar="ADAPTERS",
        low=1,
        high=4096,
    )
    max_lora_rank: int | None = automatic(
        int,
        "Largest rank of an adapter; memory is reserved for it. Automatic: the largest of those given with --lora, "
        "without any 16.",
        metavar="RANK",
        low=1,
        high=4096,
    )
    lora_memory: int = size_option("Device memory for adapters, such as 2GiB: sets how many lie there at a time.")
    lora_host_memory: int = size_option(
        "Host memory for adapters that are not on the device; beyond it they are read from disk again.", 4 << 30
    )
    max_cpu_loras: int = option(
        0, "Maximum number of adapters in host memory; 0: as many as --lora-host-memory holds.", low=0
    )
    speculate: str = option(
        "off",
        "Speculative decoding (lossless): off, auto (suffix, while it is measured to pay), ngram, suffix, draft:MODEL, "
        "self:layers=N, self:TYPE (the same weights as q2_k, ...), head:DIR (made by train-draft, or a published EAGLE "
        "head) or mtp (the layer for it that the checkpoint brings).",
        metavar="DRAFTER",
    )
    draft_tokens: int | None = automatic(
        int,
        "Maximum number of draft tokens per request and step; the number used is adapted to the measured gain. "
        "Automatic: 8.",
        metavar="TOKENS",
        low=1,
    )
    jump_forward: bool = option(
        True, "Draft what a grammar forces or usually continues with, so that it takes fewer steps (lossless)."
    )
    executor: str | None = automatic(
        str,
        "How a step is executed: recorded, eager, cuda_graph or cuda_eager. Automatic: the fastest that supports the "
        "model.",
        metavar="NAME",
    )
    kernels: str | None = automatic(
        str,
        "Kernel backend for all operations: cpu, triton or ref. Automatic: the fastest that supports each operation.",
        metavar="BACKEND",
    )
    threads: int | None = automatic(
        int, "Number of CPU threads. Automatic: one per physical core.", metavar="THREADS", low=1
    )
    tensor_parallel_size: int = option(
        1, "Number of ranks (processes) that share every layer of the model; see docs/ranks.md.", low=1, high=64
    )
    pipeline_parallel_size: int = option(
        1, "Number of stages that share the layers of the model, each of --tensor-parallel-size ranks.", low=1, high=64
    )
    context_parallel_size: int = option(
        1, "Number of ranks with the whole model each that share the tokens of long prompts.", low=1, high=64
    )
    data_parallel_size: int = option(
        1, "Number of engines that share the requests, each with ranks of its own.", low=1, high=64
    )
    expert_parallel: bool = option(False, "Give each rank whole experts instead of a part of every expert.")
    exact_ranks: bool = option(
        False,
        "Divide matrices by outputs only: results have the same bits as those of one process, at more exchanges.",
    )
    rank_backend: str = option(
        "processes",
        "What ranks are: processes, or threads of one process that take turns (to try a division out).",
        choices=("processes", "threads"),
        metavar="BACKEND",
    )
    rank_timeout: float = option(
        8.0, "Seconds after which a rank that does not answer ends the engine.", metavar="SECONDS", low=1.0
    )
    seed: int = option(0, "Base seed for requests without a seed of their own.", metavar="SEED", low=0)
    # Name -> who set it, for options that are not at their default. Part of no comparison.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for spec in option_fields(type(self)):
            value = getattr(self, spec.name)
            if spec.default is None and is_automatic(value):
                object.__setattr__(self, spec.name, None)
                continue
            if isinstance(value, list):  # from a command line, a file or another process
                value = tuple(value)
                object.__setattr__(self, spec.name, value)
            check(spec, value)
        if self.max_loras is not None and self.lora_memory:
            raise UserError("both max_loras and lora_memory are given", "keep one of them")
        if self.memory is not None and self.gpu_memory_utilization is not None:
            raise UserError("both memory and gpu_memory_utilization are given", "keep one of them")

    @classmethod
    def from_options(
        cls,
        options: Mapping[str, Any],
        sources: str | Mapping[str, str] = BY_USER,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """From loose options under our names or another engine's. `sources`: who set them, one text or by our name.
        What they leave open is read from the environment (TOKENMILL_CONTEXT, ...)."""
        specs = option_fields(cls)
        values = by_option_name(options, specs)
        by_name = dict.fromkeys(values, sources) if isinstance(sources, str) else sources
        origin = {name: by_name.get(name, BY_USER) for name, value in values.items() if value is not None}
        for name, (value, source) in from_environment(
            specs, os.environ if environment is None else environment
        ).items():
            if name not in values:
                values[name], origin[name] = value, source
        return cls(**values, sources=origin)

    @property
    def serves_adapters(self) -> bool:
        return self.enable_lora or bool(self.lora)

    def is_set(self, name: str) -> bool:
        """Whether somebody stated this option; automatic values and defaults are not set."""
        return not self.source(name).startswith(("automatic", BY_DEFAULT))

    def source(self, name: str) -> str:
        """Who set the option's value."""
        spec = next(each for each in fields(self) if each.name == name)
        value = getattr(self, name)
        if spec.default is None and value is None:
            return "automatic"
        if name in self.sources:
            return self.sources[name]
        return BY_DEFAULT if spec.default is not MISSING and value == spec.default else BY_USER

    def decided(self, name: str) -> Any:
        """The option's value, where it can no longer be automatic."""
        value = getattr(self, name)
        assert value is not None, f"{name} is still automatic"
        return value

    def fill(self, reason: str, **values: Any) -> Self:
        """With these values where the option is automatic. A value that somebody set is never replaced."""
        open_ones = {name: value for name, value in values.items() if getattr(self, name) is None}
        added = {name: f"automatic: {reason}" for name, value in open_ones.items() if value is not None}
        return replace(self, **open_ones, sources={**self.sources, **added})

    def settings(self) -> list[Setting]:
        """Every option with its value and who set it."""
        return [
            Setting(spec.name, getattr(self, spec.name), self.source(spec.name)) for spec in option_fields(type(self))
        ]


def _resolved(name: str) -> Any:
    """The field of EngineConfig again, for a narrower type."""
    spec = EngineConfig.__dataclass_fields__[name]
    return field(default=spec.default, metadata=spec.metadata)


_KNOWN_AFTER_LOADING = ("memory", "kv_native_layers", "max_loras", "max_lora_rank")


@dataclass(frozen=True, slots=True)
class ResolvedConfig(EngineConfig):
    """What the engine runs with: made by resolution.py, no automatic values left but those in _KNOWN_AFTER_LOADING.
    Until the weights are loaded, executor is "auto" where none was set; kernels and quantization are "" then."""

    context: int = _resolved("context")
    concurrency: int = _resolved("concurrency")
    batch_tokens: int = _resolved("batch_tokens")
    max_tenant_slowdown: float = _resolved("max_tenant_slowdown")
    page_size: int = _resolved("page_size")
    kv_cache_dtype: str = _resolved("kv_cache_dtype")
    device: str = _resolved("device")
    dtype: str = _resolved("dtype")
    quantization: str = _resolved("quantization")
    draft_tokens: int = _resolved("draft_tokens")
    executor: str = _resolved("executor")
    kernels: str = _resolved("kernels")
    threads: int = _resolved("threads")

    def __post_init__(self) -> None:
        """Values were checked when they were set; here, that none was forgotten."""
        optional = (*_KNOWN_AFTER_LOADING, "gpu_memory_utilization")
        missing = [spec.name for spec in option_fields(type(self)) if getattr(self, spec.name) is None]
        assert not set(missing) - set(optional), f"not resolved: {missing}"
