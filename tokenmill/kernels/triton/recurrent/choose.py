"""Which tiles the recurrent scans are computed in, by shape. By reasoning, not yet by measurement: see `candidates`.

A step is bound by reading and writing states: programs are small enough that there are many times more of them than
processors. Rows of a sequence come one chunk after the other: programs are as large as registers allow, unless there
would be too few of them to fill half of the GPU. Used by the scans; benchmarks/gpu_recurrent.py times the candidates.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tokenmill.kernels.triton.shared.launch import num_processors, power_of_two

_STEP_PROGRAMS = 16  # of a step, for each processor
_STATE_NUMBERS = 8192  # of a Mamba 2 state that a program has in registers
# Rows of a step up to which its scan computes the convolution as well: one launch less, but all programs of a head, or
# of a group of heads, compute the channels that they share.
_CONVOLVED_ROWS = 64


class Tiling(NamedTuple):
    block: int  # of a state: channels, rows or columns of a program
    chunk: int = 0  # rows at a time; 0: a step
    warps: int = 4
    stages: int = 1


def mamba(channels: int, step: bool) -> Tiling:
    if step:
        return Tiling(min(power_of_two(channels), 64))
    return Tiling(min(power_of_two(channels), 32), chunk=16)


def mamba2(dim: int, size: int, programs: int, step: bool, device: torch.device) -> Tiling:
    """`programs`: heads of all sequences; `dim` rows of a state, of `size` numbers."""
    if step:
        return Tiling(_divide(dim, size, programs, _STEP_PROGRAMS * num_processors(device)))
    block = _divide(dim, size, programs, num_processors(device) // 2)
    large = block * size > _STATE_NUMBERS // 2
    return Tiling(block, chunk=64, warps=8 if large else 4, stages=2)  # with 4 warps, large ones spill


def delta(value: int, step: bool) -> Tiling:
    """`value`: columns of a state. Chunks of 16, the fewest rows that tensor cores take: see delta.py."""
    return Tiling(min(power_of_two(value, 16), 32), chunk=0 if step else 16)


def convolves(rows: int) -> bool:
    """Whether the scan of a step of so many rows computes the convolution before it, if it may."""
    return rows <= _CONVOLVED_ROWS


def candidates(op: str, step: bool) -> list[Tiling]:
    """For tuning: all that may be worth a measurement."""
    if op == "delta_scan":
        chunk = 0 if step else 16
        return [Tiling(block, chunk, warps) for block in (16, 32, 64) for warps in (2, 4, 8)]
    if op == "mamba_scan" and step:
        return [Tiling(block, 0, warps) for block in (32, 64, 128) for warps in (2, 4, 8)]
    if op == "mamba_scan":
        return [Tiling(block, chunk, 4) for block in (8, 16, 32) for chunk in (8, 16, 32)]
    if step:
        return [Tiling(block, 0, warps) for block in (16, 32, 64) for warps in (2, 4, 8)]
    pairs = [(32, 4), (64, 4), (64, 8), (128, 8)]
    return [Tiling(block, *pair, stages) for block in (32, 64) for pair in pairs for stages in (1, 2)]


def _divide(dim: int, size: int, programs: int, wanted: int) -> int:
    """Rows of a state of a program: as many as registers allow, fewer where there would be too few programs."""
    block = min(power_of_two(dim, 16), 64, max(16, _STATE_NUMBERS // power_of_two(size, 16)))
    while block > 16 and programs * -(-dim // block) < wanted:
        block //= 2
    return block
