"""Values of the GPU ops that wait for their reader: norms, gates, products and columns of products.

Each is computed when it is known what reads it, as a plain tensor, as 8-bit codes or inside the reader's kernel. Knows
nothing of a batch or of pages. Used by ops.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import triton as gpu
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.state.specs import ConvolutionSpec


class Norm:
    """rms_norm(x + y) and the sum itself, computed when the first reader says whether it wants floats or 8-bit
    codes."""

    def __init__(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> None:
        self._inputs = (x, y, weight, eps)
        self._total: Tensor | None = None
        self._plain: Tensor | None = None
        self._codes: tuple[Tensor, Tensor] | None = None

    @property
    def num_rows(self) -> int:
        return self._inputs[0].shape[0]

    @property
    def total(self) -> Tensor:
        if self._total is None:
            self.plain()
        assert self._total is not None
        return self._total

    def plain(self) -> Tensor:
        if self._plain is None:
            x, y, weight, eps = self._inputs
            if self._total is None and y is not None:
                self._total, self._plain = gpu.add_rms_norm(x, y, weight, eps)
            else:
                self._total = x if self._total is None else self._total
                self._plain = gpu.rms_norm(self._total, weight, eps)
        assert self._plain is not None
        return self._plain

    def codes(self, kind: str, fixed: float) -> tuple[Tensor, Tensor]:
        if self._codes is None:
            x, y, weight, eps = self._inputs
            if self._total is not None:
                x, y = self._total, None
            self._total, codes, scales = gpu.add_rms_norm_quantized(x, y, weight, eps, kind, fixed)
            self._codes = codes, scales
        return self._codes


@dataclass(slots=True, eq=False)
class Total:
    """The sum that a Norm also computes: the residual stream."""

    norm: Norm


@dataclass(slots=True, eq=False)
class Gate:
    gate: Tensor
    up: Tensor
    activation: str
    _plain: Tensor | None = None  # an adapted product reads it twice

    @property
    def num_rows(self) -> int:
        return self.gate.shape[0]

    def plain(self) -> Tensor:
        if self._plain is None:
            self._plain = gpu.gated(self.gate, self.up, self.activation)
        return self._plain

    def codes(self, kind: str, fixed: float) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = gpu.gated_quantized(self.gate, self.up, self.activation, kind, fixed)
        return pair


@dataclass(frozen=True, slots=True)
class Adaptation:
    """What adapters of its rows make of a product."""

    site: Any  # a GpuSite
    slots: Tensor  # by row
    replaces: bool

    def multiply(self, kernel: Any, x: Any, out_dtype: torch.dtype) -> Tensor:
        plain = tensor(x)
        sums = self.site.begin(plain, self.slots)
        y = multiply(kernel, x, out_dtype)
        self.site.finish(plain, self.slots, y, sums, self.replaces)
        return y


class Product:
    """The product with one matrix, or with several joined ones, computed when it is known what its reader can fuse.
    `full`: a result that is there already; kernel and x are None then. `adapt`: changes the whole result, given x: then
    nothing is fused."""

    def __init__(
        self,
        kernel: Any,
        x: Any,
        out_dtype: torch.dtype = torch.bfloat16,
        full: Tensor | None = None,
        adapt: Adaptation | None = None,
    ) -> None:
        self._kernel, self._x, self._out_dtype, self._full = kernel, x, out_dtype, full
        self._adapt = adapt

    def full(self) -> Tensor:
        """All columns, nothing fused."""
        if self._full is None:
            if self._adapt is None:
                self._full = multiply(self._kernel, self._x, self._out_dtype)
            else:
                self._full = self._adapt.multiply(self._kernel, self._x, self._out_dtype)
        return self._full

    @property
    def _fuses(self) -> bool:
        return self._adapt is None and isinstance(self._kernel, gpu.GpuLinear)

    @property
    def gates(self) -> bool:
        return self._fuses and self._kernel.gates(num_rows(self._x))

    def gated(self) -> Tensor:
        return multiply(self._kernel, self._x, self._out_dtype, gated=True)

    @property
    def rotates(self) -> bool:
        return self._fuses and self._kernel.rotates(num_rows(self._x))

    def rotated(self, heads: Any) -> Tensor:
        """The queries; keys and values are stored where `heads` (a HeadPlaces) says."""
        return multiply(self._kernel, self._x, self._out_dtype, heads=heads)


@dataclass(slots=True, eq=False)
class Columns:
    """Columns [begin, end) of a product; for heads, with the norm and the rotation that attention will apply."""

    product: Product
    begin: int
    end: int
    norm: Tensor | None = None
    eps: float = 0.0
    rotary: RotaryTable | None = None

    @property
    def plain(self) -> Tensor:
        """Without norm and rotation."""
        return self.product.full()[:, self.begin : self.end]

    @property
    def tensor(self) -> Tensor:
        assert self.norm is None and self.rotary is None, "heads are read by attention only"  # noqa: PT018
        return self.plain


class Convolved:
    """The output of a convolution, computed once, when it is known whether the scan behind it does that itself."""

    def __init__(self, spec: ConvolutionSpec, x: Tensor, compute: Callable[[], Tensor]) -> None:
        self.spec, self.x, self._compute = spec, x, compute
        self._plain: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        return self._plain is not None

    def plain(self) -> Tensor:
        if self._plain is None:
            self._plain = self._compute()
        return self._plain


def tensor(value: Any) -> Tensor:
    """A value as a plain tensor."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Total):
        return value.norm.total
    if isinstance(value, Columns):
        return value.tensor
    assert isinstance(value, (Norm, Gate, Convolved)), type(value)
    return value.plain()


def num_rows(value: Any) -> int:
    count: int = value.num_rows if isinstance(value, (Norm, Gate)) else tensor(value).shape[0]
    return count


def multiply(kernel: Any, x: Any, out_dtype: torch.dtype, gated: bool = False, heads: Any = None) -> Tensor:
    """x @ W^T by a kernel that may want x in 8 bits; `gated`, `heads`: only if the kernel supports them."""
    y: Tensor
    if not isinstance(kernel, gpu.GpuLinear):  # the torch spec, or some rows of a joined matrix
        y = kernel(tensor(x).float()).to(out_dtype)
    elif isinstance(x, (Norm, Gate)) and kernel.takes_codes(x.num_rows):
        codes = x.codes(kernel.activations, kernel.input_scale)
        y = kernel.multiply_quantized(*codes, out_dtype, gated=gated, heads=heads)
    else:
        y = kernel.multiply(tensor(x), out_dtype, gated=gated, heads=heads)
    return y


def split_columns(values: Tensor, widths: Sequence[int], heads: int) -> list[Tensor]:
    """Columns of `values`, which is `heads` slices, each split in parts of these widths; those of all heads together.
    One pass at most; parts lie side by side."""
    if heads > 1:
        values = values.index_select(1, _by_part(tuple(widths), heads, values.device))
    return list(values.split([heads * width for width in widths], dim=1))


@cache
def _by_part(widths: tuple[int, ...], heads: int, device: torch.device) -> Tensor:
    columns = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([part.flatten() for part in columns.split(list(widths), dim=1)]).to(device)


def join_columns(parts: Sequence[Tensor]) -> Tensor:
    """Tensors side by side: a view where they lie so already."""
    first, width = parts[0], sum(part.shape[1] for part in parts)
    same = {(part.untyped_storage().data_ptr(), part.stride(), part.dtype) for part in parts}
    follow = all(two.storage_offset() == one.storage_offset() + one.shape[1] for one, two in pairwise(parts))
    if len(same) == 1 and follow and first.stride(0) >= width:
        return first.as_strided((first.shape[0], width), first.stride())
    return torch.cat(list(parts), dim=1)


def are_adjacent_columns(*parts: Columns) -> bool:
    """Whether these are, in order and from the first, the columns of one product."""
    return parts[0].begin == 0 and all(
        one.product is other.product and one.end == other.begin for one, other in pairwise(parts)
    )
