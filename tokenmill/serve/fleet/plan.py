"""One memory plan for all models of a server: what each needs, and which of them fit together.

Made before anything is loaded, from the metadata of the models. A model has its weights, a KV cache of a stated or
planned size, what a step takes, and the process around them; asleep it has the process only. On a GPU the limit is that
of the device, and a model that is not used has nothing there. Pure arithmetic; fleet.py acts on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.hardware.machine import available_memory, gpu_memory
from tokenmill.hardware.memory import DEFAULT_SHARE, GIB
from tokenmill.serve.fleet.facts import ModelFacts

_USED_SHARE = 0.9  # of what is free, where no limit is stated
# Resident memory that is not shared with other processes, measured with models of a few MB (docs/serving.md).
SERVER_BYTES = 150 << 20  # the HTTP process and the spare engine
ENGINE_BYTES = 150 << 20  # an engine without its model
WORKER_BYTES = 40 << 20  # a process that renders templates
_PACKED_SHARE = 1.05  # of the stored bytes: tables that kernels add


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one model."""

    weights: int
    kv: int
    steps: int
    process: int

    @property
    def awake(self) -> int:
        return self.weights + self.kv + self.steps + self.process

    @property
    def asleep(self) -> int:
        return self.process


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`room`: bytes that models may take together; None: no limit."""

    room: int | None = None
    limit: int = 0
    reason: str = ""

    def need(self, name: str, facts: ModelFacts, options: EngineConfig, num_workers: int) -> Need:
        """Raises UserError for a model that does not even fit alone."""
        on_gpu = facts.device == "cuda"
        process = 0 if on_gpu else ENGINE_BYTES + num_workers * WORKER_BYTES
        weights = int(_PACKED_SHARE * facts.weight_bytes)
        left = (self.room or 0) - weights - facts.step_bytes - process
        kv = options.memory
        if kv is None:
            kv = min(facts.kv_all, max(facts.kv_one, int(DEFAULT_SHARE * left)))
        if self.room is not None and kv > left:
            least = weights + facts.step_bytes + process + kv + self.limit - self.room
            raise UserError(
                f"model '{name}' needs {_size(least)} with a KV cache of {_size(kv)}, "
                f"the limit of all models is {_size(self.limit)}",
                "raise --memory-limit, or lower --context or --concurrency",
            )
        return Need(weights, kv, facts.step_bytes, process)

    def fits(self, awake: Iterable[Need], asleep: Iterable[Need] = ()) -> bool:
        if self.room is None:
            return True
        return sum(each.awake for each in awake) + sum(each.asleep for each in asleep) <= self.room


def make_plan(limit: int, device: str) -> MemoryPlan:
    """`limit`: as stated; 0: most of what is free now."""
    free = gpu_memory() if device == "cuda" else available_memory()
    if limit:
        total, reason = limit, "--memory-limit"
    elif free:
        total, reason = int(_USED_SHARE * free), f"{_USED_SHARE:.0%} of {_size(free)}"
    else:
        raise UserError("the memory of the GPU is not known", "give --memory-limit")
    return MemoryPlan(max(0, total - (0 if device == "cuda" else SERVER_BYTES)), total, reason)


def _size(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
