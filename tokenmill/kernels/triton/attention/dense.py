"""Attention over bf16, float16, float32 and FP8 pages: one call becomes one to four launches.

`attention` is the op of kernels/ref.py; `paged_attention` has the rest: FP8 scales, a shared prefix, upper bounds.
choose.py decides kernels, tiles and splits; this file owns the argument bundles and where partial results lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention import choose
from tokenmill.kernels.triton.attention.arguments import LOG2_E, Batch, Partials, make_geometry
from tokenmill.kernels.triton.attention.choose import Tile
from tokenmill.kernels.triton.attention.dense_kernel import DECODE, PREFILL, SHARED_PREFIX, Pages, Variant, _attend
from tokenmill.kernels.triton.attention.fp8_widening import DistinctPages, widened_prefix
from tokenmill.kernels.triton.attention.online_softmax import _merge_prefix
from tokenmill.kernels.triton.shared.launch import INTERPRETED, options, power_of_two, uses_pdl, workspace

MERGE_ROWS = 4  # heads that a program of the prefix merge takes


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Runs of single-token sequences, each of which begins with the same pages. On the device, int32: `runs` [N, 3] the
    first sequence of each, the one past its last, and the number of tokens in common, a multiple of the page size (in
    order; 0, or a first beyond all sequences: no run, the launch is still right); `tokens` [S] that number by sequence.
    One run has kernels for many sequences; more than one are a power of two."""

    runs: Tensor
    tokens: Tensor
    max_tokens: int  # upper bound of a prefix: fixes the launch


def attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    cap: float,
    chunk: int = 0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The op of ref.py: bounds from shapes alone."""
    assert chunk == 0, "chunked attention has no kernel"
    lengths = (block_table, query_starts, seq_lens)
    return paged_attention(q, k_pages, v_pages, *lengths, scale, window, cap, sinks=sinks)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    query_starts: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    *,
    max_query: int = 0,
    max_seq: int = 0,
    scales: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    shared: SharedPrefixes | None = None,
    distinct: DistinctPages | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, heads * head_dim] over pages [pages, kv_heads, page_size, head_dim]; returns the same shape.

    `max_query`, `max_seq`: upper bounds of a sequence's tokens in this step and of its stored tokens (0: from shapes; a
    batch with as many tokens as sequences has one token each). `scales`: float32 [kv_heads] for FP8 keys and values.
    `sinks`: float32 [heads], logits that join the softmax and carry no value.
    `distinct`: the pages of `block_table`, where prompts are so long that FP8 ones are better widened beforehand.
    """
    out = torch.empty_like(q) if out is None else out
    batch = Batch(block_table, query_starts, seq_lens)
    call = _Call(q, k_pages, v_pages, batch, scale, window, cap, scales, sinks, out)
    tokens, sequences = q.shape[0], seq_lens.shape[0]
    max_seq = max_seq or block_table.shape[1] * k_pages.shape[2]
    if window:
        max_seq = min(max_seq, window + 1)
    if tokens == sequences or max_query == 1:
        if shared is not None and shared.max_tokens > 0:
            assert window == 0, "a shared prefix cannot be read once for all where each token sees another window"
            call.decode_after_prefix(shared, max_seq)
        else:
            call.decode(max_seq, single_only=False)
        return out
    assert shared is None, "a shared prefix is for steps in which every sequence has one token"
    call.prefill(distinct)
    call.decode(max_seq, single_only=True)
    return out


class _Call:
    """One attention call: its tensors, and a method per kind of launch."""

    def __init__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        batch: Batch,
        scale: float,
        window: int,
        cap: float,
        scales: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        _, self.kv_heads, self.page_size, self.head_dim = k_pages.shape
        self.q, self.k_pages, self.v_pages, self.batch, self.out = q, k_pages, v_pages, batch, out
        self.scale, self.window, self.cap, self.scales, self.sinks = scale, window, cap, scales, sinks
        self.heads = q.shape[1] // self.head_dim
        self.group = self.heads // self.kv_heads
        self.sequences = batch.seq_lens.shape[0]
        self.device = q.device
        self.fp8 = k_pages.element_size() == 1
        self.widened = torch.float16 if q.dtype == torch.float16 else torch.bfloat16  # what FP8 pages are copied to
        if q.dtype == torch.float32 or INTERPRETED:  # the interpreter cannot multiply bf16 tiles
            self.compute = tl.float32
        else:
            # e4m3 fits float16 exactly, two values per instruction.
            self.compute = tl.float16 if self.fp8 or k_pages.dtype == torch.float16 else tl.bfloat16

    def with_pages(self, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> _Call:
        """The same call over other pages; a table of one row is every sequence's."""
        batch = self.batch._replace(block_table=table.expand(self.sequences, -1))
        settings = (self.scale, self.window, self.cap, self.scales, self.sinks)
        return _Call(self.q, k_pages, v_pages, batch, *settings, self.out)

    def decode(self, max_keys: int, single_only: bool) -> None:
        programs = 0 if single_only else self.sequences * self.kv_heads
        tile = choose.decode_tile(self.group, programs, self.device, self.fp8)
        splits = choose.decode_splits(self.sequences * self.kv_heads, max_keys, tile, self.device, self.fp8)
        if single_only:
            splits = choose.splits_beside_prompts(splits, self.q.shape[0], self.heads, self.head_dim)
        grid = (self.sequences, self.kv_heads, splits)
        # One kernel for all steps with prompts, so that none of them waits for the compiler.
        split = splits > 1 or single_only
        self._launch(DECODE, grid, tile, self._partials(splits if split else 0), single_only=single_only, split=split)

    def prefill(self, distinct: DistinctPages | None = None) -> None:
        if distinct is not None and self.fp8:
            k_pages, v_pages, _ = widened_prefix(
                self.k_pages, self.v_pages, distinct.pages, distinct.bounds, distinct.num_tokens, self.widened
            )
            self.with_pages(k_pages, v_pages, distinct.table).prefill()
            return
        if choose.hopper_suits(self.q, self.k_pages, self.window, self.cap):
            self._launch_hopper(Partials(self.out, None), None, 1)
            return
        tile = choose.prefill_tile(self.group, self.head_dim, self.q.element_size(), wide=not self.fp8)
        blocks = self.q.shape[0] // (tile.rows // self.group) + self.sequences
        self._launch(PREFILL, (blocks, self.kv_heads, 1), tile, self._partials(0), single_only=True)

    def decode_after_prefix(self, shared: SharedPrefixes, max_keys: int) -> None:
        """Common keys once for the sequences of a run, own keys per sequence, then one merge."""
        own = choose.decode_tile(self.group, self.sequences * self.kv_heads, self.device, self.fp8)
        own_splits = choose.choose_key_splits(self.sequences * self.kv_heads, max_keys, own.keys, self.device)
        common = self._common_plan(shared)
        slots = common.splits + own_splits
        partials = self._partials(slots)
        if shared.runs.shape[0] == 1:
            self._attend_one_prefix(shared, common, partials)
        else:
            grid = (common.blocks, self.kv_heads, common.splits)
            self._launch(SHARED_PREFIX, grid, common.tile, partials, shared.runs, prefixes=shared.runs.shape[0])
        grid = (self.sequences, self.kv_heads, own_splits)
        self._launch(DECODE, grid, own, partials, shared.tokens, first_slot=common.splits)
        _merge_prefix[(self.sequences, triton.cdiv(self.heads, MERGE_ROWS))](
            partials,
            self.out,
            shared.tokens,
            self.q.shape[0],
            self.out.stride(0),
            common.splits,
            slots,
            HEADS=self.heads,
            HEAD_DIM=self.head_dim,
            PADDED_DIM=power_of_two(self.head_dim, 16),
            ROWS=MERGE_ROWS,
            PDL=uses_pdl(self.device),
            **options(self.device, 4, 1),
        )

    def _common_plan(self, shared: SharedPrefixes) -> choose.PrefixPlan:
        heads = (self.group, self.kv_heads, self.head_dim)
        sizes = (self.q.element_size(), shared.max_tokens, self.device)
        return choose.plan_prefixes(shared.runs.shape[0], self.sequences, *heads, *sizes)

    def _attend_one_prefix(self, shared: SharedPrefixes, plan: choose.PrefixPlan, partials: Partials) -> None:
        """FP8 pages are widened first: many blocks of rows read them."""
        bounds, prefix = shared.runs[0], self
        if self.fp8:
            pages = (self.k_pages, self.v_pages, self.batch.block_table)
            prefix = self.with_pages(*widened_prefix(*pages, bounds, shared.max_tokens, self.widened))
        if choose.hopper_suits(prefix.q, prefix.k_pages, self.window, self.cap):
            prefix._launch_hopper(partials, bounds, plan.splits)
        else:
            prefix._launch(SHARED_PREFIX, (plan.blocks, self.kv_heads, plan.splits), plan.tile, partials, bounds)

    def _partials(self, slots: int) -> Partials:
        """Room for `slots` partial results, values and logarithms in one buffer."""
        lines = slots * self.q.shape[0] * self.heads
        scratch = workspace(self.device)
        buffer = scratch.partials(lines * (self.head_dim + 1))
        return Partials(buffer, buffer[lines * self.head_dim :], scratch.counters(self.sequences * self.kv_heads))

    def _launch_hopper(self, result: Partials, bounds: Tensor | None, splits: int) -> None:
        from tokenmill.kernels.triton.attention.hopper import attend_many_rows  # imports Gluon

        pages = (self.k_pages, self.v_pages)
        sinks = self.sinks if bounds is None else None  # beside a shared prefix they join the own keys
        scale = self.scale * LOG2_E
        attend_many_rows(self.q, pages, self.batch, scale, self.scales, sinks, result, bounds, splits)

    def _launch(
        self,
        mode: tl.constexpr,
        grid: tuple[int, int, int],
        tile: Tile,
        partials: Partials,
        bounds: Tensor | None = None,
        first_slot: int = 0,
        single_only: bool = False,
        split: bool = False,
        prefixes: int = 1,
    ) -> None:
        """`split`: this launch writes partial results and merges them itself."""
        k_pages, v_pages, per_element = self.k_pages, self.v_pages, 1
        if self.fp8:
            k_pages, v_pages, per_element = k_pages.view(torch.int16), v_pages.view(torch.int16), 2
        k_scale, v_scale = self.scales or (None, None)
        variant = Variant(
            mode=mode.value,
            rows=tile.rows,
            keys=tile.keys,
            split=split,
            after_prefix=bounds is not None and mode.value == DECODE.value,
            single_only=single_only,
            window=self.window,
            capped=self.cap > 0,
            fp8=self.fp8,
            compute=self.compute,
            pdl=uses_pdl(self.device),
            interpreted=INTERPRETED,
            prefixes=prefixes,
        )
        _attend[grid](
            self.q,
            self.out,
            Pages(k_pages, v_pages, k_scale, v_scale, k_pages.stride(0), k_pages.stride(1)),
            self.batch,
            partials,
            bounds,
            self.sinks,
            self.scale if self.cap else self.scale * LOG2_E,
            self.cap,
            self.sequences,
            self.q.shape[0],
            self.q.stride(0),
            self.out.stride(0),
            self.batch.block_table.stride(0),
            grid[2],
            first_slot,
            GEOMETRY=make_geometry(self.heads, self.kv_heads, self.head_dim, self.page_size, per_element),
            VARIANT=variant,
            **options(self.device, tile.warps, tile.stages),
        )
