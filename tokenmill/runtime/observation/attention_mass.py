"""How much attention each page of a request has received: summed over the queries, heads and layers computed so far.

Only for requests whose budget policy chooses by it. Their steps run through `ObservingRunner` and the eager executor,
which also works the attention weights out; the result of a step is the same. CPU only. page_scores.py reads the sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenmill.config import ResolvedConfig
from tokenmill.model.attention.base import AttentionSpec
from tokenmill.model.kvstore.base import KVStore
from tokenmill.model.loader import LoadedModel
from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.runtime.runner import ModelRunner
from tokenmill.types import Batch, Request, ScheduledTokens, StepPlan, StepResult


def key_mass(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """Attention that each key gets from causal queries at the end of the sequence, summed over queries and heads.

    q: [n, heads, dim]; k: [kv_heads, length, dim]. Returns [length]; it adds up to n * heads.
    """
    kv_heads, length, dim = k.shape
    count = q.shape[0]
    scores = torch.einsum("nkgd,ksd->kgns", q.view(count, kv_heads, -1, dim), k) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    position = torch.arange(length - count, length).unsqueeze(1)
    hidden = torch.arange(length).unsqueeze(0) > position
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((0, 1, 2))


class AttentionMass:
    """Sums by request, one number per entry of its page tables."""

    def __init__(self) -> None:
        self._sums: dict[Request, Tensor] = {}

    def add(self, request: Request, first: bool, mass: Tensor) -> None:
        """`mass`: [pages]. `first`: a row that starts at token 0 begins the sums anew."""
        known = self._sums.get(request)
        if first or known is None:
            known = torch.zeros(0)
        total = mass.clone()
        total[: known.shape[0]] += known
        self._sums[request] = total

    def of(self, request: Request, count: int) -> list[float]:
        values: list[float] = self._sums[request][:count].tolist()
        return values

    def drop(self, request: Request, entries: list[int]) -> None:
        sums = self._sums[request]
        keep = torch.ones(sums.shape[0], dtype=torch.bool)
        keep[entries] = False
        self._sums[request] = sums[keep]

    def forget(self, request: Request) -> None:
        self._sums.pop(request, None)


class ObservingExecutor(EagerExecutor):
    """The eager executor that notes the attention mass of the rows it was told to watch."""

    name = "observing"

    def __init__(self, model: LoadedModel, store: KVStore, config: ResolvedConfig, mass: AttentionMass) -> None:
        super().__init__(model, store, config)
        self._mass = mass
        self._watched: list[tuple[int, ScheduledTokens]] = []

    def watch(self, rows: list[ScheduledTokens]) -> None:
        """The rows of the next batch."""
        caches = [row.request.params.cache for row in rows]
        self._watched = [
            (number, rows[number]) for number, cache in enumerate(caches) if cache is not None and cache.needs_attention
        ]

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.store.prepare(batch)
        ops = _ObservingOps(self, batch)
        hidden: Tensor = self.model.decoder.forward(ops)
        for number, row in self._watched:
            self._mass.add(row.request, row.start == 0, ops.mass[number])
        return hidden

    def row_mass(self, q: Tensor, batch: Batch, spec: AttentionSpec, number: int) -> Tensor:
        """[pages]: what the pages of a row's sequence got from its queries in one layer."""
        group, slot = self.places[spec.layer]
        size = self.store.layout.page_size
        begin, end = batch.query_starts[number : number + 2].tolist()
        length = int(batch.seq_lens[number])
        pages = batch.block_tables[group][number, : -(-length // size)].long()
        k = self.store.read(slot, pages)[0].float()  # [pages, kv_heads, size, dim]
        keys = k.transpose(0, 1).reshape(k.shape[1], -1, k.shape[3])[:, :length]
        queries = q[begin:end].view(end - begin, spec.num_heads, spec.head_dim).float()
        mass = key_mass(queries, keys, spec.scale, spec.softcap)
        return torch.nn.functional.pad(mass, (0, pages.shape[0] * size - length)).view(-1, size).sum(1)

    def watched(self) -> list[int]:
        return [number for number, _ in self._watched]


class ObservingRunner(ModelRunner):
    """Tells its executor which rows to watch."""

    def execute(self, plan: StepPlan) -> StepResult:
        assert isinstance(self.executor, ObservingExecutor)
        self.executor.watch(plan.scheduled)
        return super().execute(plan)


class _ObservingOps(EagerOps):
    def __init__(self, executor: ObservingExecutor, batch: Batch) -> None:
        super().__init__(executor, batch)
        self._observer = executor
        self.mass: dict[int, Tensor] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        out = super().attention(q, k, v, spec)
        if not spec.window:  # pages leave the layers that see everything
            for number in self._observer.watched():
                mass = self._observer.row_mass(q, self._batch, spec, number)
                self.mass[number] = self.mass[number] + mass if number in self.mass else mass
        return out
