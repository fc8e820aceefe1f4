"""A block's pass that goes on where it was stopped.

Methods round a block group by group, and each group wants the input that all groups before it, rounded by then, make.
Run from the block's entrance every time, that is several passes for each group; only what follows the last stop has
changed. So a tape numbers the calls of the block's ops and keeps, at a stop, what the calls after it read: the results
of the newest call, and the residual stream as it was written last. Everything older comes back as NaN of the right
shape. A block that reads more than that puts out NaN, is found out, and is run from its entrance as before.

What a tape holds lies outside the C library's heap, in pages of its own and in Python objects: made among the
temporaries of a pass and alive long after them, it would leave a heap full of holes, three times as large.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tokenmill.quantize.calibration_ops import CalibrationOps, ReachedInput

_RESIDUAL_WRITERS = ("add", "add_rms_norm")  # and, of their results, the first


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A tensor, or (without `pages`) NaN in its shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pages: mmap.mmap | Tensor | None = None  # on a GPU the tensor itself

    @classmethod
    def of(cls, tensor: Tensor, whole: bool) -> _Kept:
        pages: mmap.mmap | Tensor | None = None
        if whole and tensor.device.type != "cpu":
            pages = tensor
        elif whole and tensor.numel():
            pages = mmap.mmap(-1, tensor.numel() * tensor.element_size())
            torch.frombuffer(pages, dtype=tensor.dtype, count=tensor.numel()).view(tensor.shape).copy_(tensor)
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, pages)

    def read(self) -> Tensor:
        if self.pages is None:
            return torch.full((), torch.nan, dtype=self.dtype, device=self.device).expand(self.shape)
        if isinstance(self.pages, Tensor):
            return self.pages
        return torch.frombuffer(self.pages, dtype=self.dtype).view(self.shape)


class Tape:
    """Of one batch of sequences in one set of weights."""

    def __init__(self) -> None:
        self.calls: list[Any] = []  # results of the calls before the stop, tensors as _Kept
        self.residual: int | None = None  # which call wrote the residual stream last


class TapedOps:
    """Ops of one run. Calls that one op makes of others are part of that op."""

    def __init__(self, ops: CalibrationOps, tape: Tape) -> None:
        self._ops, self._tape, self._count = ops, tape, 0
        self._fresh: list[Any] = []  # of the calls after the stop: blank, but for what a tape keeps
        self._newest: Any = None
        self._stream: Any = None  # the newest result that wrote the residual stream, if one was fresh
        self._writer = tape.residual

    def __getattr__(self, name: str) -> Any:
        op = getattr(self._ops, name)
        return partial(self._call, name, op) if callable(op) else op

    def _call(self, name: str, op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        number = self._count
        self._count += 1
        if number < len(self._tape.calls):
            return _each(_Kept.read, self._tape.calls[number])
        try:
            result = op(*arguments, **options)
        except ReachedInput:
            self._stop()
            raise
        if name in _RESIDUAL_WRITERS:
            self._writer, self._stream = number, result
        self._fresh.append(_each(partial(_Kept.of, whole=False), result))
        self._newest = result
        return result

    def _stop(self) -> None:
        tape = self._tape
        if not self._fresh:
            return  # asked for the same input again
        for number in range(len(tape.calls)):
            if number != self._writer:
                tape.calls[number] = _each(_emptied, tape.calls[number])
            elif isinstance(tape.calls[number], list | tuple):
                first, *rest = tape.calls[number]  # what was normed from it only the next op read
                tape.calls[number] = (first, *(_emptied(each) for each in rest))
        start = len(tape.calls)
        tape.calls += self._fresh
        if self._stream is not None and self._writer is not None and self._writer >= start:
            whole = self._stream[0] if isinstance(self._stream, list | tuple) else self._stream
            blank = self._fresh[self._writer - start]
            kept = _Kept.of(whole, whole=True)
            tape.calls[self._writer] = (kept, *blank[1:]) if isinstance(blank, list | tuple) else kept
        tape.calls[-1] = _each(partial(_Kept.of, whole=True), self._newest)
        tape.residual = self._writer


def _emptied(kept: _Kept) -> _Kept:
    return kept if kept.pages is None else _Kept(kept.shape, kept.dtype, kept.device)


def _each(change: Callable[[Any], Any], result: Any) -> Any:
    """What an op returns is a tensor or several."""
    return type(result)(change(one) for one in result) if isinstance(result, list | tuple) else change(result)
