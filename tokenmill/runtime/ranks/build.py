"""Decides whether an engine runs on several ranks, refuses by name what ranks cannot do, and starts them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.rank_description import check_grid
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.errors import UserError
from tokenmill.hardware.sharding import Grid
from tokenmill.resolution import Facts

if TYPE_CHECKING:
    from tokenmill.runtime.ranks.seat import Seat

_DRAFTERS = ("off", "auto", "ngram", "suffix", "draft")


def grid_of(config: EngineConfig) -> Grid:
    return Grid(
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        config.expert_parallel,
        config.context_parallel_size,
    )


def facts_of_rank(facts: Facts, config: EngineConfig) -> Facts:
    """The cores are divided among the ranks of all engines."""
    ranks = grid_of(config).size * config.data_parallel_size
    if ranks == 1:
        return facts
    if facts.device == "cuda" and config.data_parallel_size > 1:
        raise UserError("engines of one server share no GPU", "start a server for each GPU, behind tokenmill route")
    return replace(facts, threads=max(1, facts.threads // ranks), threads_reason=f"cores for each of {ranks} ranks")


def start_ranks(model: Path, description: ModelDescription, config: ResolvedConfig) -> Seat | None:
    """Rank 0's seat, once the others were started and load their parts; None where there is only one rank."""
    grid = grid_of(config)
    if grid.size == 1:
        if config.expert_parallel:
            raise UserError("--expert-parallel needs several ranks", "add --tensor-parallel-size")
        return None
    _refuse(config, grid)
    check_grid(description, grid)
    # Their messages need a package that one process does without.
    from tokenmill.runtime.ranks.follow import follow
    from tokenmill.runtime.ranks.processes import ProcessCrew
    from tokenmill.runtime.ranks.threads import ThreadCrew

    if config.rank_backend == "threads":
        return ThreadCrew(grid, config.exact_ranks, partial(follow, model, config)).seat
    return ProcessCrew(model, config, grid).seat


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _refuse(config: ResolvedConfig, grid: Grid) -> None:
    """What has no divided form."""
    drafter = config.speculate.partition(":")[0]
    refused = (
        (
            config.device == "cuda" and grid.tp < grid.size,
            "--device cuda with stages or parts of prompts",
            "use --tensor-parallel-size alone",
        ),
        (
            config.device == "cuda" and config.rank_backend == "processes" and _num_gpus() < grid.size,
            f"--device cuda with {_num_gpus()} GPUs",
            "use as many ranks as there are GPUs, or --device cpu",
        ),
        (
            bool(config.kv_host_memory or config.kv_disk or config.kv_redis),
            "KV tiers",
            "leave out --kv-disk and others",
        ),
        (drafter not in _DRAFTERS, f"--speculate {config.speculate}", f"use one of {', '.join(_DRAFTERS)}"),
        (config.kv_budget_policy == "h2o", "--kv-budget-policy h2o", "use streaming_llm"),
        (config.executor not in ("auto", "eager"), f"--executor {config.executor}", "leave --executor out"),
        (bool(config.expert_memory), "--expert-memory", "leave it out"),
        (
            grid.pp > 1 and config.kv_cache_dtype not in ("float32", "float16", "bfloat16", "fp8"),
            f"--kv-cache-dtype {config.kv_cache_dtype} with pipeline stages",
            "use float32, float16, bfloat16 or fp8",
        ),
    )
    for applies, what, remedy in refused:
        if applies:
            raise UserError(f"{what} is not supported with {grid.size} ranks", remedy)
