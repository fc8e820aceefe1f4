"""The recorded executor: the forward pass is described once to the C++ program, then each step is one call.

`RecordedOps` implements Ops by recording what the model does; values are buffer numbers. `RecordedExecutor` replays it
for any batch up to the sizes it was recorded for. Same results as the eager executor up to the order of float sums.
Declines models with weights or KV pages that the C++ kernels do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import cpu
from tokenmill.kernels.cpu import CpuLinear
from tokenmill.kernels.cpu_adapters import RecordedSite, pack_embedding
from tokenmill.kernels.cpu_recurrent import bound_recurrence
from tokenmill.kernels.ref_adapters import EmbeddingPart
from tokenmill.kernels.ref_experts import RoutingSpec
from tokenmill.model.adapters import AdapterSite
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.experts import expert_layers
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec
from tokenmill.runtime.executors.base import StepInput, StepOutput
from tokenmill.runtime.executors.batched import BatchedExecutor, copied_rows
from tokenmill.types import Batch

_ROUNDED_BYTES = 1.5  # of a weight, up to which adapters are rounded to int8: a base of floats has 2 or more
_EXPERT_ACTIVATIONS = {"silu", "gelu_tanh"}  # that the C++ kernel of experts computes


class RecordedExecutor(BatchedExecutor):
    name = "recorded"
    runs_greedily = True
    takes_trees = True

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        self._has_states = bool(store.layout.states)
        self.takes_trees = not self._has_states  # a state goes on along one branch only
        # A step never holds more tokens than the budget, nor more sequences than may run at once.
        self._tokens = max(config.batch_tokens, config.concurrency)
        self._pool = cpu.pool()
        program = cpu.module().Program(self._tokens, config.concurrency, self._pool)
        ops = RecordedOps(program, store)
        hidden = model.decoder.forward(ops)
        program.end_body()
        program.finish(model.decoder.logits(ops, hidden))
        self._program = program
        self._keep = ops.keep
        self._products = ops.products
        self._hidden: Tensor = program.value(hidden)
        vocabulary = model.decoder.description.vocab_size
        self._logits = torch.empty(min(config.concurrency, self.max_logit_rows), vocabulary)

    @classmethod
    def declines(cls, model: LoadedModel, store: KVStore) -> str | None:
        reason = cpu.unavailable(model.device)
        if reason is not None:
            return reason
        has_pages = any(group.layers for group in store.layout.groups)
        if has_pages and any(store.kernel_pages(slot) is None for slot in range(store.layout.layers_per_page)):
            return f"KV pages of type {store.name} have no C++ kernel here"
        for name, weight in model.weights.items():
            kernel = weight.kernel.run if weight.kernel is not None else None
            if kernel is not None and not isinstance(kernel, (CpuLinear, HeadProjections)):
                return f"{name} ({weight.type_name}) has no C++ kernel"
        activations = {layer.routing.activation for layer in expert_layers(model.decoder.blocks)}
        if activations - _EXPERT_ACTIVATIONS:
            return f"experts with activation {', '.join(sorted(activations - _EXPERT_ACTIVATIONS))} have no C++ kernel"
        table = model.decoder.embedding
        if table.kernel is None and not cpu.can_look_up(table):
            return f"the embedding ({table.type_name}) has no C++ lookup"
        return None

    @property
    def nbytes(self) -> int:
        """Buffers of the program: activations, partial attention, scratch."""
        size: int = self._program.nbytes
        return size

    def hold_adapters(self, num_slots: int, max_rank: int) -> None:
        self._program.hold_adapters(num_slots)
        super().hold_adapters(num_slots, max_rank)
        assert self.adapters is not None
        self.adapters.watch_embeddings(self._set_embedding)

    def make_site(self, weights: Sequence[LinearWeight], num_slots: int, max_rank: int) -> AdapterSite:  # noqa: ARG002
        shapes = [(weight.out_features, weight.in_features) for weight in weights]
        packed = sum(_kernel(weight).nbytes for weight in weights)
        exact = packed > _ROUNDED_BYTES * sum(rows * columns for rows, columns in shapes)
        return RecordedSite(self._program, self._products[id(weights[0])], shapes, exact)

    def _set_embedding(self, slot: int, part: EmbeddingPart | None) -> None:
        self._program.set_embedding(slot, None if part is None else pack_embedding(part))

    def forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden], where batch.all_hidden; logits are computed in the same call when they are few
        enough to keep."""
        rows = batch.logit_rows.shape[0]
        if batch.begins:
            self.store.states.clear(batch.begins)
        self._run(batch, batch.logit_rows, body=True, head=0 < rows <= self.max_logit_rows)
        return self._hidden[: batch.token_ids.shape[0]]

    def logits(self, _hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        """Float32 logits of batch.logit_rows[begin:end], until the next call. The program kept the hidden state."""
        if batch.logit_rows.shape[0] <= self.max_logit_rows:
            return self._logits[begin:end]
        self._run(batch, batch.logit_rows[begin:end], body=False, head=True)
        return self._logits[: end - begin]

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        if len(work.rows) <= self.max_logit_rows and work.decodes and self._one_token_each(work):
            return self._decode(work)
        return super().step(work)

    def settle_drafts(self, kept: Sequence[int]) -> None:
        if self._has_states:
            self._program.settle(list(kept))

    def _one_token_each(self, work: StepInput) -> bool:
        return not work.drafts or all(work.length(number) == 1 for number in range(len(work.rows)))

    def _decode(self, work: StepInput) -> StepOutput[Tensor]:
        """One call into C++ for batch, forward pass and argmax: plain lists go in, token ids come back."""
        plain = self.sampler.is_plain([row.request for row in work.rows])
        steps = self._decode_greedily(work, work.max_run if plain else 1)
        return StepOutput(
            logits=lambda begin, end: self._logits[begin:end],
            hidden=lambda tokens: copied_rows(self._hidden, tokens),
            tokens=steps[-1] if plain else None,
            runs=[list(tokens) for tokens in zip(*steps, strict=True)] if len(steps) > 1 else None,
        )

    def _decode_greedily(self, work: StepInput, steps: int) -> list[list[int]]:
        """Up to `steps` decodes, each from the largest logits of the one before, until a row has chosen one of its stop
        ids. The tokens of each step, by row."""
        rows = work.rows
        begins = [row.state_slot for row in rows if row.start == 0] if self._has_states else []
        if begins:
            self.store.states.clear(begins)
        if len(rows) > self._logits.shape[0]:
            self._logits = torch.empty(len(rows), self._logits.shape[1])
        best: list[list[int]] = self._program.decode(
            [self._token(work, number) for number in range(len(rows))]
            if work.drafts
            else [row.request.token_ids[row.start] for row in rows],
            [row.start for row in rows],
            [list(tables) for tables in zip(*(row.block_tables for row in rows), strict=True)],
            self._logits.data_ptr(),
            steps,
            [list(row.request.stop_ids) for row in rows] if steps > 1 else [],
            [row.state_slot for row in rows] if self._has_states else [],
            [row.adapter_slot for row in rows] if any(row.adapter_slot for row in rows) else [],
        )
        return best

    @staticmethod
    def _token(work: StepInput, number: int) -> int:
        (token_id,) = work.token_ids(number)
        return token_id

    def _run(self, batch: Batch, logit_rows: Tensor, body: bool, head: bool) -> None:
        rows = logit_rows.shape[0]
        if head and rows > self._logits.shape[0]:
            self._logits = torch.empty(rows, self._logits.shape[1])
        tokens, sequences = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        self._program.run(
            tokens,
            sequences,
            _address(batch.token_ids, torch.int64, tokens),
            _address(batch.positions, torch.int64, tokens),
            _address(batch.query_starts, torch.int32, sequences + 1),
            _address(batch.seq_lens, torch.int32, sequences),
            [_address(slots, torch.int64, tokens) for slots in batch.slots],
            [_address(table, torch.int32, sequences * table.shape[1]) for table in batch.block_tables],
            [table.shape[1] for table in batch.block_tables],
            rows,
            _address(logit_rows, torch.int64, rows),
            self._logits.data_ptr(),
            body,
            head,
            batch.all_hidden,
            0 if batch.ancestors is None else _address(batch.ancestors, torch.int64, tokens),
            0 if batch.state_slots is None else _address(batch.state_slots, torch.int64, sequences),
            list(batch.drafted),
            0 if batch.adapter_slots is None else _address(batch.adapter_slots, torch.int32, tokens),
        )


def _address(tensor: Tensor, dtype: torch.dtype, length: int) -> int:
    """The address of a tensor's values, after checking that they are laid out as the program reads them."""
    assert tensor.dtype == dtype, tensor.dtype
    assert tensor.is_contiguous()
    assert tensor.numel() == length, tensor.shape
    return tensor.data_ptr()


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
            packed = _kernel(table).packed  # tied to the head: one copy serves both
            self.keep.append(packed)
            value = self._program.embed_packed(packed, scale)
        else:
            (data,) = table.parts().values()
            value = self._program.embed(
                table.type_name, self._kept(data.view(torch.uint8)), table.out_features, table.in_features, scale
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
        kernels = [_kernel(weight) for weight in weights]
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
        kernels = [_kernel(block) for block in stacks.blocks()]
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
        arguments = [self._kept(each) if isinstance(each, Tensor) else each for each in spec.arguments()]
        self.keep.append(states)
        value: int = self._program.recurrence(list(inputs), bound_recurrence(spec.op, states, *arguments))
        return value

    def gated_norm(
        self, x: int, gate: int, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> int:
        weight = self._kept(weight if weight.dim() == 2 else weight.unsqueeze(0))
        value: int = self._program.gated_norm(x, gate, weight, eps, norm_first, gate_scale)
        return value

    def select_rows(self, x: int) -> int:
        value: int = self._program.select_rows(x)
        return value

    def softcap(self, x: int, cap: float) -> int:
        value: int = self._program.softcap(x, cap)
        return value

    def _kept(self, tensor: Tensor) -> Tensor:
        kept = tensor.contiguous()
        self.keep.append(kept)
        return kept


def _kernel(weight: LinearWeight) -> CpuLinear:
    assert weight.kernel is not None
    kernel: Any = weight.kernel.run
    assert isinstance(kernel, CpuLinear), weight.type_name  # checked by `declines`
    return kernel
