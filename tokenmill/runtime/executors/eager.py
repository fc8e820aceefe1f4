"""The eager executor: Ops on real tensors, one call per op through the op table. The reference for all others.

Runs every architecture, weight format and KV store on every device: what no faster backend supports is computed by the
torch spec (kernels/ref.py), and with `kernels="ref"` everything is. One EagerOps is bound to one batch. Holds no
state between steps except the model, the KV store and the chosen kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.kernels import ref_latent
from tokenmill.kernels.base import Choice, select
from tokenmill.kernels.ref_experts import RoutingSpec, route, run_experts
from tokenmill.model.attention import choose_attention
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.attention.latent import HeadProjections, LatentSpec
from tokenmill.model.attention.paged import float_pages
from tokenmill.model.formats.base import LinearWeight
from tokenmill.model.formats.stacks import ExpertStacks
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.layers.rotary import RotaryTable
from tokenmill.model.loader import LoadedModel
from tokenmill.model.state.specs import ConvolutionSpec, ScanSpec
from tokenmill.runtime.executors.batched import BatchedExecutor
from tokenmill.runtime.executors.drafted_states import DraftedStates
from tokenmill.runtime.executors.shared_experts import run_shared_experts
from tokenmill.runtime.executors.tree_attention import attend_along_branches
from tokenmill.types import Batch

FORWARD_OPS = (
    "rms_norm",
    "layer_norm",
    "add",
    "add_rms_norm",
    "add_positions",
    "scale",
    "gated",
    "gate_rows",
    "activate",
    "softcap",
    "rope",
    "store_kv",
    "attention",
)
RECURRENT_OPS = ("convolve", "mamba_scan", "mamba2_scan", "delta_scan", "gated_norm")
OPS = (*FORWARD_OPS, "argmax")  # the last is the sampler's


class EagerExecutor(BatchedExecutor):
    name = "eager"

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig) -> None:
        super().__init__(model, store, config)
        states = store.layout.states
        self.takes_trees = not store.is_coded and not states  # an accepted branch is moved token by token
        self.attention = choose_attention(store, model.kernels)
        ops = (*OPS, *RECURRENT_OPS) if states else OPS
        self.choices: dict[str, Choice] = {op: select(op, model.device, model.kernels) for op in ops}
        self.run: dict[str, Callable[..., Any]] = {op: choice.run for op, choice in self.choices.items()}
        paged = [layer for group in store.layout.groups for layer in group.layers]
        self.group_slots = {layer: store.layout.place(layer) for layer in (*paged, *dict(store.layout.shared))}
        self.drafted: DraftedStates | None = None  # of the step before, while its drafts are not settled

    @classmethod
    def declines(cls, _model: LoadedModel, _store: KVStore) -> str | None:
        return None

    def keep_layers(self, layers: tuple[int, ...]) -> str:
        self.model.decoder.kept_layers = layers
        return ""

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.begin(batch)
        hidden: Tensor = self.model.decoder.forward(EagerOps(self, batch))
        return hidden

    def begin(self, batch: Batch) -> None:
        """What comes before the first op of a step."""
        self.store.prepare(batch)
        self.drafted = DraftedStates(batch) if batch.drafted else None
        if batch.begins:
            self.store.states.clear(batch.begins)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, batch: Batch, begin: int, end: int) -> Tensor:
        ops = EagerOps(self, batch, batch.logit_rows[begin:end])
        logits: Tensor = self.model.decoder.logits(ops, hidden)
        return logits.float()

    @torch.inference_mode()
    def settle_drafts(self, kept: Sequence[int]) -> None:
        if self.drafted is not None:
            self.drafted.settle(kept)
            self.drafted = None


class EagerOps:
    absorbs: ClassVar[bool] = False  # latent attention is always computed over the rows, by `attention`

    def __init__(self, executor: EagerExecutor, batch: Batch, rows: Tensor | None = None) -> None:
        self._executor = executor
        self._batch = batch
        self._rows = rows
        self._run = executor.run
        self._adapters = None if batch.adapter_slots is None else executor.adapters
        slots = batch.adapter_slots
        self._slots = slots if rows is None or slots is None else slots[rows]

    def embed(self, table: LinearWeight, scale: float) -> Tensor:  # noqa: ARG002 (the model holds the table)
        rows = self._executor.model.embed(self._batch.token_ids)
        if self._adapters is not None and self._slots is not None:
            rows = self._adapters.embed(self._batch.token_ids, self._slots, rows)
        return rows if scale == 1.0 else rows * scale

    def add_positions(self, x: Tensor, table: Tensor) -> Tensor:
        y: Tensor = self._run["add_positions"](x, table, self._batch.positions)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, head_dim: int = 0) -> Tensor:
        y: Tensor = self._run["rms_norm"](x, weight, eps, head_dim)
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, head_dim: int = 0) -> Tensor:
        y: Tensor = self._run["layer_norm"](x, weight, bias, eps, head_dim)
        return y

    def scale(self, x: Tensor, factor: float) -> Tensor:
        y: Tensor = self._run["scale"](x, factor)
        return y

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = self._run["add"](x, y)
        return z

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        pair: tuple[Tensor, Tensor] = self._run["add_rms_norm"](x, y, weight, eps)
        return pair

    def linear(self, x: Tensor, weights: Sequence[LinearWeight]) -> list[Tensor]:
        """Of matrices that ranks share, the whole result on each of them."""
        split, group = weights[0].split, self._executor.model.group
        assert all(weight.split == split for weight in weights), "matrices of one input are split alike"
        if split == "gather":
            x = group.gather(x)
        outputs = [_product(x, weight) for weight in weights]
        site = None if self._adapters is None else self._adapters.site(weights)
        if site is not None and self._slots is not None:
            site.adapt(x, self._slots, outputs)
        if split == "sum":
            return [group.reduce(y) for y in outputs]
        return (
            [group.gather(y, weight.shares) for y, weight in zip(outputs, weights, strict=True)] if split else outputs
        )

    def rope(self, x: Tensor, table: RotaryTable, head_dim: int) -> Tensor:
        y: Tensor = self._run["rope"](x, self._batch.positions, table.cos, table.sin, head_dim, table.interleaved)
        return y

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        executor, batch = self._executor, self._batch
        group, slot = executor.group_slots[spec.layer]
        self.store(slot, group, k, v)
        if batch.ancestors is not None:
            return attend_along_branches(q, executor.store, slot, batch.block_tables[group], batch, spec)
        return executor.attention.attend(q, slot, batch.block_tables[group], batch, spec)

    def store(self, slot: int, group: int, k: Tensor, v: Tensor) -> None:
        """Keep the keys and values of the step's tokens."""
        self._executor.store.write(slot, self._batch.slots[group], k, v)

    def latent_attention(
        self,
        q: Tensor,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        rotary: RotaryTable,
        projections: HeadProjections,
        spec: LatentSpec,
    ) -> Tensor:
        executor, batch = self._executor, self._batch
        turn = (batch.positions, rotary.cos, rotary.sin)
        rows = ref_latent.latent_rows(kv, norm, eps, *turn, rotary.interleaved)
        q = ref_latent.rotate_tails(q, *turn, spec.nope_dim + spec.rope_dim, rotary.interleaved)
        if self.absorbs or batch.ancestors is not None or batch.max_query <= spec.max_absorbed:
            attended = self.attention(ref_latent.absorb(q, projections.keys), rows, rows, spec.absorbed)
            return ref_latent.project(attended, projections.values)
        group, slot = executor.group_slots[spec.layer]
        self.store(slot, group, rows, rows)
        pages, _, table = float_pages(executor.store, slot, batch.block_tables[group])
        return ref_latent.latent_attention(
            q, pages, table, batch.query_starts, batch.seq_lens, projections.keys, projections.values, spec.scale
        )

    def gated(self, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        y: Tensor = self._run["gated"](gate, up, activation)
        return y

    def experts(self, x: Tensor, router: LinearWeight, stacks: ExpertStacks, routing: RoutingSpec) -> Tensor:
        ids, weights = route(self.linear(x, [router])[0], routing)
        if stacks.split:
            return run_shared_experts(x, ids, weights, stacks, routing, self._executor.model.group)
        return run_experts(x, ids, weights, stacks.gate_up.multiply, stacks.down.multiply, routing)

    def gate_rows(self, x: Tensor, gate: Tensor) -> Tensor:
        y: Tensor = self._run["gate_rows"](x, gate)
        return y

    def activate(self, x: Tensor, activation: str) -> Tensor:
        y: Tensor = self._run["activate"](x, activation)
        return y

    def split(self, x: Tensor, widths: Sequence[int], heads: int = 1) -> list[Tensor]:
        parts = x.unflatten(-1, (heads, -1)).split(list(widths), dim=-1)
        return [part.flatten(-2).contiguous() for part in parts]

    def join(self, values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values), dim=-1)

    def convolve(self, x: Tensor, spec: ConvolutionSpec) -> Tensor:
        return self._continue((x,), spec)

    def scan(self, inputs: Sequence[Tensor], spec: ScanSpec) -> Tensor:
        return self._continue(inputs, spec)

    def _continue(self, inputs: Sequence[Tensor], spec: ConvolutionSpec | ScanSpec) -> Tensor:
        """Run an op that continues the state of each sequence."""
        executor, batch, run = self._executor, self._batch, self._run[spec.op]
        states = executor.store.states.array(spec.layer, spec.array)
        if executor.drafted is not None:
            return executor.drafted.run(run, inputs, states, spec)
        y: Tensor = run(*inputs, states, batch.state_slots, batch.query_starts, *spec.arguments())
        return y

    def gated_norm(
        self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, norm_first: bool, gate_scale: float = 1.0
    ) -> Tensor:
        y: Tensor = self._run["gated_norm"](x, gate, weight, eps, norm_first, gate_scale)
        return y

    def select_rows(self, x: Tensor) -> Tensor:
        assert self._rows is not None
        return x[self._rows]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        y: Tensor = self._run["softcap"](x, cap)
        return y


def _product(x: Tensor, weight: LinearWeight) -> Tensor:
    assert weight.kernel is not None
    y: Tensor = weight.kernel.run(x)
    return y
