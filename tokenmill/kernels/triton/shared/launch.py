"""What every launch shares on the host: dependent-launch keywords, scratch memory, device generation, sizes.

With programmatic dependent launch (PDL) a kernel may start while its predecessor still runs; `dependent_launch`
(shared/device.py) is the device half of it. Knows no kernel. Used by every file of this package.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from tokenmill.kernels.gpu_generation import hopper_or_later, is_hopper

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
PDL_VARIABLE = "TOKENMILL_PDL"  # "0" turns programmatic dependent launch off


@cache
def _supports_pdl(index: int) -> bool:
    if os.environ.get(PDL_VARIABLE, "1") == "0":
        return False
    return hopper_or_later(index)


def uses_pdl(device: torch.device) -> bool:
    """Whether kernels on this device overlap their start with the end of their predecessor."""
    return device.type == "cuda" and _supports_pdl(device.index or 0)


def options(device: torch.device, warps: int = 4, stages: int = 3) -> dict[str, Any]:
    """Launch keywords besides the kernel's own arguments; the interpreter knows only the first two."""
    return {"num_warps": warps, "num_stages": stages} | ({"launch_pdl": True} if uses_pdl(device) else {})


def gluon_options(device: torch.device, warps: int) -> dict[str, Any]:
    """As `options`, for Gluon kernels, which do their own pipelining."""
    return {"num_warps": warps} | ({"launch_pdl": True} if uses_pdl(device) else {})


@cache
def on_hopper() -> bool:
    """Whether the Gluon kernels run on the current device: Hopper, unless generic kernels are forced, and Gluon as
    Triton has it since 3.6."""
    if INTERPRETED or not torch.cuda.is_available() or not is_hopper():
        return False
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


@cache
def copies_by_descriptor() -> bool:
    """Whether the device has a tensor memory accelerator."""
    return INTERPRETED or not torch.cuda.is_available() or hopper_or_later()


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors; a small number where there is no GPU, so that tests split work too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def power_of_two(value: int, least: int = 1) -> int:
    return max(least, 1 << max(0, value - 1).bit_length())


class Workspace:
    """Scratch of one device: float32 partial results and zeroed counters, shared by all launches of a stream.

    Kernels of one stream never use it at the same time. It only grows, and old buffers are kept: a captured graph goes
    on writing to the one it was captured with.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._retained: list[Tensor] = []
        self._partials = torch.empty(1 << 22, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 << 16, dtype=torch.int32, device=device)
        self._widened = torch.empty(0, dtype=torch.bfloat16, device=device)

    def partials(self, count: int) -> Tensor:
        if count > self._partials.numel():
            self._retained.append(self._partials)
            self._partials = torch.empty(power_of_two(count), dtype=torch.float32, device=self._device)
        return self._partials

    def widened(self, count: int) -> Tensor:
        """Of 16 bits each, for FP8 pages that are widened before they are read."""
        if count > self._widened.numel():
            self._retained.append(self._widened)
            self._widened = torch.empty(count, dtype=torch.bfloat16, device=self._device)
        return self._widened

    def counters(self, count: int) -> Tensor:
        """Zero between launches: the last program to arrive at a counter resets it."""
        if count > self._counters.numel():
            self._retained.append(self._counters)
            self._counters = torch.zeros(power_of_two(count), dtype=torch.int32, device=self._device)
        return self._counters


@cache
def workspace(device: torch.device) -> Workspace:
    return Workspace(device)
