"""Keys and values of a draft layer, in places of its own under the target's page numbers.

What lies at a place is known by content: beside each key is a hash of all tokens that it depends on, up to the one
behind it. So shared prefixes are shared here too, and pages that were evicted, reused, copied or fetched from a tier
are noticed when they are read: a key of other tokens is masked, not attended to. Called by layer_drafter.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from tokenmill.errors import UserError
from tokenmill.hardware.machine import available_memory
from tokenmill.types import Request, ScheduledTokens


@dataclass(slots=True)
class Context:
    """Keys and values of some rows, and room behind them for those of drafted tokens."""

    keys: Tensor  # [R, L + room, width]
    values: Tensor
    mask: Tensor  # [R, L + room] bool: what may be attended to
    length: int  # L, and then the drafted ones

    def append(self, k: Tensor, v: Tensor) -> None:
        """One more of each row, [R, width]."""
        self.keys[:, self.length], self.values[:, self.length] = k, v
        self.mask[:, self.length] = True
        self.length += 1


class LayerMemory:
    def __init__(self, num_pages: int, page_size: int, group: int, width: int, like: Tensor) -> None:
        """`group`: the KV group of the target whose tables name the pages; `like`: device and type of what is kept."""
        self._page_size, self._group = page_size, group
        places = num_pages * page_size
        needed = 2 * places * width * like.element_size()
        if like.device.type == "cpu" and needed > available_memory() // 2:
            raise UserError(
                f"the draft layer's keys and values need {needed / 2**30:.1f} GiB in addition to the target's",
                "lower --memory or --context",
            )
        self._keys = torch.zeros(places, width, dtype=like.dtype, device=like.device)
        self._values = torch.zeros_like(self._keys)
        self._written = np.zeros(places, dtype=np.int64)  # the hash of the tokens behind each
        self._hashes: WeakKeyDictionary[Request, array[int]] = WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        return 2 * self._keys.nbytes

    def write(self, rows: Sequence[ScheduledTokens], following: Sequence[Sequence[int]], k: Tensor, v: Tensor) -> None:
        """`following[i]`: the tokens from position `rows[i].start + 1` on, each behind the position of one key."""
        places, hashes = [], []
        for row, tokens in zip(rows, following, strict=True):
            known = self._hash(row.request, row.start, tokens)
            places.append(self._places(row, row.start, len(tokens)))
            hashes.append(np.array(known[row.start : row.start + len(tokens)], dtype=np.int64))
        chosen = np.concatenate(places)
        self._written[chosen] = np.concatenate(hashes)
        index = torch.from_numpy(chosen).to(self._keys.device)
        self._keys[index], self._values[index] = k.to(self._keys.dtype), v.to(self._values.dtype)

    def read(self, rows: Sequence[ScheduledTokens], lengths: Sequence[int], room: int) -> Context:
        """The first `lengths[i]` keys and values of each row."""
        longest = max(lengths)
        places = np.zeros((len(rows), longest + room), dtype=np.int64)
        mask = np.zeros(places.shape, dtype=bool)
        for number, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            own = places[number, :length] = self._places(row, 0, length)
            known = self._hash(row.request, 0, row.request.token_ids[1:])
            mask[number, :length] = self._written[own] == np.array(known[:length], dtype=np.int64)
        device = self._keys.device
        index = torch.from_numpy(places).to(device)
        return Context(self._keys[index], self._values[index], torch.from_numpy(mask).to(device), longest)

    def _places(self, row: ScheduledTokens, begin: int, count: int) -> np.ndarray:
        table = np.asarray(row.block_tables[self._group], dtype=np.int64)
        positions = np.arange(begin, begin + count)
        places: np.ndarray = table[positions // self._page_size] * self._page_size + positions % self._page_size
        return places

    def _hash(self, request: Request, start: int, following: Sequence[int]) -> array[int]:
        """By position, the hash of the tokens up to the one behind it; those up to `start` are the request's own."""
        ids, hashes = request.token_ids, self._hashes.setdefault(request, array("q"))
        last = hashes[-1] if hashes else hash((ids[0],))
        for position in range(len(hashes), start + len(following)):
            behind = following[position - start] if position >= start else ids[position + 1]
            last = hash((last, behind))
            hashes.append(last)
        return hashes
