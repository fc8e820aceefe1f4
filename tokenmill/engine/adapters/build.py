"""Makes an engine's adapters: reads PEFT files for its base, and gives them to its runner.

The one file here that knows what an adapter is (and so torch). `read` runs in threads beside the loop and refuses what
this base, this rank limit or this runner cannot take, so that no step ever meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.checkpoint.adapters.fit import check_base, check_rank
from tokenmill.checkpoint.adapters.peft import read_adapter
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.identity import model_hash
from tokenmill.config import EngineConfig, ResolvedConfig
from tokenmill.engine.adapters.host import Payload
from tokenmill.engine.adapters.registry import AdapterRegistry, AdapterVersion, split_option
from tokenmill.errors import UserError

DEFAULT_RANK = 16
DEFAULT_SLOTS = 8


class AdapterFiles:
    """Reads adapters of one base."""

    def __init__(self, base: Path, description: ModelDescription, max_rank: int | None, enabled: bool) -> None:
        self._base_hash = cache(lambda: model_hash(base))
        self._description = description
        self._enabled = enabled
        self.max_rank = max_rank
        self.prepare: Callable[[Any], Payload] = lambda adapter: adapter  # into the form that the runner takes

    def read(self, name: str, path: str) -> tuple[AdapterVersion, Payload]:
        """An adapter that this engine can compute. Any thread."""
        if not self._enabled:
            raise UserError("this engine has no memory for adapters", "start it with --enable-lora")
        folder = Path(path).expanduser()
        adapter = read_adapter(folder, name)
        adapter = check_base(adapter, self._description, self._base_hash() if adapter.base_hash else "")
        if self.max_rank is not None:
            check_rank(adapter, self.max_rank)
        payload = self.prepare(adapter)
        digest = bytes.fromhex(adapter.hash)
        return AdapterVersion(name, path, digest, adapter.max_rank, adapter.nbytes, adapter.base_name), payload

    def rank_for(self, adapters: Sequence[str]) -> tuple[int, str]:
        """(the largest rank of these options, why); raises what is wrong with any of them."""
        ranks = [self.read(*split_option(each))[0].rank for each in adapters]
        return (max(*ranks, 1), "the largest of those given") if ranks else (DEFAULT_RANK, "no adapter is given yet")


def make_registry(files: AdapterFiles, config: ResolvedConfig) -> AdapterRegistry:
    """With the adapters that the options name."""
    registry = AdapterRegistry(files.read, config.lora_host_memory, config.max_cpu_loras)
    for each in config.lora:
        registry.load_now(*split_option(each))
    return registry


def files_of(base: Path, description: ModelDescription, options: EngineConfig) -> AdapterFiles:
    return AdapterFiles(base, description, options.max_lora_rank, options.serves_adapters)
