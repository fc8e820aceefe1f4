"""Latent attention on a GPU: rows stored and queries rotated in one launch, then attention over the rows.

The projections by head around it are batched products by cuBLAS. In the absorbed form, unless the caller names long
prompts: a step needs no more memory than its queries, and nothing depends on values on the device, so all of it can be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention import choose
from tokenmill.kernels.triton.attention.arguments import LOG2_E, Batch, Partials
from tokenmill.kernels.triton.attention.latent_expanded import Prompt, attend_expanded
from tokenmill.kernels.triton.attention.latent_kernel import (
    LatentGeometry,
    _attend_latent,
    _latent_inputs,
    _merge_latent,
)
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace

_BLOCK_HEADS = 16  # of a program that rotates queries
_FP8 = torch.float8_e4m3fn


def latent_inputs(
    q: Tensor,
    kv: Tensor,
    norm: Tensor,
    eps: float,
    pages: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    num_heads: int,
    scale: Tensor | None = None,
) -> Tensor:
    """Store the row of each token, normed and rotated; returns the rotated ends of the queries [T, heads * rope_dim].

    q [T, heads * (nope_dim + rope_dim)], kv [T, rank + rope_dim], both rows contiguous. `scale`: float32 [1] of FP8
    pages."""
    rank, rope_dim = norm.shape[0], 2 * cos.shape[1]
    tails = torch.empty(q.shape[0], num_heads * rope_dim, dtype=q.dtype, device=q.device)
    grid = (q.shape[0], 1 + triton.cdiv(num_heads, _BLOCK_HEADS))
    _latent_inputs[grid](
        q,
        kv,
        norm,
        tails,
        pages,
        positions,
        slots,
        cos,
        sin,
        scale,
        eps,
        q.stride(0),
        kv.stride(0),
        pages.stride(0),
        HEADS=num_heads,
        NOPE=q.shape[1] // num_heads - rope_dim,
        ROPE=rope_dim,
        HALF=power_of_two(rope_dim // 2),
        RANK=rank,
        PADDED_RANK=power_of_two(rank),
        PAGE=pages.shape[2],
        BLOCK=_BLOCK_HEADS,
        INTERLEAVED=interleaved,
        QUANTIZED=pages.dtype == _FP8,
        PDL=uses_pdl(q.device),
        **options(q.device, 4, 1),
    )
    return tails


def latent_paged_attention(
    q: Tensor,
    tails: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    max_query: int = 0,
    max_seq: int = 0,
    row_scale: Tensor | None = None,
    prompts: Sequence[Prompt] = (),
) -> Tensor:
    """As `latent_attention` of ref_latent.py: [T, heads * value_dim]. `tails`: what `latent_inputs` returned; `keys`
    [heads, nope_dim, rank] and `values` [heads, value_dim, rank]: of the type of q. `row_scale`: float32 [1] of FP8.
    `prompts`: all sequences of several tokens, if they are computed in the expanded form."""
    num_heads, nope_dim, _ = keys.shape
    out = torch.empty(q.shape[0], num_heads * values.shape[1], dtype=q.dtype, device=q.device)
    if prompts and len(prompts) == seq_lens.shape[0]:
        _expand(prompts, q, tails, keys, values, pages, block_table, scale, row_scale, out)
        return out
    heads = q.view(q.shape[0], num_heads, -1)[..., :nope_dim].transpose(0, 1)
    queries = torch.bmm(heads, keys)  # [heads, T, rank]
    attended = torch.empty_like(queries)
    call = _Call(queries, tails, attended, pages, Batch(block_table, query_starts, seq_lens), scale, row_scale)
    max_seq = max_seq or block_table.shape[1] * pages.shape[2]
    if q.shape[0] == seq_lens.shape[0] or max_query == 1:
        call.decode(max_seq, single_only=False)
    else:
        if not prompts:
            call.prefill()
        call.decode(max_seq, single_only=True)
    torch.bmm(attended, values.transpose(1, 2), out=out.view(q.shape[0], num_heads, -1).transpose(0, 1))
    _expand(prompts, q, tails, keys, values, pages, block_table, scale, row_scale, out)
    return out


def _expand(prompts: Sequence[Prompt], *arguments: Any) -> None:
    for prompt in prompts:
        attend_expanded(prompt, *arguments)


class _Call:
    """One attention over rows: queries and out [heads, T, rank]."""

    def __init__(
        self, queries: Tensor, tails: Tensor, out: Tensor, pages: Tensor, batch: Batch, scale: float, by: Tensor | None
    ) -> None:
        self.queries, self.tails, self.out, self.batch, self.scale, self.row_scale = (
            queries, tails, out, batch, scale, by,
        )  # fmt: skip
        self.fp8 = pages.dtype == _FP8
        self.pages = pages.view(torch.uint8) if self.fp8 else pages
        self.heads, self.tokens, self.rank = queries.shape
        self.sequences = batch.seq_lens.shape[0]
        self.device = queries.device
        if queries.dtype == torch.float32 or INTERPRETED:  # the interpreter cannot multiply bf16 tiles
            self.compute = tl.float32
        else:
            self.compute = tl.float16 if self.fp8 or pages.dtype == torch.float16 else tl.bfloat16

    def decode(self, max_keys: int, single_only: bool) -> None:
        tile, block_heads = choose.latent_decode_tile(self.heads)
        blocks = triton.cdiv(self.heads, block_heads)
        splits = choose.choose_key_splits(self.sequences * blocks, max_keys, tile.keys, self.device, 2)
        if single_only:
            splits = choose.splits_beside_prompts(splits, self.tokens, self.heads, self.rank)
        split = splits > 1 or single_only  # one kernel for all steps with prompts
        lines = splits * self.tokens * self.heads if split else 0
        buffer = workspace(self.device).partials(lines * (self.rank + 1))
        partials = Partials(buffer, buffer[lines * self.rank :])
        self._launch((self.sequences, blocks, splits), tile, block_heads, partials, False, single_only, split)
        if split:
            _merge_latent[(self.sequences, self.heads)](
                partials,
                self.out,
                self.batch.query_starts,
                self.tokens,
                splits,
                HEADS=self.heads,
                RANK=self.rank,
                PADDED_RANK=power_of_two(self.rank, 16),
                SINGLE_ONLY=single_only,
                PDL=uses_pdl(self.device),
                **options(self.device, 4, 1),
            )

    def prefill(self) -> None:
        tile, block_heads = choose.latent_prefill_tile(self.heads)
        blocks = self.tokens // (tile.rows // block_heads) + self.sequences
        grid = (blocks, triton.cdiv(self.heads, block_heads), 1)
        self._launch(grid, tile, block_heads, Partials(self.out, None), True, True, False)

    def _launch(
        self,
        grid: tuple[int, int, int],
        tile: choose.Tile,
        block_heads: int,
        partials: Partials,
        prefill: bool,
        single_only: bool,
        split: bool,
    ) -> None:
        rope_dim = self.tails.shape[1] // self.heads
        geometry = LatentGeometry(
            heads=self.heads,
            block_heads=block_heads,
            rank=self.rank,
            padded_rank=power_of_two(self.rank, 16),
            rope=rope_dim,
            padded_rope=power_of_two(rope_dim, 16),
            page_size=self.pages.shape[2],
            rows=tile.rows,
            keys=tile.keys,
            prefill=prefill,
            single_only=single_only,
            split=split,
            fp8=self.fp8,
            compute=self.compute,
            pdl=uses_pdl(self.device),
        )
        _attend_latent[grid](
            self.queries,
            self.tails,
            self.out,
            self.pages,
            self.row_scale,
            self.batch,
            partials,
            self.scale * LOG2_E,
            self.sequences,
            self.tokens,
            self.pages.stride(0),
            self.batch.block_table.stride(0),
            grid[2],
            GEOMETRY=geometry,
            **options(self.device, tile.warps, tile.stages),
        )
