"""Assembles the runtime: model, KV store, executor and runner, sized by the shared memory model.

Every automatic choice is made here and logged. Called by the engine's construction; knows nothing of scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError, unknown_name
from tokenmill.hardware.kv_layout import KVLayout, build_layout
from tokenmill.hardware.machine import available_memory, usable_cores
from tokenmill.hardware.memory import GIB, KVBudget, RuntimeCosts, activation_bytes, plan_kv
from tokenmill.kernels import cpu
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.ref import rms_norm
from tokenmill.log import get_logger
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel, load_model
from tokenmill.runtime.cuda_sampling import CudaSampler
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.runner import Executor, ModelRunner
from tokenmill.runtime.sampling.sampler import Sampler

_log = get_logger(__name__)
_LONGEST_DEFAULT_CONTEXT = 8192
_GPU_SHARE = 0.95  # of what weights, activations and the runtime leave free on a GPU


@dataclass(slots=True, eq=False)
class Runtime:
    runner: ModelRunner
    model: LoadedModel
    store: KVStore
    layout: KVLayout
    budget: KVBudget
    executor: Executor
    declined_executors: tuple[tuple[str, str], ...]


def resolve_context(config: EngineConfig, trained: int) -> int:
    """The longest request: as stated, else what the model was trained for, within reason."""
    if config.context > trained:
        raise UserError(
            f"context {config.context} is more than the {trained} tokens the model was trained for", "lower --context"
        )
    return config.context or min(trained, _LONGEST_DEFAULT_CONTEXT)


def resolve_device(config: EngineConfig) -> torch.device:
    """Where the model runs; a GPU that was asked for and cannot be used is an error."""
    if config.device == "cpu":
        return torch.device("cpu")
    found = torch.cuda.is_available()
    where = torch.device("cuda", torch.cuda.current_device()) if found else torch.device("cuda")
    reason = gpu.unavailable(where) if found else "this torch finds no NVIDIA GPU"
    if reason is None:
        return where
    if config.device == "cuda":
        raise UserError(f"device cuda cannot be used: {reason}", "use --device cpu")
    if found:
        _log.warning("the GPU is not used: %s", reason)
    return torch.device("cpu")


def build_runtime(checkpoint: Checkpoint, config: EngineConfig, context: int, where: torch.device) -> Runtime:
    torch.set_num_threads(config.threads or usable_cores())
    on_gpu = where.type == "cuda"
    if config.quantization and not on_gpu:
        raise UserError("weights are rounded at load on a GPU only", "use tokenmill quantize, or --device cuda")
    if cpu.unavailable(where) is None:
        cpu.use_threads(config.threads)
    model = load_model(checkpoint, where, context, config.kernels, config.quantization)
    layout = build_layout(model.decoder.kv_layers(), config.page_size)
    dtype = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "bfloat16" if on_gpu else "float32"
    store_class = KV_STORES.get(dtype)
    page_bytes = store_class.page_bytes(layout)
    if on_gpu:
        free = _free_on_gpu(checkpoint, config, model)
        budget = plan_kv(layout, page_bytes, context, config.concurrency, config.memory, free, _GPU_SHARE)
    else:
        budget = plan_kv(layout, page_bytes, context, config.concurrency, config.memory, available_memory())
    store: KVStore = store_class(layout, budget.num_pages, where, config.kernels)
    executor, declined = choose_executor(config.executor, model, store, config)
    _log.info(
        "KV cache: %d pages of %d tokens, predicted %.1f MiB, allocated %.1f MiB (%s); %.1f requests of %d tokens",
        budget.num_pages,
        config.page_size,
        budget.nbytes / 2**20,
        store.nbytes / 2**20,
        budget.reason,
        budget.full_requests,
        context,
    )
    decoder, eps = model.decoder, checkpoint.description.norm_eps
    runner = ModelRunner(
        executor,
        store,
        CudaSampler(where, config.kernels) if model.table is not None else Sampler(where, config.kernels),
        checkpoint.description.vocab_size,
        lambda rows: rms_norm(rows.float(), decoder.norm, eps),
    )
    return Runtime(runner, model, store, layout, budget, executor, declined)


def _free_on_gpu(checkpoint: Checkpoint, config: EngineConfig, model: LoadedModel) -> int:
    """Bytes that the KV cache may take: what is free now less what the memory model says the steps will need."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.where)
    d = checkpoint.description
    steps = activation_bytes(
        config.batch_tokens, d.hidden_size, d.intermediate_size, d.vocab_size, max_sequences=config.concurrency
    )
    runtime = RuntimeCosts().total(1)
    _log.info(
        "GPU memory: %.2f GiB in all, weights %.2f GiB (%.2f GiB allocated), steps %.2f, runtime %.2f, %.2f GiB free",
        total / GIB,
        model.weight_bytes / GIB,
        torch.cuda.memory_allocated(model.where) / GIB,
        steps / GIB,
        runtime / GIB,
        free / GIB,
    )
    return max(0, int(free - steps - runtime))


def choose_executor(
    name: str, model: LoadedModel, store: KVStore, config: EngineConfig
) -> tuple[Executor, tuple[tuple[str, str], ...]]:
    """The named executor, or with "auto" the first that does not decline."""
    if name != "auto" and name not in EXECUTORS:
        raise unknown_name("executor", name, ["auto", *EXECUTORS])
    declined: list[tuple[str, str]] = []
    for candidate in EXECUTORS if name == "auto" else (name,):
        executor_class = EXECUTORS.get(candidate)
        reason = executor_class.declines(model, store)
        if reason is None:
            executor: Executor = executor_class(model, store, config)
            return executor, tuple(declined)
        declined.append((candidate, reason))
    raise UserError(f"executor '{name}' cannot run here: {declined[-1][1]}", "use --executor auto")
