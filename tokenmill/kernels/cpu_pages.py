"""KV pages as the C++ kernels take them: tensors of rows and the format of a row, for the eager ops and the recorder.

`RowCode` describes a row format of csrc/cpu/kv_rows.h; the stores (model/kvstore) own the torch version of each. Knows
nothing of who owns a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tokenmill.kernels import cpu

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowRotation:
    """H (s * x): `signs` [head_dim], then Sylvester's matrix of order `power` (x) `matrix` [rest, rest]."""

    signs: Tensor
    power: int
    matrix: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class RowCode:
    """How one token's key or value of one KV head is stored in a page. Fields as RowFormat of kv_rows.h."""

    kind: str
    head_dim: int
    bits: int
    scale_bytes: int = 0
    renormalize: bool = False
    centroids: Tensor | None = None
    bounds: Tensor | None = None
    head_scales: Tensor | None = None
    centers: Tensor | None = None  # [kv_heads, head_dim] and of keys only, as are the scales that go with them
    scales: Tensor | None = None
    feedback: Tensor | None = None  # [kv_heads, head_dim, head_dim], strictly lower
    weights: Tensor | None = None  # [kv_heads, head_dim], with feedback: the weight of a squared error
    gains: Tensor | None = None  # of a codebook: multiples of the norm to try; then lengths are unbiased
    rotation: RowRotation | None = None

    def bound(self) -> Any:
        """The C++ object; it copies the tables."""
        centroids = self.centroids
        if centroids is not None:  # C++ looks up in tables of 16
            import torch

            centroids = torch.nn.functional.pad(centroids.float(), (0, 16 - len(centroids)))
        turn = self.rotation
        rotation = None if turn is None else cpu.module().Rotation(turn.signs.float(), turn.power, turn.matrix.float())
        return cpu.module().RowFormat(
            self.kind,
            self.head_dim,
            self.bits,
            self.scale_bytes,
            self.renormalize,
            centroids,
            None if self.bounds is None else self.bounds.float(),
            self.head_scales,
            None if self.centers is None else self.centers.float().flatten(),
            None if self.scales is None else self.scales.float().flatten(),
            None if self.feedback is None else self.feedback.float().transpose(1, 2).flatten(),
            None if self.weights is None else self.weights.float().flatten(),
            self.gains,
            rotation,
        )


class CpuPages:
    """Pages of one layer slot: k and v [pages, kv_heads, page_size, row], plain floats or bytes of a row format."""

    def __init__(self, k: Tensor, v: Tensor, k_rows: Any = None, v_rows: Any = None) -> None:
        """`k_rows`, `v_rows`: what RowCode.bound returned; None: plain floats."""
        self._tensors = (k, v)  # C++ points into them
        self.bound = cpu.module().Pages(k, v, k_rows, v_rows)

    def store(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Write rows [T, kv_heads * head_dim] to token slots."""
        cpu.module().store_pages(cpu.pool(), k.contiguous(), v.contiguous(), self.bound, slots)

    def attention(
        self,
        q: Tensor,
        block_table: Tensor,
        query_starts: Tensor,
        seq_lens: Tensor,
        scale: float,
        window: int,
        cap: float,
        chunk: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `attention` of ref.py."""
        out = q.new_empty(q.shape)
        lengths = (block_table, query_starts, seq_lens)
        cpu.module().attend_pages(cpu.pool(), q, self.bound, *lengths, scale, window, cap, chunk, sinks, out)
        return out
