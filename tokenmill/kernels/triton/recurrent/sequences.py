"""What the recurrent kernels share: the rows and the state slots of sequences, softplus.

Host side: tensors as the kernels read them. Device side: functions inlined into the kernels. Knows no recurrence.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Sequences(NamedTuple):
    """Of S sequences: where each begins, where its state is read from and written to."""

    starts: Tensor  # [S + 1]
    slots: Tensor  # [S], -1: begins with zeros
    targets: Tensor  # [S], -1: leaves nothing


def sequences(slots: Tensor, starts: Tensor, targets: Tensor | None, device: torch.device) -> Sequences:
    slots = slots.to(device)
    return Sequences(starts.to(device), slots, slots if targets is None else targets.to(device))


def is_step(rows: Tensor, slots: Tensor) -> bool:
    """Whether every sequence has one row: prompts are padded to more rows than sequences."""
    return rows.shape[0] == slots.shape[0]


def check_rows(*rows: Tensor) -> None:
    """Rows may be columns of a wider tensor; the numbers of a row lie side by side."""
    assert all(each.dim() == 2 and (each.stride(1) == 1 or each.shape[1] == 1) for each in rows)


def check_states(states: Tensor) -> None:
    """Slots may lie apart; a state lies in one piece."""
    assert states.dtype == torch.float32
    assert states.shape[0] == 0 or states[0].is_contiguous()


@triton.jit
def softplus(x):
    """log(1 + exp(x)), without the loss of small results: log(w) * u / (w - 1) with w = 1 + u as rounded."""
    u = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + u
    small = tl.where(w == 1.0, u, tl.log(w) * (u / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def load_bounds(starts, sequence, num_seqs, num_rows):
    """(First row, end, end of the rows to be written) of a sequence: the last one has the padding rows as well."""
    begin = tl.load(starts + sequence).to(tl.int32)
    end = tl.load(starts + sequence + 1).to(tl.int32)
    limit = tl.where(sequence == num_seqs - 1, num_rows, end)
    return begin, end, limit
