"""KIVI: keys in 2 or 4 bits per channel over groups of 32 tokens, values per token over groups of 32 channels.

The last 128 tokens of a sequence, and the rest of their pages, are in half precision: a page that is written gets a
buffer for recent pages and is quantized once the sequence has moved on (`prepare`). Pages hold a multiple of 32 tokens.
torch expands the pages before attention. Sequences and their ends are not known here: if no buffer is free, the least
recently used page is quantized early.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import gcd

import torch
from torch import Tensor

from tokenmill.hardware.kv_layout import KVLayout
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.kvstore.grouped_codes import (
    decode_over_channels,
    decode_over_rows,
    encode_over_channels,
    encode_over_rows,
)
from tokenmill.types import Batch

GROUP = 32  # tokens of a channel, channels of a token
RECENT = 128  # tokens in half precision
_SIDES = (0, 1)  # keys, values


class _KiviStore(KVStore):
    is_coded = True
    page_multiple = GROUP
    bits: int

    def __init__(
        self, layout: KVLayout, num_pages: int, device: torch.device, kernels: str = "", sequences: int = 1
    ) -> None:
        super().__init__(layout, num_pages, device, kernels, sequences)
        slots, heads, size, dim = layout.layers_per_page, layout.num_kv_heads, layout.page_size, layout.head_dim
        rows, runs = size // GROUP, dim // gcd(GROUP, dim)
        self._codes = [
            torch.empty(slots, num_pages, heads, size, dim * self.bits // 8, dtype=torch.uint8, device=device)
            for _ in _SIDES
        ]
        # Step and minimum: of keys per (group of tokens, channel), of values per (token, run of channels).
        shapes = ((rows, 2, dim), (size, runs, 2))
        self._numbers = [
            torch.empty(slots, num_pages, heads, *shape, dtype=torch.float16, device=device) for shape in shapes
        ]
        num_buffers = self._num_buffers(layout, sequences)
        self._recent = [
            torch.empty(slots, num_buffers, heads, size, dim, dtype=torch.float16, device=device) for _ in _SIDES
        ]
        self._buffer_of: OrderedDict[int, int] = OrderedDict()  # page -> buffer in `_recent`, least recently used first
        self._buffers = torch.full((num_pages,), -1, device=device)  # the same as a tensor
        self._free = list(range(num_buffers))
        self._leaving: list[int] = []  # pages that are recent for this step only
        self._filled = torch.zeros(slots, num_pages, dtype=torch.int64, device=device)  # rows written so far

    @staticmethod
    def _num_buffers(layout: KVLayout, sequences: int) -> int:
        """Recent pages of every sequence and group: those of the last 128 tokens, one that begins before them, one that
        leaves them."""
        return sequences * len(layout.groups) * (RECENT // layout.page_size + 3)

    @classmethod
    def page_bytes(cls, layout: KVLayout) -> int:
        size, dim = layout.page_size, layout.head_dim
        keys = size * dim * cls.bits // 8 + size // GROUP * dim * 4
        values = size * (dim * cls.bits // 8 + dim // gcd(GROUP, dim) * 4)
        return layout.layers_per_page * layout.num_kv_heads * (keys + values)

    @classmethod
    def fixed_bytes(cls, layout: KVLayout, sequences: int) -> int:
        return cls._num_buffers(layout, sequences) * layout.values_per_page * 2

    def prepare(self, batch: Batch) -> None:
        """Give buffers to pages that this step writes and that stay recent; quantize those that no longer are."""
        self._quantize_pages([page for page in self._leaving if page in self._buffer_of])
        self._leaving = []
        size = self.layout.page_size
        lengths, starts = batch.seq_lens.tolist(), batch.query_starts.tolist()
        recent: dict[int, None] = {}
        passed: dict[int, None] = {}
        for table in batch.block_tables:
            for row, length, begin, end in zip(table.tolist(), lengths, starts, starts[1:], strict=False):
                before = length - (end - begin)
                first, last = max(0, length - RECENT) // size, (length - 1) // size
                recent |= dict.fromkeys(row[first : last + 1])
                passed |= dict.fromkeys(row[max(0, before - RECENT) // size : first])
        written = {int(slot) // size for slots in batch.slots for slot in slots.tolist()}
        for page in recent:
            if page >= 0 and (page in written or page in self._buffer_of):
                self._take_buffer(page)
        leaving = [page for page in passed if page in self._buffer_of and page not in recent]
        self._leaving = [page for page in leaving if page in written]  # its last rows come in this step
        self._quantize_pages([page for page in leaving if page not in written])

    def write(self, slot: int, token_slots: Tensor, k: Tensor, v: Tensor) -> None:
        size = self.layout.page_size
        page, offset = token_slots // size, token_slots % size
        buffer = self._buffers[page]
        recent = buffer >= 0
        for side, rows in zip(_SIDES, (k, v), strict=True):
            heads = rows.half().view(rows.shape[0], self.layout.num_kv_heads, -1)
            self._recent[side][slot, buffer[recent], :, offset[recent]] = heads[recent]
            # Rounded to half precision too, so that codes do not depend on how tokens fall into steps
            if not bool(recent.all()):
                self._write_coded(slot, side, page[~recent], offset[~recent], heads[~recent].float())
        begun = page[offset == 0]
        self._filled[slot, begun] = 0
        self._filled[slot].scatter_reduce_(0, page, offset + 1, "amax")

    def read(self, slot: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        buffer = self._buffers[pages]
        recent = buffer >= 0
        k, v = (self._decode(slot, side, pages) for side in _SIDES)
        k[recent], v[recent] = (self._recent[side][slot, buffer[recent]].float() for side in _SIDES)
        return k, v

    def pages(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.read(slot, torch.arange(self.num_pages, device=self.device))

    def page_tensors(self) -> list[Tensor]:
        return [*self._codes, *self._numbers]

    def before_export(self, pages: Sequence[int]) -> None:
        self._quantize_pages([page for page in pages if page in self._buffer_of])

    def after_import(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._drop_buffer(page)
            self._filled[:, page] = self.layout.page_size

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self._drop_buffer(destination)
            for tensor in self.page_tensors():
                tensor[:, destination] = tensor[:, source]
            self._filled[:, destination] = self._filled[:, source]
            if source in self._buffer_of:
                self._take_buffer(destination)
                for tensor in self._recent:
                    tensor[:, self._buffer_of[destination]] = tensor[:, self._buffer_of[source]]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.page_tensors(), *self._recent))

    def _take_buffer(self, page: int) -> None:
        if page in self._buffer_of:
            self._buffer_of.move_to_end(page)
            return
        if not self._free:
            self._quantize_pages([next(iter(self._buffer_of))])
        buffer = self._free.pop()
        self._buffer_of[page] = buffer
        self._buffers[page] = buffer
        if bool((self._filled[:, page] > 0).any()):  # begun earlier and quantized since
            for slot in range(self.layout.layers_per_page):
                for side in _SIDES:
                    self._recent[side][slot, buffer] = self._decode(slot, side, torch.tensor([page]))[0].half()

    def _drop_buffer(self, page: int) -> None:
        buffer = self._buffer_of.pop(page, None)
        if buffer is not None:
            self._buffers[page] = -1
            self._free.append(buffer)

    def _quantize_pages(self, pages: list[int]) -> None:
        """From half precision to codes, all layers."""
        for page in pages:
            buffer = self._buffer_of[page]
            for slot in range(self.layout.layers_per_page):
                for side in _SIDES:
                    values = self._recent[side][slot, buffer].float()
                    filled = int(self._filled[slot, page])
                    if 0 < filled < self.layout.page_size:  # rows never written must not widen the range
                        values[:, filled:] = values[:, filled - 1 : filled]
                    self._encode(slot, side, torch.tensor([page]), values[None])
            self._drop_buffer(page)

    def _write_coded(self, slot: int, side: int, page: Tensor, offset: Tensor, heads: Tensor) -> None:
        """Rows that are not recent: their pages are decoded, updated and encoded again."""
        pages, at = torch.unique(page, return_inverse=True)
        count = torch.zeros_like(pages).index_add_(0, at, torch.ones_like(at))
        values = self._decode(slot, side, pages)
        known = self._filled[slot, pages].clone()
        known[at[offset == 0]] = 0
        values[at, :, offset] = heads
        # Rare: a page written in two parts
        for number in torch.nonzero(count < self.layout.page_size).flatten().tolist():
            written = offset[at == number]
            valid = torch.arange(self.layout.page_size, device=self.device) < known[number]
            valid[written] = True
            values[number][:, ~valid] = values[number][:, written[:1]]
        self._encode(slot, side, pages, values)

    def _encode(self, slot: int, side: int, pages: Tensor, values: Tensor) -> None:
        """values [n, heads, page_size, head_dim]"""
        if side == 0:
            codes, numbers = encode_over_rows(values.unflatten(2, (-1, GROUP)), self.bits)
            codes = codes.flatten(2, 3)
        else:
            codes, numbers = encode_over_channels(values, gcd(GROUP, self.layout.head_dim), self.bits)
        self._codes[side][slot, pages] = codes
        self._numbers[side][slot, pages] = numbers

    def _decode(self, slot: int, side: int, pages: Tensor) -> Tensor:
        codes, numbers = self._codes[side][slot, pages], self._numbers[side][slot, pages]
        if side == 1:
            return decode_over_channels(codes, numbers, self.bits)
        return decode_over_rows(codes.unflatten(2, (-1, GROUP)), numbers, self.bits).flatten(2, 3)


class Kivi4Store(_KiviStore):
    name, bits = "kivi4", 4


class Kivi2Store(_KiviStore):
    name, bits = "kivi2", 2
