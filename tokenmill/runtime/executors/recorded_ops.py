"""Ops that record a forward pass into the C++ program: values are numbers of its buffers.

Called once per model, by the recorded executor. Weights and tables are tensors or numpy arrays; the program reads both
in place, so whatever it points into is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tokenmill.kernels import cpu
from tokenmill.kernels.cpu import CpuLinear
from tokenmill.kernels.cpu_recurrent import bound_recurrence
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.rotary import RotaryTable

if TYPE_CHECKING:
    from torch import Tensor

    from tokenmill.kernels.routing import RoutingSpec
    from tokenmill.model.formats.stacks import ExpertStacks
    from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec


class RecordedOps:
    """Ops whose values are numbers of the program's buffers. `keep` holds every tensor that the program points into."""

    def __init__(self, program: Any, store: KVStore) -> None:
        self._program = program
        self._store = store
        self.keep: list[Any] = []
        self.products: dict[int, int] = {}  # by identity of the first weight: the number of the product

    def embed(self, table: LinearWeight, scale: float) -> int:
        value: int
        if table.kernel is not None:
            packed = kernel_of(table).packed  # tied to the head: one copy serves both
            self.keep.append(packed)
            value = self._program.embed_packed(packed, scale)
        else:
            (data,) = table.parts().values()
            value = self._program.embed(
                table.type_name, self._kept(cpu.as_bytes(data)), table.out_features, table.in_features, scale
            )
        return value

    def add_positions(self, x: int, table: Tensor) -> int:
        value: int = self._program.add_positions(x, self._kept(table))
        return value

    def rms_norm(self, x: int, weight: Tensor, eps: float, head_dim: int = 0) -> int:
        value: int = self._program.rms_norm(x, self._kept(weight), eps, head_dim)
        return value

    def layer_norm(self, x: int, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> int:
        kept = None if bias is None else self._kept(bias)
        value: int = self._program.layer_norm(x, self._kept(weight), kept, eps, head_dim)
        return value

    def scale(self, x: int, factor: float) -> int:
        value: int = self._program.scale(x, factor)
        return value

    def add(self, x: int, y: int) -> int:
        value: int = self._program.add(x, y)
        return value

    def add_rms_norm(self, x: int, y: int, weight: Tensor, eps: float) -> tuple[int, int]:
        values: tuple[int, int] = self._program.add_rms_norm(x, y, self._kept(weight), eps)
        return values

    def linear(self, x: int, weights: Sequence[LinearWeight]) -> list[int]:
        kernels = [kernel_of(weight) for weight in weights]
        self.keep += kernels
        self.products[id(weights[0])] = self._program.num_products
        values: list[int] = self._program.linear(
            x, [kernel.packed for kernel in kernels], [kernel.bias for kernel in kernels]
        )
        return values

    def rope(self, x: int, table: RotaryTable, head_dim: int) -> int:
        cos, sin = self._kept(table.cos), self._kept(table.sin)
        value: int = self._program.rope(x, cos, sin, head_dim, table.interleaved)
        return value

    def attention(self, q: int, k: int, v: int, spec: AttentionSpec) -> int:
        group, slot = self._store.layout.place(spec.layer)
        pages = self._store.kernel_pages(slot)
        assert pages is not None, self._store.name  # checked by `declines`
        self.keep.append(pages)
        value: int = self._program.attention(
            q,
            k,
            v,
            pages.bound,
            group,
            spec.num_heads,
            spec.scale,
            spec.window,
            spec.softcap,
            spec.chunk,
            None if spec.sinks is None else self._kept(spec.sinks),
        )
        return value

    def latent_attention(
        self,
        q: int,
        kv: int,
        norm: Tensor,
        eps: float,
        rotary: RotaryTable,
        projections: HeadProjections,
        spec: LatentSpec,
    ) -> int:
        group, slot = self._store.layout.place(spec.layer)
        pages = self._store.kernel_pages(slot)
        assert pages is not None, self._store.name  # checked by `declines`
        self.keep.append(pages)
        cos, sin = self._kept(rotary.cos), self._kept(rotary.sin)
        keys, values = self._kept(projections.keys), self._kept(projections.values)
        value: int = self._program.latent_attention(
            q, kv, self._kept(norm), eps, cos, sin, rotary.interleaved, keys, values, pages.bound, group, spec.scale
        )
        return value

    def gated(self, gate: int, up: int, activation: str) -> int:
        value: int = self._program.gated(gate, up, activation)
        return value

    def experts(self, x: int, router: LinearWeight, stacks: ExpertStacks, routing: RoutingSpec) -> int:
        (logits,) = self.linear(x, [router])
        kernels = [kernel_of(block) for block in stacks.blocks()]
        self.keep += kernels
        bias = routing.correction_bias
        settings = {each.name: getattr(routing, each.name) for each in fields(routing)}
        value: int = self._program.experts(
            x,
            logits,
            [kernel.packed for kernel in kernels],
            [kernel.bias for kernel in kernels],
            {**settings, "correction_bias": [] if bias is None else bias.tolist()},
        )
        return value

    def gate_rows(self, x: int, gate: int) -> int:
        value: int = self._program.gate_rows(x, gate)
        return value

    def activate(self, x: int, activation: str) -> int:
        value: int = self._program.activate(x, activation)
        return value

    def split(self, x: int, widths: Sequence[int], heads: int = 1) -> list[int]:
        values: list[int] = self._program.split(x, list(widths), heads)
        return values

    def join(self, values: Sequence[int]) -> int:
        value: int = self._program.join(list(values))
        return value

    def convolve(self, x: int, spec: ConvolutionSpec) -> int:
        return self._continue((x,), spec)

    def scan(self, inputs: Sequence[int], spec: ScanSpec) -> int:
        return self._continue(inputs, spec)

    def _continue(self, inputs: Sequence[int], spec: ConvolutionSpec | ScanSpec) -> int:
        """An op that continues the state of each sequence."""
        states = self._store.states.array(spec.layer, spec.array)
        arguments = [self._kept(each) if hasattr(each, "dtype") else each for each in spec.arguments()]
        self.keep.append(states)
        value: int = self._program.recurrence(list(inputs), bound_recurrence(spec.op, states, *arguments))
        return value

    def gated_norm(
        self, x: int, gate: int, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> int:
        weight = self._kept(weight if len(weight.shape) == 2 else weight[None])
        value: int = self._program.gated_norm(x, gate, weight, eps, norm_first, gate_scale)
        return value

    def select_rows(self, x: int) -> int:
        value: int = self._program.select_rows(x)
        return value

    def softcap(self, x: int, cap: float) -> int:
        value: int = self._program.softcap(x, cap)
        return value

    def _kept(self, tensor: Any) -> Any:
        kept = cpu.contiguous(tensor)
        self.keep.append(kept)
        return kept


def kernel_of(weight: LinearWeight) -> CpuLinear:
    assert weight.kernel is not None
    kernel: Any = weight.kernel.run
    assert isinstance(kernel, CpuLinear), weight.type_name  # checked by `declines`
    return kernel
