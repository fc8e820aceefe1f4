"""The C++ module `_cpu` (csrc/cpu) and its worker threads: why it cannot be used on a device, how many threads.

Below all CPU kernels; cpu.py offers it to everything else.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from tokenmill.errors import UserError
from tokenmill.kernels.host import Device
from tokenmill.kernels.native import missing, module

THREADS_VARIABLE = "TOKENMILL_THREADS"


def unavailable(device: Device) -> str | None:
    if device.type != "cpu":
        return f"runs on CPU tensors, not on {device.type}"
    return missing()


@cache
def _pool(threads: int) -> Any:
    return module().Pool.shared(threads)


_chosen_pool: Any = None


def use_threads(count: int) -> None:
    """Set the number of worker threads of `pool`; 0: TOKENMILL_THREADS, or the physical cores this process may use."""
    global _chosen_pool
    if not count:
        text = os.environ.get(THREADS_VARIABLE, "0")
        if not text.isdigit():
            raise UserError(f"{THREADS_VARIABLE} is {text!r}", "give an integer; 0 uses all physical cores")
        count = int(text)
    _chosen_pool = _pool(count)


def pool() -> Any:
    """The worker threads of this process, shared by everything that computes in it."""
    if _chosen_pool is None:
        use_threads(0)
    return _chosen_pool


def num_threads() -> int:
    size: int = pool().size
    return size


def multiplies_halves(head_dim: int) -> bool:
    """Whether attention over float16 pages computes in float16, which a CPU that can does at twice the rate."""
    answer: bool = module().multiplies_halves(head_dim)
    return answer


def instruction_set() -> str:
    name: str = module().best_isa()
    return name
