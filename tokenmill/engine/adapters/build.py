"""Makes an engine's adapters: reads PEFT files for its base, and gives them to its runner.

The one file here that knows what an adapter is (and imports torch where one is read). `read` runs in threads beside the
loop and refuses what this base, this rank limit or this runner cannot take, so that no step ever meets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.identity import model_hash
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.engine.adapters.host import Payload
from tokenmill.engine.adapters.registry import AdapterRegistry, AdapterVersion, split_option
from tokenmill.engine.adapters.residency import AdapterSlots
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.kernels.host import torch_device
from tokenmill.resolution import settle
from tokenmill.runtime.build import DEFAULT_RANK, Runtime

_MIN_LIMIT = 1 << 30  # bytes of a file that are always read


class AdapterFiles:
    """Reads adapters of one base."""

    def __init__(self, base: Path, description: ModelDescription, config: EngineConfig) -> None:
        if config.serves_adapters:
            torch_device("adapters are read with it")
        self._base_hash = cache(lambda: model_hash(base))
        self._description = description
        self._enabled = config.serves_adapters
        self._max_bytes = max(_MIN_LIMIT, config.lora_host_memory)
        self.max_rank = config.max_lora_rank
        self.try_out: Callable[[Any], object] = lambda _adapter: None  # raises what the runner cannot compute

    def read(self, name: str, path: str) -> tuple[AdapterVersion, Payload]:
        """An adapter that this engine can compute. Any thread."""
        if not self._enabled:
            raise UserError("this engine has no memory for adapters", "start it with --enable-lora")
        from tokenmill.checkpoint.adapters.fit import check_base, check_rank
        from tokenmill.checkpoint.adapters.peft import WEIGHTS_FILE, read_adapter

        folder = Path(path).expanduser()
        self._check_size(folder / WEIGHTS_FILE)
        adapter = read_adapter(folder, name)
        adapter = check_base(adapter, self._description, self._base_hash() if adapter.base_hash else "")
        if self.max_rank is not None:
            check_rank(adapter, self.max_rank)
        self.try_out(adapter)
        digest = bytes.fromhex(adapter.hash)
        return AdapterVersion(name, path, digest, adapter.max_rank, adapter.nbytes, adapter.base_name), adapter

    def _check_size(self, file: Path) -> None:
        """Whatever somebody has loaded, it must not take the memory of everything else."""
        size = file.stat().st_size if file.is_file() else 0
        if size > self._max_bytes:
            raise UserError(
                f"{file} has {size / 2**30:.1f} GiB, adapters may have {self._max_bytes / 2**30:.1f} GiB",
                "raise --lora-host-memory, or merge it into the base",
            )


def settle_rank(files: AdapterFiles, config: ResolvedConfig) -> ResolvedConfig:
    """With the highest rank that is served. Reads the adapters that the options name."""
    if not config.serves_adapters:
        return config
    ranks = [files.read(*split_option(each))[0].rank for each in config.lora] if config.max_lora_rank is None else []
    rank = (max([*ranks, 1]), "the largest of those given") if config.lora else (DEFAULT_RANK, "none is given yet")
    config = settle(config, max_lora_rank=rank)
    files.max_rank = config.max_lora_rank
    return config


def make_slots(
    config: ResolvedConfig, files: AdapterFiles, runtime: Runtime, stats: EngineStats
) -> tuple[AdapterRegistry, AdapterSlots]:
    """The registry, with the adapters that the options name, and the slots that the scheduler fills."""
    registry = AdapterRegistry(files.read, config.lora_host_memory, config.max_cpu_loras)
    bank, runner = runtime.executor.adapters, runtime.runner
    if bank is None:
        return registry, AdapterSlots()
    files.try_out = registry.store.prepare = runner.prepare_adapter
    slots = AdapterSlots(bank.num_slots, registry.store, runner.load_adapter, runner.clear_adapter, stats)
    registry.store.stats = stats
    for each in config.lora:
        registry.load_now(*split_option(each))
    return registry, slots
