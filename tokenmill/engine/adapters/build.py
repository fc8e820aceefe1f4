"""Makes an engine's adapters: reads PEFT files for its base, and gives them to its runner.

The one file here that knows what an adapter is (and so torch). `read` runs in threads beside the loop and refuses what
this base, this rank limit or this runner cannot take, so that no step ever meets it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.adapters.adapter import EMBEDDING
from tokenmill.checkpoint.adapters.fit import check_base, check_rank, module_shapes
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.identity import model_hash
from tokenmill.config import ResolvedConfig
from tokenmill.engine.adapters.host import Payload
from tokenmill.engine.adapters.registry import AdapterRegistry, AdapterVersion, split_option
from tokenmill.engine.adapters.residency import AdapterSlots
from tokenmill.engine.stats import EngineStats
from tokenmill.errors import UserError
from tokenmill.resolution import settle
from tokenmill.runtime.build import DEFAULT_ADAPTERS, DEFAULT_RANK
from tokenmill.runtime.runner import ModelRunner

_VALUE_BYTES = 4  # of a factor on the device, at most


class AdapterFiles:
    """Reads adapters of one base."""

    def __init__(self, base: Path, description: ModelDescription, max_rank: int | None, enabled: bool) -> None:
        self._base_hash = cache(lambda: model_hash(base))
        self._description = description
        self._enabled = enabled
        self.max_rank = max_rank
        self.try_out: Callable[[Any], object] = lambda _adapter: None  # raises what the runner cannot compute

    def read(self, name: str, path: str) -> tuple[AdapterVersion, Payload]:
        """An adapter that this engine can compute. Any thread."""
        if not self._enabled:
            raise UserError("this engine has no memory for adapters", "start it with --enable-lora")
        adapter = read_adapter(Path(path).expanduser(), name)
        adapter = check_base(adapter, self._description, self._base_hash() if adapter.base_hash else "")
        if self.max_rank is not None:
            check_rank(adapter, self.max_rank)
        self.try_out(adapter)
        digest = bytes.fromhex(adapter.hash)
        return AdapterVersion(name, path, digest, adapter.max_rank, adapter.nbytes, adapter.base_name), adapter


def size_slots(files: AdapterFiles, config: ResolvedConfig, description: ModelDescription) -> ResolvedConfig:
    """How many adapters of which rank lie on the device at a time. Reads those that the options name."""
    if not config.serves_adapters:
        return config
    ranks = [files.read(*split_option(each))[0].rank for each in config.lora] if config.max_lora_rank is None else []
    rank = max([*ranks, 1]), "the largest of those given"
    config = settle(config, max_lora_rank=rank if config.lora else (DEFAULT_RANK, "none is given yet"))
    files.max_rank = config.max_lora_rank
    if not config.lora_memory:
        return settle(config, max_loras=(DEFAULT_ADAPTERS, "default"))
    nbytes = slot_bytes(description, config.max_lora_rank or DEFAULT_RANK)
    if nbytes > config.lora_memory:
        raise UserError(
            f"an adapter of rank {config.max_lora_rank} may take {nbytes / 2**20:.0f} MiB, --lora-memory is "
            f"{config.lora_memory / 2**20:.0f} MiB",
            "raise it, or lower --max-lora-rank",
        )
    slots = config.lora_memory // nbytes
    return settle(config, max_loras=(slots, f"--lora-memory, {nbytes / 2**20:.1f} MiB each"))


def slot_bytes(description: ModelDescription, rank: int) -> int:
    """Of an adapter of every matrix that one may change; whole matrices that some bring come on top."""
    shapes = module_shapes(description)
    adapted = [shape for name, shape in shapes.items() if name != EMBEDDING and ".experts." not in name]
    return sum(outputs + inputs for outputs, inputs in adapted) * rank * _VALUE_BYTES


def make_slots(
    config: ResolvedConfig, files: AdapterFiles, runner: ModelRunner, stats: EngineStats
) -> tuple[AdapterRegistry, AdapterSlots]:
    """The registry, with the adapters that the options name, and the slots that the scheduler fills."""
    registry = AdapterRegistry(files.read, config.lora_host_memory, config.max_cpu_loras)
    if not config.serves_adapters:
        return registry, AdapterSlots()
    files.try_out = registry.store.prepare = runner.prepare_adapter
    slots = AdapterSlots(config.max_loras or 0, registry.store, runner.load_adapter, runner.clear_adapter, stats)
    registry.store.stats = stats
    for each in config.lora:
        registry.load_now(*split_option(each))
    return registry, slots
