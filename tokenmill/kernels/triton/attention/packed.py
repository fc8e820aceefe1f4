"""Launching attention over quantized pages: decode with the keys shared out, prefill in blocks, both for mixed steps.

As in paged.py everything follows from shapes and the caller's two bounds, so that a launch can be captured. A prefix
that several sequences share is read by each of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.triton.attention.packed_kernel import _attend_packed
from tokenmill.kernels.triton.attention.paged import LOG2_E, Blocks, choose_key_splits, splits_beside_prompts
from tokenmill.kernels.triton.launch import INTERPRETED, early, num_processors, options, power_of_two, workspace


def packed_attention(
    q: Tensor,
    pages: PackedPages,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    *,
    max_query: int = 0,
    max_seq: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    """As `paged_attention`; q is what `rope_store_packed` returned: rotated where the rows are."""
    out = torch.empty_like(q) if out is None else out
    tokens, sequences, kv_heads = q.shape[0], seq_lens.shape[0], pages.k.shape[1]
    max_seq = max_seq or block_table.shape[1] * pages.page_size
    if window:
        max_seq = min(max_seq, window + 1)
    call = _Call(q, pages, block_table, query_starts, seq_lens, scale, window, cap, out)
    singles = tokens == sequences or max_query == 1
    if not singles:
        blocks = _prefill_blocks(call.group, pages.rows.head_dim)
        grid = (tokens // (blocks.rows // call.group) + sequences, kv_heads, 1)
        call.launch(grid, blocks, prefill=True)
    blocks = _decode_blocks(call.group, sequences * kv_heads, q.device)
    splits = choose_key_splits(sequences * kv_heads, max_seq, blocks.keys, q.device)
    if not singles:
        splits = splits_beside_prompts(splits, tokens, call.heads, pages.rows.head_dim)
    call.launch((sequences, kv_heads, splits), blocks, single_only=not singles)
    return out


def _decode_blocks(group: int, programs: int, device: torch.device) -> Blocks:
    crowded = programs >= 2 * num_processors(device)
    return Blocks(power_of_two(group, 16), 64, 2 if crowded else 4, 3)


def _prefill_blocks(group: int, head_dim: int) -> Blocks:
    if INTERPRETED:
        return Blocks(power_of_two(group, 32), 32, 4, 1)
    if head_dim <= 128:
        return Blocks(power_of_two(group, 128), 64, 8, 2)
    return Blocks(power_of_two(group, 64), 32, 4, 2)


class _Call:
    """One attention call: its tensors, and a launch per kind of rows."""

    def __init__(
        self,
        q: Tensor,
        pages: PackedPages,
        block_table: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int,
        cap: float,
        out: Tensor,
    ) -> None:
        self.q, self.pages, self.out = q, pages, out
        self.batch = (block_table, query_starts, seq_lens)
        self.scale, self.window, self.cap = scale, window, cap
        self.heads = q.shape[1] // pages.rows.head_dim
        self.group = self.heads // pages.k.shape[1]

    def launch(
        self, grid: tuple[int, int, int], blocks: Blocks, prefill: bool = False, single_only: bool = False
    ) -> None:
        pages, rows, device = self.pages, self.pages.rows, self.q.device
        table, starts, lengths = self.batch
        splits = grid[2]
        lines = splits * self.q.shape[0] * self.heads if splits > 1 else 0
        partials = workspace(device).partials(lines * (rows.head_dim + 1))
        k_numbers, v_numbers = pages.numbers
        k_pairs, v_pairs = pages.pairs
        width = power_of_two(rows.head_dim // 2, 16)
        group_rows = power_of_two(self.group, 16 if rows.turn is not None else 1)
        exact = self.q.dtype == torch.float32 or INTERPRETED  # the interpreter cannot multiply bf16 tiles
        _attend_packed[grid](
            self.q,
            k_pairs,
            k_numbers,
            v_pairs,
            v_numbers,
            rows.levels,
            rows.turn,
            self.out,
            partials,
            partials[lines * rows.head_dim :],
            workspace(device).counters(lengths.shape[0] * pages.k.shape[1]),
            table,
            starts,
            lengths,
            self.scale if self.cap else self.scale * LOG2_E,
            self.cap,
            lengths.shape[0],
            self.q.shape[0],
            self.q.stride(0),
            self.out.stride(0),
            table.stride(0),
            k_pairs.stride(0),
            k_pairs.stride(1),
            k_numbers.stride(0),
            k_numbers.stride(1),
            splits,
            HEADS=self.heads,
            GROUP=self.group,
            GROUP_P=group_rows,
            HD=rows.head_dim,
            HDF=2 * width,
            CBP=width,
            PAGE=pages.page_size,
            FIRST_NUMBER=pages.page_size * rows.code_bytes // rows.number_type.itemsize,
            BM=blocks.rows,
            BN=blocks.keys,
            PREFILL=prefill,
            SINGLE_ONLY=single_only,
            SPLIT=splits > 1,
            WINDOW=self.window,
            CAP=self.cap > 0,
            KIND=rows.kind,
            TURNED=rows.turn is not None,
            COMPUTE=tl.float32 if exact else tl.float16,  # codes fit it exactly, two values per instruction
            TURNING=tl.float32 if INTERPRETED else tl.float16,
            PDL=early(device),
            INTERPRET=INTERPRETED,
            **options(device, blocks.warps, blocks.stages),
        )
