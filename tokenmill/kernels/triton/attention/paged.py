"""Launching paged attention: which kernel mode for which rows, how many shares of the keys, where partial results lie.

Everything is decided from shapes and from the two upper bounds the caller gives, never from values on the device, so
that a launch can be captured and replayed with other lengths. `attention` is the op of kernels/ref.py;
`paged_attention` has the rest: FP8 pages with scales, a shared prefix, bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokenmill.kernels.triton.attention.paged_kernel import ATTEND_DECODE, ATTEND_PREFILL, ATTEND_SHARED, _attend
from tokenmill.kernels.triton.attention.paged_merge import _merge
from tokenmill.kernels.triton.attention.paged_widen import DistinctPages, widened_prefix
from tokenmill.kernels.triton.launch import INTERPRETED, early, num_processors, options, power_of_two, workspace
from tokenmill.kernels.triton.matmul.tuning import on_hopper

LOG2_E = 1.4426950408889634
MAX_SPLITS = 32
MAX_PARTIALS = 1 << 26  # float32 of partial results in a step with prompts


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Single-token sequences [first, past) begin with the same pages. `bounds` int32 [3] on the device: first, past and
    the number of tokens in common, a multiple of the page size (0: none, the launch is still right)."""

    bounds: Tensor
    max_tokens: int  # upper bound of bounds[2]: fixes the launch


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tile shape of a launch: rows, keys, warps, stages."""

    rows: int
    keys: int
    warps: int
    stages: int


def _decode_blocks(group: int, programs: int, device: torch.device, quantized: bool) -> Blocks:
    """Many programs: two warps each, several on a processor. Few: four warps, for the latency of one, which is longer
    where keys must be widened."""
    crowded = programs >= (4 if quantized else 2) * num_processors(device)
    return Blocks(power_of_two(group, 16), 64, 2 if crowded else 4, 4)


def _prefill_blocks(group: int, head_dim: int, element_size: int, wide: bool = False) -> Blocks:
    """`wide`: more rows for the keys that were read; not for FP8, whose time goes into widening them."""
    if element_size == 4:  # float32, for tests: small tiles, no tensor core
        return Blocks(power_of_two(group, 32), 32, 4, 1)
    if head_dim <= 128 and wide:
        return Blocks(power_of_two(group, 256), 64, 16, 2)
    if head_dim <= 128:
        return Blocks(power_of_two(group, 128), 128, 8, 3)
    return Blocks(power_of_two(group, 64), 32, 4, 2)


def choose_key_splits(programs: int, max_keys: int, keys: int, device: torch.device, per_processor: int = 4) -> int:
    """Shares of a sequence's keys: none where the programs fill the chip already, none below two tiles. A power of two:
    every other number would be one more kernel to compile."""
    wanted = per_processor * num_processors(device) // max(1, programs)
    shares = max(1, min(wanted, max_keys // (2 * keys), MAX_SPLITS))
    return 1 << (shares.bit_length() - 1)


def splits_beside_prompts(splits: int, tokens: int, heads: int, head_dim: int) -> int:
    """Fewer shares where single tokens go beside prompts: partial results have a line for every token of the step."""
    room = MAX_PARTIALS // (tokens * heads * (head_dim + 1))
    return max(1, min(splits, 1 << max(0, room.bit_length() - 1)))


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
) -> Tensor:
    """The op of ref.py: bounds from shapes alone."""
    return paged_attention(q, k_pages, v_pages, block_table, query_starts, seq_lens, scale, window, cap)


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
    shared: SharedPrefix | None = None,
    distinct: DistinctPages | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """q [T, heads * head_dim] over pages [pages, kv_heads, page_size, head_dim]; returns the same shape.

    `max_query`, `max_seq`: upper bounds of a sequence's tokens in this step and of its stored tokens (0: from shapes; a
    batch with as many tokens as sequences has one token each). `scales`: float32 [kv_heads] for FP8 keys and values.
    `distinct`: the pages of `block_table`, where prompts are so long that FP8 ones are better widened beforehand.
    """
    call = _Call(q, k_pages, v_pages, block_table, query_starts, seq_lens, scale, window, cap, scales, out)
    tokens, sequences = q.shape[0], seq_lens.shape[0]
    max_seq = max_seq or block_table.shape[1] * k_pages.shape[2]
    if window:
        max_seq = min(max_seq, window + 1)
    if tokens == sequences or max_query == 1:
        if shared is not None and shared.max_tokens > 0:
            assert window == 0, "a shared prefix cannot be read once for all where each token sees another window"
            call.cascade(shared, max_seq)
        else:
            call.decode(max_seq, single_only=False)
        return call.out
    assert shared is None, "a shared prefix is for steps in which every sequence has one token"
    call.prefill(distinct)
    call.decode(max_seq, single_only=True)
    return call.out


def replace_pages(call: _Call, k_pages: Tensor, v_pages: Tensor, table: Tensor) -> _Call:
    """The same call over other pages; a table of one row is every sequence's."""
    rows = table.expand(call.lengths.shape[0], -1)
    lengths = (call.starts, call.lengths, call.scale, call.window, call.cap)
    return _Call(call.q, k_pages, v_pages, rows, *lengths, call.scales, call.out)


class _Call:
    """One attention call: its tensors, and a launch per mode."""

    def __init__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        block_table: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int,
        cap: float,
        scales: tuple[Tensor, Tensor] | None,
        out: Tensor | None,
    ) -> None:
        _, self.kv_heads, self.page_size, self.head_dim = k_pages.shape
        self.q, self.k_pages, self.v_pages, self.table = q, k_pages, v_pages, block_table
        self.starts, self.lengths, self.scales = query_starts, seq_lens, scales
        self.scale, self.window, self.cap = scale, window, cap
        self.out = torch.empty_like(q) if out is None else out
        self.heads = q.shape[1] // self.head_dim
        self.group = self.heads // self.kv_heads
        self.device = q.device
        self.quantized = k_pages.element_size() == 1
        if q.dtype == torch.float32 or INTERPRETED:  # the interpreter cannot multiply bf16 tiles
            self.compute = tl.float32
        else:
            # e4m3 fits float16 exactly, two values per instruction.
            self.compute = tl.float16 if self.quantized or k_pages.dtype == torch.float16 else tl.bfloat16

    def decode(self, max_keys: int, single_only: bool) -> None:
        sequences = self.lengths.shape[0]
        programs = 0 if single_only else sequences * self.kv_heads
        blocks = _decode_blocks(self.group, programs, self.device, self.quantized)
        splits = choose_key_splits(sequences * self.kv_heads, max_keys, blocks.keys, self.device)
        if single_only:
            splits = splits_beside_prompts(splits, self.q.shape[0], self.heads, self.head_dim)
        grid = (sequences, self.kv_heads, splits)
        # One kernel for all steps with prompts, so that none of them waits for the compiler.
        split = splits > 1 or single_only
        self._launch(ATTEND_DECODE, grid, blocks, splits, slots=splits, single_only=single_only, split=split)

    def prefill(self, distinct: DistinctPages | None = None) -> None:
        if distinct is not None and self.quantized:
            k_pages, v_pages, _ = widened_prefix(
                self.k_pages, self.v_pages, distinct.pages, distinct.bounds, distinct.num_tokens
            )
            replace_pages(self, k_pages, v_pages, distinct.table).prefill()
            return
        if self._suits_hopper():
            self._launch_hopper(self.out)
            return
        blocks = _prefill_blocks(self.group, self.head_dim, self.q.element_size(), wide=not self.quantized)
        tokens = blocks.rows // self.group
        grid = (self.q.shape[0] // tokens + self.lengths.shape[0], self.kv_heads, 1)
        self._launch(ATTEND_PREFILL, grid, blocks, 1, slots=0, single_only=True)

    def cascade(self, shared: SharedPrefix, max_keys: int) -> None:
        """Common keys once for all sequences, own keys per sequence, then one merge."""
        sequences = self.lengths.shape[0]
        common = _prefill_blocks(self.group, self.head_dim, self.q.element_size())
        stacked = triton.cdiv(sequences, common.rows // self.group)
        common_splits = choose_key_splits(stacked * self.kv_heads, shared.max_tokens, common.keys, self.device, 1)
        own = _decode_blocks(self.group, sequences * self.kv_heads, self.device, self.quantized)
        own_splits = choose_key_splits(sequences * self.kv_heads, max_keys, own.keys, self.device)
        slots = common_splits + own_splits
        bounds = shared.bounds
        prefix = self
        if self.quantized:
            pages = widened_prefix(self.k_pages, self.v_pages, self.table, bounds, shared.max_tokens)
            prefix = replace_pages(self, *pages)
        partial, logs = self._partials(slots)
        if prefix._suits_hopper():
            prefix._launch_hopper(partial, (bounds, logs, common_splits))
        else:
            grid = (stacked, self.kv_heads, common_splits)
            prefix._launch(ATTEND_SHARED, grid, common, common_splits, slots, bounds=bounds)
        grid = (sequences, self.kv_heads, own_splits)
        self._launch(ATTEND_DECODE, grid, own, own_splits, slots, bounds=bounds, slot=common_splits)
        rows = 4
        _merge[(sequences, triton.cdiv(self.heads, rows))](
            partial,
            logs,
            self.out,
            bounds,
            self.q.shape[0],
            self.out.stride(0),
            common_splits,
            slots,
            HEADS=self.heads,
            HD=self.head_dim,
            HDF=power_of_two(self.head_dim, 16),
            BM=rows,
            PDL=early(self.device),
            **options(self.device, 4, 1),
        )

    def _partials(self, slots: int) -> tuple[Tensor, Tensor]:
        """float32 [slots, T, heads, head_dim] and the logarithms [slots, T, heads], in one buffer."""
        lines = slots * self.q.shape[0] * self.heads
        buffer = workspace(self.device).partials(lines * (self.head_dim + 1))
        return buffer, buffer[lines * self.head_dim :]

    def _suits_hopper(self) -> bool:
        """Whether many rows are better attended by paged_hopper.py."""
        if not on_hopper():
            return False
        from tokenmill.kernels.triton.attention.paged_hopper import suits  # only there is its language known

        return suits(self.q, self.k_pages, self.window, self.cap)

    def _launch_hopper(self, out: Tensor, shared: tuple[Tensor, Tensor, int] | None = None) -> None:
        from tokenmill.kernels.triton.attention.paged_hopper import attend_many

        lengths = (self.table, self.starts, self.lengths, self.scale * LOG2_E)
        attend_many(self.q, self.k_pages, self.v_pages, *lengths, self.scales, out, shared)

    def _launch(
        self,
        mode: tl.constexpr,
        grid: tuple[int, int, int],
        blocks: Blocks,
        splits: int,
        slots: int,
        bounds: Tensor | None = None,
        slot: int = 0,
        single_only: bool = False,
        split: bool = False,
    ) -> None:
        """`slots`: parts that the launch and those beside it write; `split`: this one writes parts and joins them."""
        partial, logs = self._partials(slots if split or bounds is not None else 0)
        scale = self.scale if self.cap else self.scale * LOG2_E
        k_scale, v_scale = self.scales or (None, None)
        k_pages, v_pages, pair = self.k_pages, self.v_pages, 1
        if self.quantized:
            k_pages, v_pages, pair = k_pages.view(torch.int16), v_pages.view(torch.int16), 2
        _attend[grid](
            self.q,
            k_pages,
            v_pages,
            self.out,
            partial,
            logs,
            workspace(self.device).counters(self.lengths.shape[0] * self.kv_heads),
            self.table,
            self.starts,
            self.lengths,
            bounds,
            k_scale,
            v_scale,
            scale,
            self.cap,
            self.lengths.shape[0],
            self.q.shape[0],
            self.q.stride(0),
            self.out.stride(0),
            self.table.stride(0),
            k_pages.stride(0),
            k_pages.stride(1),
            splits,
            slot,
            HEADS=self.heads,
            GROUP=self.group,
            GROUP_P=power_of_two(self.group),
            HD=self.head_dim,
            HDP=power_of_two(self.head_dim // pair, 16),
            HDF=power_of_two(self.head_dim, 16),
            PAGE=self.page_size,
            BM=blocks.rows,
            BN=blocks.keys,
            MODE=mode.value,
            SPLIT=split,
            CASCADE=bounds is not None and mode.value == ATTEND_DECODE.value,
            SINGLE_ONLY=single_only,
            WINDOW=self.window,
            CAP=self.cap > 0,
            QUANTIZED=self.quantized,
            COMPUTE=self.compute,
            PDL=early(self.device),
            INTERPRET=INTERPRETED,
            **options(self.device, blocks.warps, blocks.stages),
        )
