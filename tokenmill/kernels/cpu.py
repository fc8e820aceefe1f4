"""The CPU backend of the op table: the functions of ref.py on top of the C++ module `_cpu` (csrc/cpu).

Owns the output tensors; all arithmetic is in C++, which reads torch tensors and numpy arrays in place: an op answers
with what it was asked with. Imports no torch itself. Declines with a reason where the
module was not built or the tensors are on another device (cpu_module.py). The recorded program
(runtime/executors/recorded.py) uses the same module directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.kernels import cpu_recurrent
from tokenmill.kernels.base import Declined
from tokenmill.kernels.cpu_module import instruction_set as instruction_set
from tokenmill.kernels.cpu_module import multiplies_halves as multiplies_halves
from tokenmill.kernels.cpu_module import num_threads as num_threads
from tokenmill.kernels.cpu_module import pool as pool
from tokenmill.kernels.cpu_module import unavailable as unavailable
from tokenmill.kernels.cpu_module import use_threads as use_threads
from tokenmill.kernels.host import address
from tokenmill.kernels.native import module as module

if TYPE_CHECKING:
    from torch import Tensor

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
        self.bias = None if bias is None else _floats(bias)
        self.detail: str = packed.kernel

    @property
    def nbytes(self) -> int:
        size: int = self.packed.nbytes
        return size

    def __call__(self, x: Tensor) -> Tensor:
        y = _empty(x, (x.shape[0], self.packed.rows))
        module().linear(pool(), contiguous(x), [self.packed], [self.bias], [y])
        return y


def make_linear(weight: StoredWeight, isa: str = "") -> CpuLinear:
    """Repack `weight`; `isa` names an older instruction set for tests. Declines types and shapes without a kernel."""
    if hasattr(weight, "decode"):
        from tokenmill.kernels.cpu_coded import pack_coded  # unpacks with torch

        coded: Any = weight
        return CpuLinear(pack_coded(module(), coded, isa), weight.bias)
    if weight.activations != "none":
        raise Declined(f"no kernel for {weight.type_name} with its input rounded as {weight.activations}")
    parts = weight.parts()
    if len(parts) != 1:
        raise Declined(f"no kernel for weights made of {', '.join(sorted(parts))}")
    (data,) = parts.values()
    try:
        packed = module().PackedLinear(
            weight.type_name,
            as_bytes(data),
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
    try:
        _look_up(table, data, [0])
    except ValueError:
        return False
    return True


def look_up(table: StoredWeight, rows: Sequence[int]) -> np.ndarray:
    """Rows of a stored matrix as float32, where `can_look_up`."""
    (data,) = table.parts().values()
    return _look_up(table, data, rows)


def _look_up(table: StoredWeight, data: Any, rows: Sequence[int]) -> np.ndarray:
    values = np.empty((len(rows), table.in_features), dtype=np.float32)
    ids = np.array(rows, dtype=np.int64)
    module().embed(pool(), table.type_name, as_bytes(data), table.out_features, ids, 1.0, values)
    return values


def _empty(like: Any, shape: Sequence[int]) -> Any:
    """Float32 of the kind of `like`."""
    return np.empty(shape, dtype=np.float32) if isinstance(like, np.ndarray) else like.new_empty(shape)


def contiguous(x: Any) -> Any:
    return np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()


def _floats(x: Any) -> Any:
    return np.ascontiguousarray(x, dtype=np.float32) if isinstance(x, np.ndarray) else x.float().contiguous()


def as_bytes(x: Any) -> Any:
    """The bytes of a matrix, row by row."""
    if isinstance(x, np.ndarray):
        return np.ascontiguousarray(x).view(np.uint8)
    import torch

    return x.contiguous().view(torch.uint8)


def rms_norm(x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
    y = _empty(x, x.shape)
    module().rms_norm(pool(), x, weight, eps, head_dim, y)
    return y


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
    y = _empty(x, x.shape)
    module().layer_norm(pool(), x, weight, bias, eps, head_dim, y)
    return y


def scale(x: Tensor, factor: float) -> Tensor:
    y = _empty(x, x.shape)
    module().scale(pool(), x, factor, y)
    return y


def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> Tensor:
    y = _empty(x, x.shape)
    module().add_positions(pool(), x, table, positions, y)
    return y


def activate(x: Tensor, activation: str) -> Tensor:
    y = _empty(x, x.shape)
    module().activate(pool(), x, activation, y)
    return y


def add(x: Tensor, y: Tensor) -> Tensor:
    z = _empty(x, x.shape)
    module().add(pool(), x, y, z)
    return z


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, normed = _empty(x, x.shape), _empty(x, x.shape)
    module().add_rms_norm(pool(), x, y, weight, eps, total, normed)
    return total, normed


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    y = _empty(gate, gate.shape)
    module().gated(pool(), gate, up, activation, y)
    return y


def softcap(x: Tensor, cap: float) -> Tensor:
    y = _empty(x, x.shape)
    module().softcap(pool(), x, cap, y)
    return y


def rope(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, head_dim: int, interleaved: bool) -> Tensor:
    y = _empty(x, x.shape)
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
    out = _empty(q, q.shape)
    lengths = (block_table, query_starts, seq_lens)
    module().attention(pool(), q, k_pages, v_pages, *lengths, scale, window, cap, chunk, sinks, out)
    return out


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row [R, vocab]; the first of equals."""
    logits = contiguous(logits)
    best = _empty_ids(logits, logits.shape[:1])
    assert str(logits.dtype).removeprefix("torch.") == "float32"
    module().argmax(pool(), address(logits), logits.shape[0], logits.shape[1], address(best))
    return best


def top_k(logits: Any, k: int) -> tuple[Any, Any]:
    """The k largest values of each row in descending order and their indices, without sorting the row."""
    values, indices = _empty(logits, (logits.shape[0], k)), _empty_ids(logits, (logits.shape[0], k))
    module().top_k(pool(), logits, values, indices)
    return values, indices


def _empty_ids(like: Any, shape: Sequence[int]) -> Any:
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype=np.int64)
    import torch

    return like.new_empty(shape, dtype=torch.int64)
