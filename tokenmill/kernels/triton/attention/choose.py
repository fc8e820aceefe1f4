"""Which attention kernel attends to which rows, with which tiles, over how many key splits: the one place that decides.

Everything follows from shapes and from the caller's upper bounds, never from values on the device, so that a launch can
be captured and replayed with other lengths. Knows no tensor contents and launches nothing; dense.py and packed.py ask.

| rows of the step               | pages                | kernel                  | why                               |
|--------------------------------|----------------------|-------------------------|-----------------------------------|
| one token per sequence         | bf16, fp16, f32, fp8 | dense_kernel DECODE     | bound by reading keys: the group  |
|                                | packed               | packed_kernel           | is a tile of 16 rows, keys are    |
|                                |                      |                         | split until the GPU is full       |
| prompts (several tokens)       | 16b, `hopper_suits`  | hopper                  | 8,192 causal tokens of a layer of |
|                                |                      |                         | 8B: 989 us, dense_kernel 1,488    |
|                                | fp8, distinct pages  | fp8_widening, then as   | widening is most of a product's   |
|                                | given                | bf16                    | time; else repeated per row block |
|                                | others               | dense_kernel PREFILL    |                                   |
|                                | packed               | packed_kernel, prefill  |                                   |
| single tokens beside prompts   | all                  | as one token, fewer     | partial results have a line for   |
|                                |                      | splits                  | every token of the step           |
| latent rows                    | bf16, fp16, f32, fp8 | latent_kernel           | a row is key and value: read once |
| one token per sequence, common | 16b (fp8 widened)    | hopper or SHARED_PREFIX | common keys are read once for all |
| prefix                         |                      | + DECODE + merge        | sequences                         |
| the same, several prefixes     | bf16, fp16, f32, fp8 | SHARED_PREFIX + DECODE  | few rows each: bound by memory,   |
|                                |                      | + merge                 | so not widened beforehand         |

Tile shapes and limits were fitted on an H200 (`benchmarks/gpu_kernels.py attention`, `benchmarks/kv_attention.py`) with
the heads of Llama-3.1-8B.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenmill.kernels.triton.shared.launch import INTERPRETED, num_processors, on_hopper, power_of_two

MAX_SPLITS = 32
MAX_PARTIALS = 1 << 26  # float32 values of partial results in a step with prompts
_FEW = 32  # programs before keys are split: four sequences of eight KV heads
HOPPER_ROWS = 64  # (token, head) pairs of a group of warps in hopper.py: the tensor core's own size


@dataclass(frozen=True, slots=True)
class Tile:
    """Tile shape of a launch."""

    rows: int  # (token, head) pairs
    keys: int
    warps: int
    stages: int


def decode_tile(group: int, programs: int, device: torch.device, fp8: bool) -> Tile:
    """Two warps each, several programs on a processor. Four for the latency of few sequences, also of more
    with FP8, whose keys must be widened; four to seven of those wait for tile after tile: larger ones."""
    if fp8 and _FEW <= programs < 2 * _FEW:
        return Tile(power_of_two(group, 16), 128, 4, 3)
    crowded = programs >= (4 * num_processors(device) if fp8 else _FEW)
    return Tile(power_of_two(group, 16), 64, 2 if crowded else 4, 4)


def decode_splits(programs: int, max_keys: int, tile: Tile, device: torch.device, fp8: bool) -> int:
    """Splits of the keys of single tokens: FP8 keys arrive in half the time, so twice as many programs must ask."""
    many = fp8 and programs <= 2 * num_processors(device)
    return choose_key_splits(programs, max_keys, tile.keys, device, 8 if many else 4)


def prefill_tile(group: int, head_dim: int, element_size: int, wide: bool = False) -> Tile:
    """`wide`: more rows for the keys that were read; not for FP8, whose time goes into widening them."""
    if element_size == 4:  # float32, for tests: small tiles, no tensor core
        return Tile(power_of_two(group, 32), 32, 4, 1)
    if head_dim <= 128 and wide:
        return Tile(power_of_two(group, 256), 64, 16, 2)
    if head_dim <= 128:
        return Tile(power_of_two(group, 128), 128, 8, 3)
    return Tile(power_of_two(group, 64), 32, 4, 2)


def packed_decode_tile(group: int, programs: int, device: torch.device) -> Tile:
    crowded = programs >= 2 * num_processors(device)
    return Tile(power_of_two(group, 16), 64, 2 if crowded else 4, 3)


def packed_prefill_tile(group: int, head_dim: int) -> Tile:
    if INTERPRETED:
        return Tile(power_of_two(group, 32), 32, 4, 1)
    if head_dim <= 128:
        return Tile(power_of_two(group, 128), 64, 8, 2)
    return Tile(power_of_two(group, 64), 32, 4, 2)


def latent_decode_tile(heads: int) -> tuple[Tile, int]:
    """(tile, heads of a program): all heads read the same rows, so many of them share a read."""
    block = min(64, power_of_two(heads, 16))
    return Tile(block, 32, 4 if block <= 32 else 8, 2), block


def latent_prefill_tile(heads: int) -> tuple[Tile, int]:
    block = min(16, power_of_two(heads))
    return Tile(64, 32, 8, 2), block


def choose_key_splits(programs: int, max_keys: int, keys: int, device: torch.device, per_processor: int = 4) -> int:
    """Splits of a sequence's keys: none where the programs fill the GPU already, none below two tiles. A power of two:
    every other number would be one more kernel to compile."""
    wanted = per_processor * num_processors(device) // max(1, programs)
    splits = max(1, min(wanted, max_keys // (2 * keys), MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """How the keys of shared prefixes are attended to."""

    tile: Tile
    blocks: int  # of rows, all runs together
    splits: int  # of the keys


def plan_prefixes(
    prefixes: int,
    sequences: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    element_size: int,
    max_tokens: int,
    device: torch.device,
) -> PrefixPlan:
    """One prefix is read by many rows: tiles as of prompts. Many are read by few rows each and bound by memory: smaller
    tiles, and enough splits for runs of eight sequences to fill the GPU."""
    tile = prefill_tile(group, head_dim, element_size)
    if prefixes == 1:
        blocks = -(-sequences // (tile.rows // group))
        return PrefixPlan(tile, blocks, choose_key_splits(blocks * kv_heads, max_tokens, tile.keys, device, 1))
    if head_dim <= 128 and element_size < 4:
        tile = Tile(power_of_two(group, 64), 64, 4, 3)
    blocks = sequences // (tile.rows // group) + min(prefixes, sequences // 2)
    filled = -(-sequences // 8) * kv_heads
    return PrefixPlan(tile, blocks, choose_key_splits(filled, max_tokens, tile.keys, device))


def splits_beside_prompts(splits: int, tokens: int, heads: int, head_dim: int) -> int:
    """Fewer splits for single tokens beside prompts: partial results have a line for every token of the step."""
    room = MAX_PARTIALS // (tokens * heads * (head_dim + 1))
    return max(1, min(splits, 1 << max(0, room.bit_length() - 1)))


def hopper_suits(q: Tensor, k_pages: Tensor, window: int, cap: float) -> bool:
    """Whether hopper.py attends to many rows here: queries and pages of one 16-bit type, heads of 64 or 128, no
    window, no cap, on that generation."""
    if not on_hopper():
        return False
    kv_heads, page_size, head_dim = k_pages.shape[1:]
    group = q.shape[1] // head_dim // kv_heads
    regular = head_dim in (64, 128) and page_size in (16, 32, 64, 128) and group <= HOPPER_ROWS
    return regular and not window and not cap and q.dtype == k_pages.dtype and q.element_size() == 2
