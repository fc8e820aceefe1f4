"""Assembles the runtime: model, KV store, executor and runner, sized by the shared memory model.

Finds the facts that automatic options are resolved from. Called by the engine's construction; knows nothing of
scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.kv_layout import KVLayout, LayerKV, build_layout
from tokenmill.hardware.machine import available_memory, usable_cores
from tokenmill.hardware.memory import DEFAULT_SHARE, GIB, KVBudget, RuntimeCosts, activation_bytes, free_within, plan_kv
from tokenmill.kernels import cpu
from tokenmill.kernels import triton as gpu
from tokenmill.log import get_logger
from tokenmill.model.adapters import slot_bytes
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.checkpoint_scales import load_kv_scales
from tokenmill.model.kvstore.choice import StoreChoice, choose_store, page_multiple
from tokenmill.model.loader import LoadedModel, load_model
from tokenmill.resolution import DEVICE_DEFAULTS, Facts
from tokenmill.runtime.executors import choose_executor
from tokenmill.runtime.executors.base import Executor
from tokenmill.runtime.executors.cuda.prompts import MAX_PROMPT_TOKENS
from tokenmill.runtime.observation.key_conditioning import condition_keys
from tokenmill.runtime.runner import ModelRunner
from tokenmill.runtime.speculation.base import Target
from tokenmill.runtime.speculation.speculator import build_speculator

_log = get_logger(__name__)
DEFAULT_ADAPTERS, DEFAULT_RANK = 8, 16  # where nobody said more: slots, and the highest rank
_GPU_SHARE = 0.95  # of the GPU memory that weights, activations and the runtime leave free


@dataclass(slots=True, eq=False)
class Runtime:
    runner: ModelRunner
    model: LoadedModel
    store: KVStore
    layout: KVLayout
    budget: KVBudget
    executor: Executor[Tensor]
    declined_executors: tuple[tuple[str, str], ...]
    native_layers: int = 0  # at each end, whose KV pages are 16-bit floats though the others are quantized


def find_device(config: EngineConfig) -> tuple[torch.device, str]:
    """The device and the reason for it. Raises UserError if --device cuda cannot be used."""
    if config.device == "cpu":
        return torch.device("cpu"), ""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cuda")
    reason = gpu.unavailable(device) if has_gpu else "torch finds no NVIDIA GPU"
    if reason is None:
        return device, f"found {torch.cuda.get_device_name(device)}"
    if config.device == "cuda":
        raise UserError(f"device cuda cannot be used: {reason}", "use --device cpu")
    if has_gpu:
        _log.warning("the GPU is not used: %s", reason)
    return torch.device("cpu"), reason


def find_facts(config: EngineConfig, trained_context: int) -> tuple[Facts, torch.device]:
    """What automatic options are resolved from."""
    device, reason = find_device(config)
    dtype = config.kv_cache_dtype or DEVICE_DEFAULTS[device.type].kv_cache_dtype
    threads, threads_reason = usable_cores(), "usable cores"
    if cpu.unavailable(device) is None:
        cpu.use_threads(config.threads or 0)
        threads, threads_reason = cpu.num_threads(), "one per physical core"
    return Facts(device.type, reason, trained_context, threads, threads_reason, page_multiple(dtype)), device


def build_runtime(checkpoint: Checkpoint, config: ResolvedConfig, device: torch.device) -> Runtime:
    torch.set_num_threads(config.threads if config.is_set("threads") else usable_cores())
    on_gpu, context = device.type == "cuda", config.context
    if cpu.unavailable(device) is None:
        cpu.use_threads(config.threads)
    model = load_model(
        checkpoint, device, context, config.kernels, config.quantization, expert_memory=config.expert_memory
    )
    layout, choice = kv_arrangement(config, model.decoder.kv_layers(), device)
    page_bytes, fixed = choice.page_bytes(layout), choice.fixed_bytes(layout, config.concurrency)
    free = _free_on_gpu(checkpoint, config, model) if on_gpu else available_memory()
    if on_gpu and config.serves_adapters:
        free = max(0, free - _num_adapters(config, model) * slot_bytes(model, _max_rank(config)))
    stated = free if config.gpu_memory_utilization is not None else config.memory
    memory = 0 if stated is None else max(1, stated - fixed)
    share = _GPU_SHARE if on_gpu else DEFAULT_SHARE
    budget = plan_kv(
        layout, page_bytes, context, config.concurrency, memory, free - fixed, share, config.prefix_caching,
        queues_steps=model.table is not None,
    )  # fmt: skip
    store = choice.build(layout, budget.num_pages, device, config.kernels, config.concurrency)
    store.hold_states(budget.num_state_slots, budget.num_spare_states)
    load_kv_scales(store, checkpoint)
    condition_keys(store, model, config, context)
    executor, declined = choose_executor(config.executor, model, store, config)
    if not config.kernels:  # forcing a backend is asking for its speed
        _warn_of_fallback(executor.name, declined, device)
    _log.info(
        "KV cache: %d pages of %d tokens, predicted %.1f MiB, allocated %.1f MiB (%s); %.1f requests of %d tokens",
        budget.num_pages,
        layout.page_size,
        (budget.nbytes + fixed) / 2**20,
        (store.nbytes + store.states.nbytes) / 2**20,
        budget.reason,
        budget.full_requests,
        context,
    )
    if layout.states:
        _log.info(
            "recurrent states: %d slots of %.1f MiB, %d of them for snapshots, and %d spare ones for queued steps",
            budget.num_state_slots,
            layout.state_bytes / 2**20,
            budget.num_state_slots - config.concurrency,
            budget.num_spare_states,
        )
    if config.serves_adapters:
        executor.hold_adapters(_num_adapters(config, model), _max_rank(config))
    speculator = build_speculator(Target(model, store, executor, config))
    runner = ModelRunner(executor, store, speculator)
    return Runtime(runner, model, store, layout, budget, executor, declined, choice.edge_layers)


def _num_adapters(config: ResolvedConfig, model: LoadedModel) -> int:
    """Slots: as many as were stated, or as the stated memory holds of the highest rank."""
    if not config.lora_memory:
        return config.max_loras or DEFAULT_ADAPTERS
    nbytes = slot_bytes(model, _max_rank(config))
    values = sum(weight.out_features * weight.in_features for weight in model.weights.values())
    if model.table is None and model.weight_bytes > 1.5 * values:
        nbytes *= 4  # beside a float base, factors on a CPU are float32
    if nbytes > config.lora_memory:
        raise UserError(
            f"an adapter of rank {_max_rank(config)} may take {nbytes / 2**20:.1f} MiB, --lora-memory is "
            f"{config.lora_memory / 2**20:.1f} MiB",
            "raise it, or lower --max-lora-rank",
        )
    return config.lora_memory // nbytes


def _max_rank(config: ResolvedConfig) -> int:
    return config.max_lora_rank or DEFAULT_RANK


def _warn_of_fallback(executor: str, declined: tuple[tuple[str, str], ...], device: torch.device) -> None:
    """A slower executor than this device could have is never silent."""
    for name, reason in declined:
        if name.startswith("cuda") == (device.type == "cuda"):
            _log.warning("steps run on the slower executor %s, because %s declined: %s", executor, name, reason)


def kv_arrangement(config: ResolvedConfig, layers: list[LayerKV], device: torch.device) -> tuple[KVLayout, StoreChoice]:
    """How KV memory is divided and held."""
    choice = choose_store(config.kv_cache_dtype, config.kv_native_layers, layers, device)
    return build_layout(layers, config.page_size), choice


def _largest_dequantized(model: LoadedModel) -> int:
    """Bytes of the largest group-quantized matrix in bf16, to which products with many tokens dequantize it."""
    kernels = [weight.kernel.run for weight in model.weights.values() if weight.kernel is not None]
    matrices: list[Any] = [getattr(kernel, "whole", kernel) for kernel in kernels]
    grouped = [matrix for matrix in matrices if getattr(matrix, "kind", "") in ("int4", "grouped4", "grouped8")]
    return max((2 * matrix.rows * matrix.depth for matrix in grouped), default=0)


def _free_on_gpu(checkpoint: Checkpoint, config: ResolvedConfig, model: LoadedModel) -> int:
    """Bytes for the KV cache: what is free now minus what the memory model predicts for the steps."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    d = checkpoint.description
    steps = activation_bytes(
        config.batch_tokens, d.hidden_size, d.intermediate_size, d.vocab_size, max_sequences=config.concurrency
    )
    # Captured steps with prompts share a memory pool, but blocks of a smaller one may not fit a larger one.
    captured = min(config.batch_tokens, MAX_PROMPT_TOKENS)
    steps += 2 * activation_bytes(captured, d.hidden_size, d.intermediate_size, d.vocab_size, max_sequences=0)
    steps += 2 * _largest_dequantized(model)  # in a captured step and in an eager one
    runtime = RuntimeCosts().total(1)
    _log.info(
        "GPU memory: %.2f GiB in all, weights %.2f GiB (%.2f GiB allocated), steps %.2f, runtime %.2f, %.2f GiB free",
        total / GIB,
        model.weight_bytes / GIB,
        torch.cuda.memory_allocated(model.device) / GIB,
        steps / GIB,
        runtime / GIB,
        free / GIB,
    )
    if config.gpu_memory_utilization is not None:
        free = free_within(config.gpu_memory_utilization, total, free, torch.cuda.memory_reserved(model.device))
    return max(0, int(free - steps - runtime))
