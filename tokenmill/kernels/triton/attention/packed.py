"""Attention over quantized pages: decode with the keys split, prefill in blocks of rows, both launches for mixed steps.

As in dense.py everything follows from shapes and the caller's two bounds, so that a launch can be captured; choose.py
decides tiles and splits. A prefix that several sequences share is read by each of them.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.triton.attention import choose
from tokenmill.kernels.triton.attention.arguments import LOG2_E, Batch, Geometry, Partials
from tokenmill.kernels.triton.attention.choose import Tile
from tokenmill.kernels.triton.attention.packed_kernel import Pages, Variant, _attend_packed
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace


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
    call = _Call(q, pages, Batch(block_table, query_starts, seq_lens), scale, window, cap, out)
    group, head_dim = call.geometry.group, call.geometry.head_dim
    singles = tokens == sequences or max_query == 1
    if not singles:
        tile = choose.packed_prefill_tile(group, head_dim)
        call.launch((tokens // (tile.rows // group) + sequences, kv_heads, 1), tile, prefill=True)
    tile = choose.packed_decode_tile(group, sequences * kv_heads, q.device)
    splits = choose.choose_key_splits(sequences * kv_heads, max_seq, tile.keys, q.device)
    if not singles:
        splits = choose.splits_beside_prompts(splits, tokens, call.geometry.heads, head_dim)
    call.launch((sequences, kv_heads, splits), tile, single_only=not singles)
    return out


def _geometry(q: Tensor, pages: PackedPages) -> Geometry:
    head_dim, rotated = pages.rows.head_dim, pages.rows.turn is not None
    heads = q.shape[1] // head_dim
    group, codes = heads // pages.k.shape[1], pages.rows.codes_per_element
    elements = head_dim // codes
    width = power_of_two(elements, 16)
    # Rotating back is a product of the tensor core, which wants 16 rows or more.
    padded_group = power_of_two(group, 16 if rotated else 1)
    return Geometry(heads, group, padded_group, head_dim, codes * width, elements, width, pages.page_size)


class _Call:
    """One attention call: its tensors, and a launch per kind of rows."""

    def __init__(
        self, q: Tensor, pages: PackedPages, batch: Batch, scale: float, window: int, cap: float, out: Tensor
    ) -> None:
        self.q, self.pages, self.batch, self.out = q, pages, batch, out
        self.scale, self.window, self.cap = scale, window, cap
        self.geometry = _geometry(q, pages)

    def launch(self, grid: tuple[int, int, int], tile: Tile, prefill: bool = False, single_only: bool = False) -> None:
        rows, device, splits = self.pages.rows, self.q.device, grid[2]
        sequences, tokens = self.batch.seq_lens.shape[0], self.q.shape[0]
        (k_codes, v_codes), (k_numbers, v_numbers) = self.pages.elements, self.pages.numbers
        strides = (k_codes.stride(0), k_codes.stride(1), k_numbers.stride(0), k_numbers.stride(1))
        exact = self.q.dtype == torch.float32 or INTERPRETED  # the interpreter cannot multiply bf16 tiles
        variant = Variant(
            prefill=prefill,
            single_only=single_only,
            split=splits > 1,
            rows=tile.rows,
            keys=tile.keys,
            window=self.window,
            capped=self.cap > 0,
            kind=rows.kind,
            rotated=rows.turn is not None,
            first_number=self.pages.page_size * rows.code_bytes // rows.number_type.itemsize,
            compute=tl.float32 if exact else tl.float16,  # codes fit it exactly, two values per instruction
            rotation_dtype=tl.float32 if INTERPRETED else tl.float16,
            pdl=uses_pdl(device),
            interpreted=INTERPRETED,
        )
        _attend_packed[grid](
            self.q,
            self.out,
            Pages(k_codes, k_numbers, v_codes, v_numbers, rows.levels, rows.turn, *strides),
            self.batch,
            self._partials(splits),
            self.scale if self.cap else self.scale * LOG2_E,
            self.cap,
            sequences,
            tokens,
            self.q.stride(0),
            self.out.stride(0),
            self.batch.block_table.stride(0),
            splits,
            GEOMETRY=self.geometry,
            VARIANT=variant,
            **options(device, tile.warps, tile.stages),
        )

    def _partials(self, splits: int) -> Partials:
        lines = splits * self.q.shape[0] * self.geometry.heads if splits > 1 else 0
        scratch, head_dim = workspace(self.q.device), self.geometry.head_dim
        buffer = scratch.partials(lines * (head_dim + 1))
        counters = scratch.counters(self.batch.seq_lens.shape[0] * self.pages.k.shape[1])
        return Partials(buffer, buffer[lines * head_dim :], counters)
