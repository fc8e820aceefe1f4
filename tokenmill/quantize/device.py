"""The device a job computes on: the host, or a GPU that holds one block at a time.

Chooses and describes the device, and refuses a GPU without enough memory before any work. The arithmetic is
float32 on both, so results agree to rounding; they are not the same bits. Used by the jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from tokenmill.errors import UserError, unknown_name

DEVICES = ("auto", "cpu", "cuda")
_MIB = 1 << 20


def choose_device(name: str) -> torch.device:
    """`auto`: a GPU where torch finds one."""
    if name not in DEVICES:
        raise unknown_name("device", name, DEVICES)
    if name != "cpu" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda":
        raise UserError("device cuda cannot be used: this torch finds no NVIDIA GPU", "use --device cpu")
    return torch.device("cpu")


def describe_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"


def free_device_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


def check_room(device: torch.device, needed: int) -> None:
    """Refuse a GPU that cannot hold what the forecast says the job needs there."""
    if device.type != "cuda":
        return
    free = free_device_bytes(device)
    if free < needed:
        raise UserError(
            f"the job needs {needed / _MIB:,.0f} MiB of GPU memory, {free / _MIB:,.0f} are free",
            "use --device cpu, or free the GPU",
        )


def peak_device_bytes(device: torch.device) -> int:
    """Peak bytes of this process's tensors on the GPU; 0 on the host, where the process itself is measured."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@contextlib.contextmanager
def full_device_explained(out: str) -> Iterator[None]:
    """Explain running out of GPU memory during a job; the finished blocks are kept."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise UserError(
            f"the GPU has no memory left for {out}",
            "free it and run the same command again: it resumes at the last block; or --device cpu --restart",
        ) from None
