"""Ranks as processes of one host that put their results together in shared memory, without a system call.

What goes between stages, and what is no float32 matrix, goes through gloo. An exchange takes some microseconds where
both come at the same time; the recorded program makes it between two of its stages (csrc/cpu/exchange.h).
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenmill.hardware.sharding import Grid, Place
from tokenmill.kernels import cpu
from tokenmill.model.group import RankError
from tokenmill.runtime.ranks.gloo import GlooGroup

_MEMORY_FOLDER = "/dev/shm"  # memory that processes share, where the system has it


def has_exchange() -> bool:
    """Whether the C++ module is there."""
    return cpu.unavailable(torch.device("cpu")) is None


def make_memory(grid: Grid) -> str:
    """A file that all ranks map, all zeros; the caller removes it once they have."""
    folder = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
    descriptor, path = tempfile.mkstemp(prefix="tokenmill-ranks-", dir=folder)
    os.truncate(descriptor, _stage_bytes(grid) * grid.pp)
    os.close(descriptor)
    return path


def _stage_bytes(grid: Grid) -> int:
    size: int = cpu.module().Exchange.room_for(grid.size // grid.pp)
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class SharedGroup(GlooGroup):
    def __init__(self, place: Place, meeting: str, timeout: float, memory: str) -> None:
        """`memory`: the file of `make_memory`. All have mapped it when they have met: then it can be removed."""
        size = _stage_bytes(place.grid)
        with open(memory, "r+b") as file:
            mapped = mmap.mmap(file.fileno(), size, offset=size * place.stage)
        super().__init__(place, meeting, timeout)
        self.exchange: Any = cpu.module().Exchange(np.frombuffer(mapped, np.uint8), self.size, self.part, timeout)

    def collect(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        if x.dtype != torch.float32 or x.dim() != 2:
            return super().collect(x, widths)
        return list(self._gather(x, widths).split(list(widths), -1))

    def gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        if self.size == 1 or x.dtype != torch.float32 or x.dim() != 2:
            return super().gather(x, widths)
        widths = widths or (x.shape[-1],) * self.size
        self.note(x.shape[0], *widths)
        return self._gather(x, widths)

    def reduce(self, x: Tensor) -> Tensor:
        if self.size == 1 or x.dtype != torch.float32 or x.dim() != 2:
            return super().reduce(x)
        self.note(*x.shape)
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        self._check(self.exchange.sum(x.contiguous(), total))
        return total

    def abort(self) -> None:
        """Have no rank of this stage wait any longer: one of them has ended."""
        self.exchange.abort()

    def _gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        together = torch.empty(x.shape[0], sum(widths))
        self._check(self.exchange.gather(x.contiguous(), list(widths), together))
        return together

    def _check(self, came: bool) -> None:
        if not came:
            raise RankError("a rank did not come to an exchange")
