"""The adapters of one product on a GPU: slots of fixed size, so that captured steps find new adapters in old places.

Factors are bf16 or float16, like activations; DoRA's gains float32. Ranks are padded to blocks of 16 and skipped beyond
what an adapter has, so a slot of rank 64 that holds rank 16 costs memory, not time. Whole matrices (`modules_to_save`)
have no slot: they are multiplied by torch, in steps that are not captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tokenmill.kernels.ref_adapters import RANK_BLOCK, AdaptedPart, Parts, adapted, padded_rank
from tokenmill.kernels.triton.adapters.products import Factors, Sums, expand, make_tiles, shrink


@dataclass(frozen=True, slots=True, eq=False)
class PackedPart:
    """In host memory, pinned where that helps."""

    a: Tensor | None = None  # 16-bit floats [padded rank, K]
    b: Tensor | None = None  # 16-bit floats [N, padded rank]
    gain: Tensor | None = None
    shift: Tensor | None = None
    whole: AdaptedPart | None = None  # on the device, float32

    @property
    def nbytes(self) -> int:
        tensors = [each for each in (self.a, self.b, self.gain, self.shift) if each is not None]
        own = sum(each.numel() * each.element_size() for each in tensors)
        return own + (0 if self.whole is None else self.whole.nbytes)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class GpuSite:
    backend = "triton"

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        num_slots: int,
        max_rank: int,
        has_bias: bool,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """`shapes`: (out, in) of each matrix; `has_bias`: any of them has one; `dtype`: of activations and factors."""
        widths, depth, rank = [out for out, _ in shapes], shapes[0][1], padded_rank(max_rank)
        columns, parts = sum(widths), len(shapes)
        self._device, self._widths, self._dtype = device, widths, dtype
        self._starts = [sum(widths[:number]) for number in range(parts)]
        tiles, self._tiles = make_tiles(widths, device)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.factors = Factors(
            a=zeros(num_slots, parts, rank, depth, dtype=dtype),
            b=zeros(num_slots, columns, rank, dtype=dtype),
            ranks=zeros(num_slots, parts, dtype=torch.int32),
            gains=zeros(num_slots, columns, dtype=torch.float32),
            shifts=zeros(num_slots, columns, dtype=torch.float32) if has_bias else None,
            gained=zeros(num_slots, parts, dtype=torch.int32),
            tiles=tiles,
        )
        self._whole: dict[int, dict[int, AdaptedPart]] = {}  # by slot and matrix

    @property
    def nbytes(self) -> int:
        own = sum(each.numel() * each.element_size() for each in self.factors if each is not None)
        return own + sum(part.nbytes for parts in self._whole.values() for part in parts.values())

    def pack(self, parts: Parts) -> tuple[PackedPart | None, ...]:
        return tuple(None if part is None else self._pack(part) for part in parts)

    def _pack(self, part: AdaptedPart) -> PackedPart:
        if part.whole is not None:
            return PackedPart(whole=part.to(self._device))
        assert part.a is not None
        assert part.b is not None
        rank = -(-part.rank // RANK_BLOCK) * RANK_BLOCK
        a = torch.zeros(rank, part.a.shape[1], dtype=self._dtype)
        b = torch.zeros(part.b.shape[0], rank, dtype=self._dtype)
        a[: part.rank], b[:, : part.rank] = part.a, part.b
        gain, shift = (None if each is None else self._pinned(each.float().cpu()) for each in (part.gain, part.shift))
        return PackedPart(self._pinned(a), self._pinned(b), gain, shift)

    def _pinned(self, values: Tensor) -> Tensor:
        return values.pin_memory() if self._device.type == "cuda" else values

    @staticmethod
    def packed_bytes(packed: tuple[PackedPart | None, ...]) -> int:
        return sum(part.nbytes for part in packed if part is not None)

    def set(self, slot: int, packed: tuple[PackedPart | None, ...]) -> None:
        """Behind the steps that were launched before, in front of those that follow: all are on one stream."""
        f, at = self.factors, slot - 1
        for number, part in enumerate(packed):
            if part is None:
                continue
            if part.whole is not None:
                self._whole.setdefault(slot, {})[number] = part.whole
                continue
            assert part.a is not None
            assert part.b is not None
            rank, columns = part.a.shape[0], slice(self._starts[number], self._starts[number] + self._widths[number])
            f.a[at, number, :rank].copy_(part.a, non_blocking=True)
            f.b[at, columns, :rank].copy_(part.b, non_blocking=True)
            if part.gain is not None:
                f.gains[at, columns].copy_(part.gain, non_blocking=True)
            if f.shifts is not None:
                f.shifts[at, columns] = 0.0
                if part.shift is not None:
                    f.shifts[at, columns].copy_(part.shift, non_blocking=True)
            f.gained[at, number] = int(part.gain is not None)
            f.ranks[at, number] = rank

    def clear(self, slot: int) -> None:
        self.factors.ranks[slot - 1] = 0
        self.factors.gained[slot - 1] = 0
        self._whole.pop(slot, None)

    def adapt(self, x: Tensor, slots: Tensor, outputs: Sequence[Tensor], replaces: bool = True) -> None:
        """Change the rows of `outputs` [T, out] in place. Safe to capture without `replaces`: whole matrices, which no
        row may have then, are taken from where they lie now."""
        x = x.to(self._dtype)
        sums = shrink(x, slots, self.factors)
        for y, tiles, start in zip(outputs, self._tiles, self._starts, strict=True):
            expand(y, slots, self.factors, sums, tiles, start)
        if replaces:
            self._replace(x, slots, outputs)

    def adapt_joined(self, x: Tensor, slots: Tensor, y: Tensor, replaces: bool = True) -> None:
        """`adapt` where the outputs lie side by side, as one tensor."""
        self.finish(x, slots, y, self.begin(x, slots), replaces)

    def begin(self, x: Tensor, slots: Tensor) -> Sums:
        """The first of the two products, before the base's own: in a captured step it runs beside that one."""
        x = x.to(self._dtype)
        if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
            return shrink(x, slots, self.factors)
        side = _side_stream(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            return shrink(x, slots, self.factors)

    def finish(self, x: Tensor, slots: Tensor, y: Tensor, sums: Sums, replaces: bool = True) -> None:
        """Change the rows of `y`, the base's products side by side as one tensor, in place."""
        if y.is_cuda and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(y.device).wait_stream(_side_stream(y.device))
        expand(y, slots, self.factors, sums, range(self.factors.tiles.shape[0]))
        if replaces:
            self._replace(x.to(self._dtype), slots, y.split(self._widths, dim=1))

    def _replace(self, x: Tensor, slots: Tensor, outputs: Sequence[Tensor]) -> None:
        for slot, parts in self._whole.items():
            for number, part in parts.items():
                y = outputs[number]
                rows = (slots == slot).unsqueeze(1)
                y.copy_(torch.where(rows, adapted(part, x.float(), y.float()).to(y.dtype), y))
