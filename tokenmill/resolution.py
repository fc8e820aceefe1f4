"""From what was asked for to what the engine runs with: every automatic option is decided here, once, with its reason.

`resolve` is a pure function of the options and of facts about machine and model; what only loading can tell (KV memory,
executor) is added by `settle`. A value that somebody set is never replaced. Called by the engine's construction.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
MAX_AUTOMATIC_CONTEXT = 8192
_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class DeviceDefaults:
    """What a device is given where nobody says otherwise."""

    concurrency: int
    batch_tokens: int
    page_size: int
    kv_cache_dtype: str
    max_tenant_slowdown: float  # on a GPU prompts in short chunks would waste most of it


DEVICE_DEFAULTS = {
    "cpu": DeviceDefaults(
        concurrency=64, batch_tokens=512, page_size=8, kv_cache_dtype="float32", max_tenant_slowdown=2.0
    ),
    "cuda": DeviceDefaults(
        concurrency=256, batch_tokens=8192, page_size=16, kv_cache_dtype="bfloat16", max_tenant_slowdown=6.0
    ),
}


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known about machine and model before the weights are loaded."""

    device: str = "cpu"  # that can be used, or that was asked for
    device_reason: str = "no GPU is used"
    trained_context: int = MAX_AUTOMATIC_CONTEXT
    threads: int = 1  # that compute on the CPU
    threads_reason: str = "one per physical core"
    page_multiple: int = 1  # tokens; the KV dtype's pages hold a multiple of it
    gpu_kernels: bool = False  # compute, in 16-bit floats; everything else computes in float32
    stored_dtype: str = ""  # of the checkpoint, where it says one
    no_float16: str = ""  # why this model, with these options, does not run in float16
    half_pages: bool = False  # a CPU that computes attention in float16, and weights that are rounded as far or further


def resolve(config: EngineConfig, facts: Facts | None = None) -> ResolvedConfig:
    """Decide what is automatic. `facts` default to a plain CPU."""
    facts = facts or Facts()
    _refuse_impossible(config, facts)
    values: dict[str, Any] = {spec.name: getattr(config, spec.name) for spec in fields(EngineConfig)}
    sources = dict(config.sources)
    for name, (value, reason) in _automatic_values(config, facts).items():
        if values[name] is None:
            values[name], sources[name] = value, f"automatic: {reason}"
            if value not in ("", "auto"):  # not known yet
                _log.info("%s = %s (%s)", name, value, sources[name])
    if values["executor"] == "eager" and facts.device == "cuda":
        values["executor"] = "cuda_eager"  # the same choice under the device's name
    return ResolvedConfig(**values | {"sources": sources})


def _automatic_values(config: EngineConfig, facts: Facts) -> dict[str, tuple[Any, str]]:
    """Name -> (value, reason) of every option that can be decided before the weights are loaded."""
    defaults = DEVICE_DEFAULTS[facts.device]
    place = "default for a GPU" if facts.device == "cuda" else "default for a CPU"
    dtype, dtype_reason = _compute_dtype(facts)
    kv_dtype = (defaults.kv_cache_dtype, place)
    if facts.device == "cuda" and "float16" in (config.dtype, None if config.dtype else dtype):
        kv_dtype = ("float16", "the type that is computed in")
    if facts.half_pages:
        kv_dtype = ("float16", "this CPU multiplies in it, and the weights are rounded as far")
    page_size = defaults.page_size, place
    if defaults.page_size % facts.page_multiple:
        page_size = facts.page_multiple, f"KV dtype {config.kv_cache_dtype} groups {facts.page_multiple} tokens"
    return {
        "device": (facts.device, facts.device_reason),
        "context": (min(facts.trained_context, MAX_AUTOMATIC_CONTEXT), _context_reason(facts.trained_context)),
        "concurrency": (defaults.concurrency, place),
        "batch_tokens": (defaults.batch_tokens, place),
        "dtype": (dtype, dtype_reason),
        "kv_cache_dtype": kv_dtype,
        "page_size": page_size,
        "max_tenant_slowdown": (defaults.max_tenant_slowdown, place),
        "draft_tokens": (_DRAFT_TOKENS, "upper limit; the number used adapts to the measured gain"),
        "threads": (facts.threads, facts.threads_reason),
        "kernels": ("", "the fastest that supports each operation"),
        "quantization": ("", "weights as stored in the checkpoint"),
        "executor": ("auto", "the first that supports the model"),
    }


def _compute_dtype(facts: Facts) -> tuple[str, str]:
    """The checkpoint's own 16-bit type where it has one, else bfloat16, which has the range of float32: vLLM's rule."""
    if not facts.gpu_kernels:
        return "float32", "a CPU and the reference kernels compute in it"
    if facts.stored_dtype != "float16":
        return (
            "bfloat16",
            f"the checkpoint is {facts.stored_dtype}" if facts.stored_dtype else "the checkpoint says none",
        )
    if facts.no_float16:
        return "bfloat16", f"the checkpoint is float16, but {facts.no_float16}"
    return "float16", "the checkpoint's own"


def settle(config: ResolvedConfig, **found: tuple[Any, str]) -> ResolvedConfig:
    """Add what loading decided, as name=(value, reason). What was set keeps its value."""
    changes = {name: each for name, each in found.items() if not config.is_set(name)}
    sources = {name: f"automatic: {reason}" for name, (_value, reason) in changes.items()}
    values: dict[str, Any] = {name: value for name, (value, _reason) in changes.items()}
    settled = replace(config, **values, sources={**config.sources, **sources})
    for name, (value, reason) in changes.items():
        _log.info("%s = %s (automatic: %s)", name, value, reason)
    return settled


def reserve_concurrency(config: EngineConfig, needed: int, what: str) -> EngineConfig:
    """For a job that runs `needed` requests at once: a set value must allow them, an automatic one does."""
    if config.concurrency is not None and config.is_set("concurrency"):
        if config.concurrency < needed:
            raise UserError(f"--concurrency {config.concurrency} is less than {what} {needed}", "raise --concurrency")
        return config
    if needed <= (config.concurrency or min(each.concurrency for each in DEVICE_DEFAULTS.values())):
        return config
    return replace(config, concurrency=None).fill(f"{what} {needed}", concurrency=needed)


def _refuse_impossible(config: EngineConfig, facts: Facts) -> None:
    if config.context is not None and config.context > facts.trained_context:
        raise UserError(
            f"context {config.context} is more than the {facts.trained_context} tokens the model was trained for",
            "lower --context",
        )
    if config.page_size is not None and config.page_size % facts.page_multiple:
        raise UserError(
            f"KV dtype {config.kv_cache_dtype} needs pages of a multiple of {facts.page_multiple} tokens",
            f"use --page-size {facts.page_multiple}, or leave it out",
        )
    if config.dtype is not None and not facts.gpu_kernels:
        where = "reference kernels compute" if facts.device == "cuda" else "the CPU computes"
        raise UserError(f"dtype {config.dtype} is given, but {where} in float32", "leave --dtype out")
    if config.dtype == "float16" and facts.no_float16:
        raise UserError(f"dtype float16 cannot be used: {facts.no_float16}", "use --dtype bfloat16")
    if facts.device == "cuda":
        return
    if config.quantization:
        raise UserError("weights are rounded at load on a GPU only", "use tokenmill quantize, or --device cuda")
    if config.gpu_memory_utilization is not None:
        raise UserError("gpu_memory_utilization is given, but the model runs on the CPU", "use --memory instead")


def _context_reason(trained: int) -> str:
    if trained > MAX_AUTOMATIC_CONTEXT:
        return f"the model was trained for {trained}; raise it with --context"
    return "what the model was trained for"
