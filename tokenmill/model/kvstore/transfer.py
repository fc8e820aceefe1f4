"""Copies pages between a KV store and host memory, as bytes in the order of the store's page tensors.

On a GPU many pages go at once: one gather per tensor into a staging buffer, one copy through pinned memory on a stream
of its own, and an event that the reader waits for; the way back likewise. On the CPU pages are copied one by one.
Called by KVStore only; knows tensors [layer slots, pages, ...], not what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tokenmill.model.kvstore.host_transfer import PagesOnHost as PagesOnHost

_STAGING_BYTES = 32 << 20  # on the device, for one batch: pages leave when memory is short


class PagesOnTheWay:
    """An export whose pages the GPU is still copying to pinned memory."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, torch.cuda.Event]] = []

    def add(self, pinned: Tensor, copied: torch.cuda.Event) -> None:
        self._batches.append((pinned, copied))

    def wait(self) -> list[memoryview]:
        """The pages in memory of their own, so that the pinned memory can be used again. Any thread may call it."""
        pages = []
        for pinned, copied in self._batches:
            copied.synchronize()
            pages += [row.clone().numpy().data for row in pinned]
        self._batches.clear()
        return pages


def bytes_per_page(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes // tensor.shape[1] for tensor in tensors)


def copy_out(tensors: Sequence[Tensor], page: int) -> memoryview:
    """One page, synchronously."""
    parts = [tensor[:, page].contiguous().view(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat(parts).cpu().numpy().data


def copy_in(tensors: Sequence[Tensor], page: int, data: memoryview) -> None:
    """One page, synchronously. `data` must lie in writable memory: torch asks that of memory it did not allocate."""
    source = torch.frombuffer(data, dtype=torch.uint8)
    begin = 0
    for tensor in tensors:
        octets = tensor[:, page].view(torch.uint8)
        end = begin + octets.numel()
        octets.copy_(source[begin:end].view(octets.shape))
        begin = end
    assert begin == source.numel(), "a page of another store"


def gather(tensors: Sequence[Tensor], index: Tensor) -> Tensor:
    """Pages [n] as bytes [n, bytes per page], on their device."""
    parts = [tensor.view(torch.uint8).index_select(1, index) for tensor in tensors]
    return torch.cat([part.transpose(0, 1).reshape(len(index), -1) for part in parts], 1)


def scatter(tensors: Sequence[Tensor], index: Tensor, staging: Tensor) -> None:
    """Overwrite pages [n] with bytes [n, bytes per page]."""
    begin = 0
    for tensor in tensors:
        octets = tensor.view(torch.uint8)
        end = begin + octets[:, 0].numel()
        pages = staging[:, begin:end].reshape(len(index), octets.shape[0], *octets.shape[2:])
        octets.index_copy_(1, index, pages.transpose(0, 1))
        begin = end
    assert begin == staging.shape[1], "pages of another store"


def start_export(tensors: Sequence[Tensor], pages: Sequence[int], stream: torch.cuda.Stream) -> PagesOnTheWay:
    """Pages of tensors on a GPU. What is launched on the current stream after this call may overwrite them."""
    export = PagesOnTheWay()
    current = torch.cuda.current_stream(tensors[0].device)
    for batch in _batches(tensors, pages):
        staging = gather(tensors, _index(batch, tensors[0].device))
        pinned = torch.empty(staging.shape, dtype=torch.uint8, pin_memory=True)
        copied = torch.cuda.Event()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            pinned.copy_(staging, non_blocking=True)
            copied.record(stream)
        staging.record_stream(stream)  # its memory is used again only after the copy
        export.add(pinned, copied)
    return export


def start_import(tensors: Sequence[Tensor], pages: Sequence[int], data: Sequence[memoryview]) -> None:
    """Overwrite pages of tensors on a GPU. What is launched on the current stream after this call sees them."""
    device = tensors[0].device
    begin = 0
    for batch in _batches(tensors, pages):
        pinned = torch.empty((len(batch), bytes_per_page(tensors)), dtype=torch.uint8, pin_memory=True)
        for row, source in zip(pinned, data[begin : begin + len(batch)], strict=True):
            row.copy_(torch.frombuffer(source, dtype=torch.uint8))
        scatter(tensors, _index(batch, device), pinned.to(device, non_blocking=True))
        begin += len(batch)


def _batches(tensors: Sequence[Tensor], pages: Sequence[int]) -> Iterator[Sequence[int]]:
    size = max(1, _STAGING_BYTES // bytes_per_page(tensors))
    for begin in range(0, len(pages), size):
        yield pages[begin : begin + size]


def _index(pages: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
