"""FP8 pages that many rows read, in bf16, once per step and layer: those of a shared prefix, or all that prompts need.

Widening is most of the time of a product with FP8 keys; done in the attention kernel it is repeated for every block of
rows. The copy has the layout of pages, in order, so that attention reads it through a table that counts up, or through
one that was rewritten (`DistinctPages`). Called by paged.py before the launch over these keys.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention.paged_kernel import widen_pairs
from tokenmill.kernels.triton.launch import INTERPRETED, begin, early, options, power_of_two, workspace

_ROWS = 64  # tokens of a program


@dataclass(frozen=True, slots=True)
class DistinctPages:
    """The pages in the tables of a step's prompts, each once."""

    pages: Tensor  # int32 [1, P]
    bounds: Tensor  # int32 [3]: 0, 1, the tokens of all pages
    table: Tensor  # int32 [S, max_pages]: places in `pages`
    num_tokens: int


def distinct_pages(table: Tensor, query_starts: Tensor, page_size: int) -> DistinctPages:
    """Reads table and starts back to the host: for steps with prompts, once. Single tokens read their own pages."""
    own = table.cpu().numpy()
    prompts = np.diff(query_starts.cpu().numpy()) > 1
    pages, found = np.unique(own[prompts], return_inverse=True)
    tokens, places = len(pages) * page_size, np.zeros(own.shape, dtype=np.int32)
    places[prompts] = found.reshape(-1, own.shape[1])

    def device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(table.device)

    listed = device(np.maximum(pages, 0)[None])  # -1 is padding
    return DistinctPages(listed, device(np.array([0, 1, tokens])), device(places), tokens)


@triton.jit(do_not_specialize=["table_stride"])
def _widen(
    k_pages,
    v_pages,
    k_out,
    v_out,
    block_table,
    shared,
    table_stride,
    page_stride,
    head_stride,
    out_stride,
    out_head_stride,
    PAIRS: tl.constexpr,
    PAIRS_P: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """ROWS tokens of one KV head: int16 pairs of e4m3 -> bf16, exactly; the head's scale stays outside."""
    begin(PDL)
    first, head = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    past = tl.load(shared + 2)
    if first >= past:
        return
    tokens = first + tl.arange(0, ROWS)
    table = block_table + tl.load(shared).to(tl.int64) * table_stride
    pages = tl.load(table + tokens // PAGE, mask=tokens < past, other=0).to(tl.int64)
    dims, both = tl.arange(0, PAIRS_P), tl.arange(0, 2 * PAIRS_P)
    source = (pages * page_stride + head * head_stride + (tokens % PAGE) * PAIRS)[:, None] + dims[None, :]
    ok = (tokens < past)[:, None] & (dims < PAIRS)[None, :]
    k_low, k_high = widen_pairs(tl.load(k_pages + source, mask=ok, other=0), INTERPRET)
    v_low, v_high = widen_pairs(tl.load(v_pages + source, mask=ok, other=0), INTERPRET)
    place = (tokens // PAGE).to(tl.int64) * out_stride + head * out_head_stride + (tokens % PAGE) * (2 * PAIRS)
    target = place[:, None] + both[None, :]
    whole = (tokens < past)[:, None] & (both < 2 * PAIRS)[None, :]
    keys = tl.interleave(k_low.to(tl.float32), k_high.to(tl.float32)) * 256.0
    values = tl.interleave(v_low.to(tl.float32), v_high.to(tl.float32)) * 256.0
    tl.store(k_out + target, keys.to(k_out.dtype.element_ty), mask=whole)
    tl.store(v_out + target, values.to(v_out.dtype.element_ty), mask=whole)


@cache
def counting_table(pages: int, device: torch.device) -> Tensor:
    return torch.arange(pages, dtype=torch.int32, device=device)[None]


def widened_prefix(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, bounds: Tensor, max_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The first bounds[2] tokens of sequence bounds[0]: keys and values bf16 [pages, kv_heads, page_size, head_dim],
    unscaled, in scratch memory that the next call overwrites, and the table [1, pages] of its pages."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    pages, device = triton.cdiv(max_tokens, page_size), k_pages.device
    shape = (2, pages, kv_heads, page_size, head_dim)
    size = torch.Size(shape).numel()
    k_out, v_out = workspace(device).widened(size)[:size].view(shape)
    _widen[(triton.cdiv(max_tokens, _ROWS), kv_heads)](
        k_pages.view(torch.int16),
        v_pages.view(torch.int16),
        k_out,
        v_out,
        table,
        bounds,
        table.stride(0),
        k_pages.stride(0) // 2,
        k_pages.stride(1) // 2,
        k_out.stride(0),
        k_out.stride(1),
        PAIRS=head_dim // 2,
        PAIRS_P=power_of_two(head_dim // 2),
        PAGE=page_size,
        ROWS=_ROWS,
        PDL=early(device),
        INTERPRET=INTERPRETED,
        **options(device, 4, 1),
    )
    return k_out, v_out, counting_table(pages, device)
