"""FP8 values as 16-bit floats: pair by pair inside a kernel, or whole pages once per step and layer.

Pages that many rows read (a shared prefix, or all that prompts need) are copied to 16 bits beforehand: widening is most
of the time of a product with FP8 keys, and inside the attention kernel it is repeated for every block of rows. The copy
has the layout of pages, in order, so that attention reads it through a table that counts up, or through a rewritten one
(`DistinctPages`). Called by dense.py before the launch over these keys.
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

from tokenmill.kernels.triton.shared.device import dependent_launch
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace

_ROWS = 64  # tokens of a program


@dataclass(frozen=True, slots=True)
class DistinctPages:
    """The pages in the tables of a step's prompts, each once."""

    pages: Tensor  # int32 [1, P]
    bounds: Tensor  # int32 [3]: 0, 1, the tokens of all pages
    table: Tensor  # int32 [S, max_pages]: places in `pages`
    num_tokens: int


def distinct_pages(table: Tensor, query_starts: Tensor, page_size: int) -> DistinctPages:
    """Copies table and starts to the host, so for steps with prompts, once. Single tokens read their own pages."""
    own = table.cpu().numpy()
    is_prompt = np.diff(query_starts.cpu().numpy()) > 1
    pages, found = np.unique(own[is_prompt], return_inverse=True)
    tokens, places = len(pages) * page_size, np.zeros(own.shape, dtype=np.int32)
    places[is_prompt] = found.reshape(-1, own.shape[1])

    def on_device(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values.astype(np.int32)).to(table.device)

    listed = on_device(np.maximum(pages, 0)[None])  # -1 is padding
    return DistinctPages(listed, on_device(np.array([0, 1, tokens])), on_device(places), tokens)


@triton.jit
def widen_pairs(pairs, INTERPRET: tl.constexpr):
    """int16, each two e4m3 bytes -> (low, high) as float16 / 256: the bits fit one place further right, exactly."""
    if INTERPRET:
        low = ((pairs << 8) & -32768) | ((pairs & 127) << 7)
        high = (pairs & -32768) | ((pairs >> 1) & 0x3F80)
        return low.to(tl.float16, bitcast=True).to(tl.float32), high.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            shl.b32 a, $2, 8;
            and.b32 b, a, 0x80008000;
            shr.u32 a, a, 1;
            lop3.b32 $0, a, 0x3f803f80, b, 0xea;
            and.b32 b, $2, 0x80008000;
            shr.u32 a, $2, 1;
            lop3.b32 $1, a, 0x3f803f80, b, 0xea;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )


@triton.jit(do_not_specialize=["table_stride"])
def _widen(
    k_pages,
    v_pages,
    k_out,
    v_out,
    block_table,
    prefix,
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
    """ROWS tokens of one KV head: int16 pairs of e4m3 -> bf16 or float16, exactly; the head's scale stays outside."""
    dependent_launch(PDL)
    first, head = tl.program_id(0) * ROWS, tl.program_id(1).to(tl.int64)
    past = tl.load(prefix + 2)
    if first >= past:
        return
    tokens = first + tl.arange(0, ROWS)
    table = block_table + tl.load(prefix).to(tl.int64) * table_stride
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
def identity_table(pages: int, device: torch.device) -> Tensor:
    return torch.arange(pages, dtype=torch.int32, device=device)[None]


def widened_prefix(
    k_pages: Tensor, v_pages: Tensor, table: Tensor, bounds: Tensor, max_tokens: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The first bounds[2] tokens of sequence bounds[0]: keys and values [pages, kv_heads, page_size, head_dim] in
    `dtype`, of 16 bits, without the head's scale, in scratch memory that the next call overwrites; and the page table
    [1, pages] of it."""
    _, kv_heads, page_size, head_dim = k_pages.shape
    pages, device = triton.cdiv(max_tokens, page_size), k_pages.device
    shape = (2, pages, kv_heads, page_size, head_dim)
    size = torch.Size(shape).numel()
    k_out, v_out = workspace(device).widened(size)[:size].view(dtype).view(shape)
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
        PDL=uses_pdl(device),
        INTERPRET=INTERPRETED,
        **options(device, 4, 1),
    )
    return k_out, v_out, identity_table(pages, device)
