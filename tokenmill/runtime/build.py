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
from tokenmill.hardware.memory import KVBudget, plan_kv
from tokenmill.kernels import cpu
from tokenmill.kernels.ref import rms_norm
from tokenmill.log import get_logger
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel, load_model
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.runner import Executor, ModelRunner
from tokenmill.runtime.sampling.sampler import Sampler

_log = get_logger(__name__)
_LONGEST_DEFAULT_CONTEXT = 8192


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


def build_runtime(checkpoint: Checkpoint, config: EngineConfig, context: int) -> Runtime:
    where = torch.device("cpu")
    torch.set_num_threads(config.threads or usable_cores())
    cpu.use_threads(config.threads)
    model = load_model(checkpoint, where, context, config.kernels)
    layout = build_layout(model.decoder.kv_layers(), config.page_size)
    dtype = "float32" if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    store_class = KV_STORES.get(dtype)
    budget = plan_kv(
        layout,
        store_class.page_bytes(layout),
        context,
        config.concurrency,
        config.memory,
        available_memory(),
    )
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
        Sampler(where, config.kernels),
        checkpoint.description.vocab_size,
        lambda rows: rms_norm(rows, decoder.norm, eps),
    )
    return Runtime(runner, model, store, layout, budget, executor, declined)


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
