"""The CPU backend of the op table: the functions of ref.py on top of the C++ module `_cpu` (csrc/cpu).

Owns the output tensors; all arithmetic is in C++, which reads torch tensors in place. Declines with a reason where the
module was not built or the tensors are on another device (cpu_module.py). The recorded program
(runtime/executors/recorded.py) uses the same module directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokenmill.kernels import cpu_recurrent
from tokenmill.kernels.base import Declined
from tokenmill.kernels.cpu_coded import CodedWeight, pack_coded
from tokenmill.kernels.cpu_module import instruction_set as instruction_set
from tokenmill.kernels.cpu_module import module as module
from tokenmill.kernels.cpu_module import num_threads as num_threads
from tokenmill.kernels.cpu_module import pool as pool
from tokenmill.kernels.cpu_module import unavailable as unavailable
from tokenmill.kernels.cpu_module import use_threads as use_threads

if TYPE_CHECKING:
    from tokenmill.kernels.base import StoredWeight


def find_op(name: str) -> Callable[..., Any] | None:
    """An op by its name in the op table."""
    function: Callable[..., Any] | None = globals().get(name) or getattr(cpu_recurrent, name, None)
    return function


class CpuLinear:
    """A weight repacked for this CPU's instruction set. Owns the packed bytes; the stored ones are no longer read."""

    backend = "cpu"

    def __init__(self, packed: Any, bias: Tensor | None) -> None:
        self.packed = packed
        self.bias = None if bias is None else bias.float().contiguous()
        self.detail: str = packed.kernel

    @property
    def nbytes(self) -> int:
        size: int = self.packed.nbytes
        return size

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(x.shape[0], self.packed.rows)
        module().linear(pool(), x.contiguous(), [self.packed], [self.bias], [y])
        return y


def make_linear(weight: StoredWeight, isa: str = "") -> CpuLinear:
    """Repack `weight`; `isa` names an older instruction set for tests. Declines types and shapes without a kernel."""
    if isinstance(weight, CodedWeight):
        return CpuLinear(pack_coded(module(), weight, isa), weight.bias)
    if weight.activations != "none":
        raise Declined(f"no kernel for {weight.type_name} with its input rounded as {weight.activations}")
    parts = weight.parts()
    if len(parts) != 1:
        raise Declined(f"no kernel for weights made of {', '.join(sorted(parts))}")
    (data,) = parts.values()
    try:
        packed = module().PackedLinear(
            weight.type_name,
            data.contiguous().view(torch.uint8),
            weight.out_features,
            weight.in_features,
            isa,
            weight.precise,
        )
    except ValueError as error:
        raise Declined(str(error)) from None
    return CpuLinear(packed, weight.bias)


def can_look_up(table: StoredWeight) -> bool:
    """Whether rows of the stored (not repacked) matrix can be expanded in C++."""
    parts = table.parts()
    if len(parts) != 1:
        return False
    (data,) = parts.values()
    row = torch.empty(1, table.in_features)
    try:
        module().embed(pool(), table.type_name, data.view(torch.uint8), table.out_features, torch.tensor([0]), 1.0, row)
    except ValueError:
        return False
    return True


def rms_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
    y = torch.empty_like(x)
    module().rms_norm(pool(), x, weight, eps, head_dim, y)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
    y = torch.empty_like(x)
    module().layer_norm(pool(), x, weight, bias, eps, head_dim, y)
    return y


def scale(x: Tensor, factor: float) -> Tensor:
    y = torch.empty_like(x)
    module().scale(pool(), x, factor, y)
    return y


def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    y = torch.empty_like(x)
    module().add_positions(pool(), x, table, positions, y)
    return y


def activate(x: Tensor, activation: str) -> Tensor:
    y = torch.empty_like(x)
    module().activate(pool(), x, activation, y)
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    z = torch.empty_like(x)
    module().add(pool(), x, y, z)
    return z


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = torch.empty_like(x), torch.empty_like(x)
    module().add_rms_norm(pool(), x, y, weight, eps, total, normed)
    return total, normed


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    y = torch.empty_like(gate)
    module().gated(pool(), gate, up, activation, y)
    return y


def softcap(x: Tensor, cap: float) -> Tensor:
    y = torch.empty_like(x)
    module().softcap(pool(), x, cap, y)
    return y


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    y = torch.empty_like(x)
    module().rope(pool(), x, positions, cos, sin, head_dim, interleaved, y)
    return y


def store_kv(x: Tensor, pages: Tensor, slots: Tensor) -> None:
    module().store_kv(pool(), x, pages, slots)


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
    out = torch.empty_like(q)
    lengths = (block_table, query_starts, seq_lens)
    module().attention(pool(), q, k_pages, v_pages, *lengths, scale, window, cap, chunk, sinks, out)
    return out


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row [R, vocab]; the first of equals."""
    best = torch.empty(logits.shape[0], dtype=torch.int64)
    logits = logits.contiguous()
    assert logits.dtype == torch.float32
    module().argmax(pool(), logits.data_ptr(), logits.shape[0], logits.shape[1], best.data_ptr())
    return best


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values of each row in descending order and their indices, without sorting the row."""
    values = torch.empty(logits.shape[0], k)
    indices = torch.empty(logits.shape[0], k, dtype=torch.int64)
    module().top_k(pool(), logits, values, indices)
    return values, indices
