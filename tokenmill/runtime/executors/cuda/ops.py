"""Ops on a GPU, evaluated lazily so that adjacent ops fuse into one kernel.

A norm is computed when the product that reads it is (which may want 8-bit activations), a gate likewise; a product of
joined matrices is computed when it is known whether its kernel can also apply the gate, or rotate and store q, k and v.
Values are tensors or the small records of values.py. No call synchronizes, so a step can be captured. Used by both GPU
executors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokenmill.kernels import ref, ref_latent
from tokenmill.kernels import triton as gpu
from tokenmill.kernels.packed_pages import PackedPages
from tokenmill.kernels.ref_experts import RoutingSpec
from tokenmill.model.adapters import AdapterBank
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.attention.paged import PagedAttention
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec
from tokenmill.runtime.executors.cuda.experts import multiply_one_by_one
from tokenmill.runtime.executors.cuda.values import (
    Adaptation,
    Columns,
    Convolved,
    Gate,
    Norm,
    Product,
    Total,
    are_adjacent_columns,
    join_columns,
    multiply,
    split_columns,
    tensor,
)
from tokenmill.runtime.executors.drafted_states import DraftedStates
from tokenmill.types import Batch

FEW_ROWS = 32  # up to this many, logits are float32 from the accumulator; above, cuBLAS rounds them to 16 bits


class CudaOps:
    def __init__(
        self,
        store: KVStore,
        table: Tensor,
        batch: Batch,
        *,
        rows: Tensor | None = None,
        shared: Any = None,
        distinct: Sequence[Any] = (),
        expands: bool = False,
        drafted: DraftedStates | None = None,
        moves_states: bool = False,
        adapters: AdapterBank | None = None,
        replaces: bool = True,
    ) -> None:
        """`rows`: tokens of the batch whose logits are computed, None: all. `shared`: SharedPrefixes for layers without
        a window. `distinct`: for each KV group its DistinctPages, where long prompts read FP8 pages. `expands`: the
        step has long prompts and is not captured, so that latent attention may expand their keys and values. `drafted`:
        of a step with drafts, where recurrent layers compute. `moves_states`: no state is written where one is read.
        `adapters`: what the batch's adapter slots refer to. `replaces`: rows may have adapters with whole matrices; a
        captured step has none, and must not remember those that other slots hold while it is captured."""
        self._store, self._table, self._batch = store, table, batch
        self._dtype = table.dtype  # of activations
        self._rows, self._shared, self._distinct, self._drafted = rows, shared, distinct, drafted
        self._expands, self._lengths = expands, ([0], [0])
        self._moves_states = moves_states
        self._adapters = None if batch.adapter_slots is None else adapters
        self._replaces = replaces
        self._slots = None if batch.adapter_slots is None or rows is None else batch.adapter_slots[rows]

    def embed(self, table: LinearWeight, scale: float) -> Tensor:  # noqa: ARG002 (a copy is on the device)
        ids = self._batch.token_ids
        if self._adapters is not None and self._replaces and self._adapters.embeddings:
            return (self._adapters.embed(ids, self._adapter_slots, self._table[ids].float()) * scale).to(self._dtype)
        rows: Tensor = gpu.embed(ids, self._table, scale, self._dtype)
        return rows

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        rows = table[self._batch.positions.clamp(0, table.shape[0] - 1)]  # padding rows have no position
        return (x.float() + rows).to(x.dtype)

    def layer_norm(self, x: Any, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
        y: Tensor = gpu.layer_norm(tensor(x), weight, bias, eps, head_dim)
        return y

    def scale(self, x: Any, factor: float) -> Tensor:
        return tensor(x) * factor

    def rms_norm(self, x: Any, weight: Tensor, eps: float, head_dim: int = 0) -> Any:
        if head_dim:
            x = _columns(x)
            return Columns(x.product, x.begin, x.end, weight, eps)
        return Norm(tensor(x).contiguous(), None, weight, eps)

    def add(self, x: Any, y: Any) -> Tensor:
        z: Tensor = gpu.add(tensor(x), tensor(y))
        return z

    def add_rms_norm(self, x: Any, y: Any, weight: Tensor, eps: float) -> tuple[Total, Norm]:
        norm = Norm(tensor(x), tensor(y), weight, eps)
        return Total(norm), norm

    def linear(self, x: Any, weights: Sequence[LinearWeight]) -> list[Any]:
        kernels: list[Any] = [weight.kernel.run for weight in weights if weight.kernel is not None]
        x = x.contiguous() if isinstance(x, Tensor) else x  # parts of a split lie apart
        joined = _joined_matrix(kernels)
        site: Any = None if self._adapters is None else self._adapters.site(weights)
        adapt = None if site is None else Adaptation(site, self._adapter_slots, self._replaces)
        if joined is not None:
            product = Product(joined, x, self._dtype, adapt=adapt)
            return [Columns(product, kernel.begin, kernel.end) for kernel in kernels]
        if len(kernels) == 1:
            return [Product(kernels[0], x, self._out_dtype(weights[0]), adapt=adapt).full()]
        if site is not None:
            outputs = [
                multiply(kernel, x, self._out_dtype(each)) for kernel, each in zip(kernels, weights, strict=True)
            ]
            site.adapt(tensor(x), self._adapter_slots, outputs, self._replaces)
            return [Columns(Product(None, None, full=y), 0, y.shape[1]) for y in outputs]
        return [
            Columns(Product(kernel, x, self._out_dtype(weight)), 0, weight.out_features)
            for kernel, weight in zip(kernels, weights, strict=True)
        ]

    @property
    def _adapter_slots(self) -> Tensor:
        slots = self._batch.adapter_slots if self._slots is None else self._slots
        assert slots is not None
        return slots

    def _out_dtype(self, weight: LinearWeight) -> torch.dtype:
        """float32 for the logits of a few rows; everything else has the type of activations."""
        few = self._batch.token_ids.shape[0] <= FEW_ROWS if self._rows is None else self._rows.shape[0] <= FEW_ROWS
        is_head = weight.out_features == self._table.shape[0]
        return torch.float32 if is_head and few else self._dtype

    def rope(self, x: Any, table: RotaryTable, head_dim: int) -> Columns:  # noqa: ARG002
        x = _columns(x)
        return Columns(x.product, x.begin, x.end, x.norm, x.eps, table)

    def attention(self, q: Any, k: Any, v: Any, spec: AttentionSpec) -> Tensor:
        q, k, v = _columns(q), _columns(k), _columns(v)
        batch, table = self._batch, q.rotary or _no_rotation(self._batch.positions)
        group, slot = self._store.layout.place(spec.layer)
        plain = not table.rotates_keys or spec.chunk > 0
        if plain or self._store.gpu_declines(slot) is not None:
            return self._plain_attention(q, k, v, spec, group, slot)
        norms = None if q.norm is None or k.norm is None else (q.norm, k.norm)
        packed = self._store.packed_pages(slot)
        if packed is not None and spec.sinks is not None:
            return self._plain_attention(q, k, v, spec, group, slot)
        if packed is not None:
            return self._packed_attention(q, k, v, spec, packed, norms, group)
        k_pages, v_pages = self._store.stored(slot)
        scales = self._store.scales(slot)
        store_arguments = (
            k_pages,
            v_pages,
            batch.positions,
            batch.slots[group],
            table.cos,
            table.sin,
            table.interleaved,
        )
        out: Tensor
        whole = table.rotary_dim == spec.head_dim
        if whole and norms is None and are_adjacent_columns(q, k, v) and q.product.rotates:
            heads = gpu.head_places(batch.positions.shape[0], spec.num_heads, *store_arguments, scales, self._dtype)
            queries = q.product.rotated(heads)
        else:
            joined = _side_by_side(q, k, v)
            queries = gpu.rope_store(joined, spec.num_heads, *store_arguments, norms=norms, eps=q.eps, scales=scales)
        out = gpu.paged_attention(
            queries,
            k_pages,
            v_pages,
            batch.block_tables[group],
            batch.query_starts,
            batch.seq_lens,
            spec.scale,
            spec.window,
            spec.softcap,
            max_query=batch.max_query,
            max_seq=batch.max_seq,
            scales=scales,
            sinks=spec.sinks,
            shared=None if spec.window else self._shared,
            distinct=self._distinct[group] if self._distinct else None,
        )
        return out

    def _plain_attention(
        self, q: Columns, k: Columns, v: Columns, spec: AttentionSpec, group: int, slot: int
    ) -> Tensor:
        """For pages that no GPU kernel supports: norms, rotation, storing and attention by the torch spec, op by op."""
        batch = self._batch
        queries, keys, values = (_plain_heads(each, batch.positions, spec.head_dim) for each in (q, k, v))
        self._store.write(slot, batch.slots[group], keys, values)
        backend = PagedAttention(self._store, "ref")
        return backend.attend(queries, slot, batch.block_tables[group], batch, spec).to(self._dtype)

    def _packed_attention(
        self,
        q: Columns,
        k: Columns,
        v: Columns,
        spec: AttentionSpec,
        pages: PackedPages,
        norms: tuple[Tensor, Tensor] | None,
        group: int,
    ) -> Tensor:
        """Over quantized rows."""
        batch, table, eps = self._batch, q.rotary, q.eps
        positions = batch.positions
        if table is None or table.rotary_dim != spec.head_dim:  # the kernel rotates whole heads: by nothing
            q, k = (_columns(_plain_heads(each, positions, spec.head_dim).to(self._dtype)) for each in (q, k))
            norms, positions = None, torch.zeros_like(positions)
            ones = torch.ones(1, spec.head_dim // 2, device=positions.device)
            table = RotaryTable(ones, torch.zeros_like(ones), False)
        rotary = (positions, batch.slots[group], table.cos, table.sin, table.interleaved)
        queries = gpu.rope_store_packed(_side_by_side(q, k, v), spec.num_heads, pages, *rotary, norms=norms, eps=eps)
        lengths = (batch.block_tables[group], batch.query_starts, batch.seq_lens)
        return gpu.packed_attention(
            queries, pages, *lengths, spec.scale, spec.window, spec.softcap,
            max_query=batch.max_query, max_seq=batch.max_seq,
        )  # fmt: skip

    def latent_attention(
        self,
        q: Any,
        kv: Any,
        norm: Tensor,
        eps: float,
        rotary: RotaryTable,
        projections: HeadProjections,
        spec: LatentSpec,
    ) -> Tensor:
        batch, store = self._batch, self._store
        group, slot = store.layout.place(spec.layer)
        queries, rows = tensor(q), tensor(kv)
        lengths = (batch.block_tables[group], batch.query_starts, batch.seq_lens)
        if store.gpu_declines(slot) is not None:  # by the torch spec, op by op
            turn = (batch.positions, rotary.cos, rotary.sin)
            rows = ref_latent.latent_rows(rows.float(), norm, eps, *turn, rotary.interleaved)
            store.write(slot, batch.slots[group], rows, rows)
            width = spec.nope_dim + spec.rope_dim
            turned = ref_latent.rotate_tails(queries.float().contiguous(), *turn, width, rotary.interleaved)
            absorbed = ref_latent.absorb(turned, projections.keys)
            attended = PagedAttention(store, "ref").attend(absorbed, slot, lengths[0], batch, spec.absorbed)
            return ref_latent.project(attended, projections.values).to(self._dtype)
        pages, _ = store.stored(slot)
        scales = store.scales(slot)
        scale = None if scales is None else scales[0]
        tails = gpu.latent_inputs(
            queries, rows, norm, eps, pages, batch.positions, batch.slots[group], rotary.cos, rotary.sin,
            rotary.interleaved, spec.num_heads, scale,
        )  # fmt: skip
        return gpu.latent_paged_attention(
            queries, tails, projections.keys, projections.values, pages, *lengths, spec.scale,
            max_query=batch.max_query, max_seq=batch.max_seq, row_scale=scale,
            prompts=self._long_prompts(projections) if self._expands else (),
        )  # fmt: skip

    def _long_prompts(self, projections: HeadProjections) -> Sequence[Any]:
        if len(self._lengths[0]) == 1:  # for the first layer: the host waits for the device here
            self._lengths = (self._batch.query_starts.tolist(), self._batch.seq_lens.tolist())
        prompts: Sequence[Any] = gpu.prompts_to_expand(*self._lengths, projections.keys, projections.values)
        return prompts

    def gated(self, gate: Any, up: Any, activation: str) -> Gate | Tensor:
        halves = isinstance(gate, Columns) and isinstance(up, Columns) and are_adjacent_columns(gate, up)
        if halves and activation == "silu" and gate.end == up.end - up.begin and gate.product.gates:
            product: Product = gate.product
            return product.gated()
        return Gate(tensor(gate), tensor(up), activation)

    def experts(self, x: Any, router: LinearWeight, stacks: ExpertStacks, routing: RoutingSpec) -> Tensor:
        assert router.kernel is not None
        logits = multiply(router.kernel.run, x, torch.float32)
        if stacks.kernel is None:
            return multiply_one_by_one(tensor(x), logits, stacks, routing)
        y: Tensor = stacks.kernel.run(tensor(x), logits)
        return y

    def gate_rows(self, x: Any, gate: Any) -> Tensor:
        return ref.gate_rows(tensor(x).float(), tensor(gate).float()).to(self._dtype)

    def activate(self, x: Any, activation: str) -> Tensor:
        return ref.activate(tensor(x), activation)

    def split(self, x: Any, widths: Sequence[int], heads: int = 1) -> list[Tensor]:
        return split_columns(tensor(x), widths, heads)

    def join(self, values: Sequence[Any]) -> Tensor:
        return join_columns([tensor(value) for value in values])

    def convolve(self, x: Any, spec: ConvolutionSpec) -> Convolved:
        rows = tensor(x)
        return Convolved(spec, rows, lambda: self._continue((rows,), spec))

    def scan(self, inputs: Sequence[Any], spec: ScanSpec) -> Tensor:
        first = inputs[0]
        if not self._moves_states or not isinstance(first, Convolved) or first.is_computed:
            return self._continue(inputs, spec)
        states = self._store.states.array(first.spec.layer, first.spec.array)
        convolution = gpu.Convolution(states, *first.spec.arguments())
        return self._continue((first.x, *inputs[1:]), spec, convolution=convolution)

    def _continue(self, inputs: Sequence[Any], spec: ConvolutionSpec | ScanSpec, **keywords: Any) -> Tensor:
        """Run an op that continues the state of each sequence."""
        batch, run = self._batch, gpu.find_op(spec.op)
        assert run is not None
        rows = [tensor(each) for each in inputs]
        states = self._store.states.array(spec.layer, spec.array)
        if self._drafted is not None:
            return self._drafted.run(run, rows, states, spec)
        if batch.state_targets is not None:
            keywords["targets"] = batch.state_targets
        y: Tensor = run(*rows, states, batch.state_slots, batch.query_starts, *spec.arguments(), **keywords)
        return y

    def gated_norm(
        self, x: Any, gate: Any, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> Tensor:
        y: Tensor = gpu.gated_norm(tensor(x), tensor(gate), weight, eps, norm_first, gate_scale)
        return y

    def select_rows(self, x: Tensor) -> Tensor:
        return x if self._rows is None else x[self._rows]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        y: Tensor = gpu.softcap(x, cap)
        return y


def _joined_matrix(kernels: list[Any]) -> Any:
    """The joined matrix whose rows these kernels are, all of them and in order; None if there is none."""
    if not all(isinstance(kernel, gpu.JoinedRows) for kernel in kernels):
        return None
    joined, end = kernels[0].whole, 0
    for kernel in kernels:
        if kernel.whole is not joined or kernel.begin != end:
            return None
        end = kernel.end
    return joined if end == joined.rows else None


def _plain_heads(columns: Columns, positions: Tensor, head_dim: int) -> Tensor:
    """float32 [T, heads * head_dim] with norm and rotation applied."""
    x = columns.plain.float()
    if columns.norm is not None:
        x = ref.rms_norm(x.contiguous(), columns.norm, columns.eps, head_dim)
    table = columns.rotary
    return x if table is None else ref.rope(x, positions, table.cos, table.sin, head_dim, table.interleaved)


def _no_rotation(positions: Tensor) -> RotaryTable:
    empty = torch.empty(1, 0, device=positions.device)
    return RotaryTable(empty, empty, False)


def _columns(value: Any) -> Columns:
    if isinstance(value, Columns):
        return value
    values = tensor(value)
    return Columns(Product(None, None, full=values), 0, values.shape[1])


def _side_by_side(q: Columns, k: Columns, v: Columns) -> Tensor:
    return q.product.full() if are_adjacent_columns(q, k, v) else torch.cat([each.plain for each in (q, k, v)], 1)
