"""How much attention each page of a request has received: summed over the queries, heads and layers computed so far.

Only for requests whose budget policy uses it. Steps with such a request run on an eager executor that also computes
the attention weights (`WatchingExecutor` decides); the result of a step is the same. page_scores.py reads the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tokenmill.model.attention.base import AttentionSpec
from tokenmill.runtime.executors.base import Executor, StepGuesser, StepInput, StepOutput
from tokenmill.runtime.executors.eager import EagerExecutor, EagerOps
from tokenmill.types import Batch, Request, ScheduledTokens


def key_mass(q: Tensor, k: Tensor, scale: float, cap: float) -> Tensor:
    """Attention that each key gets from causal queries at the end of the sequence, summed over queries and heads.

    q: [n, heads, dim]; k: [kv_heads, length, dim]. Returns [length]; it adds up to n * heads.
    """
    kv_heads, length, dim = k.shape
    count = q.shape[0]
    scores = torch.einsum("nkgd,ksd->kgns", q.view(count, kv_heads, -1, dim), k) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    position = torch.arange(length - count, length, device=q.device).unsqueeze(1)
    hidden = torch.arange(length, device=q.device).unsqueeze(0) > position
    return scores.masked_fill(hidden, float("-inf")).softmax(-1).sum((0, 1, 2))


class AttentionMass:
    """Sums by request, one number per entry of its page tables."""

    def __init__(self) -> None:
        self._sums: dict[Request, Tensor] = {}

    def add(self, request: Request, first: bool, mass: Tensor) -> None:
        """`mass`: [pages]. `first`: the row starts at token 0, so its sums start from zero."""
        known = self._sums.get(request)
        if first or known is None:
            known = torch.zeros(0, device=mass.device)
        total = mass.clone()
        total[: known.shape[0]] += known
        self._sums[request] = total

    def of(self, request: Request, count: int) -> list[float]:
        values: list[float] = self._sums[request][:count].tolist()
        return values

    def drop(self, request: Request, entries: list[int]) -> None:
        sums = self._sums[request]
        keep = torch.ones(sums.shape[0], dtype=torch.bool, device=sums.device)
        keep[entries] = False
        self._sums[request] = sums[keep]

    def forget(self, request: Request) -> None:
        self._sums.pop(request, None)


def is_watched(request: Request) -> bool:
    """Whether the request's budget policy needs attention sums."""
    return request.params.cache is not None and request.params.cache.needs_attention


class ObservingExecutor(EagerExecutor):
    """The eager executor that sums the attention mass of watched rows."""

    name = "observing"
    mass: AttentionMass

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        self._watched = [(number, row) for number, row in enumerate(work.rows) if is_watched(row.request)]
        assert not any(number in work.drafts for number, _ in self._watched), "rejected drafts must not count"
        return super().step(work)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        self.store.prepare(batch)
        ops = _ObservingOps(self, batch)
        hidden: Tensor = self.model.decoder.forward(ops)
        for number, row in self._watched:
            self.mass.add(row.request, row.start == 0, ops.mass[number])
        return hidden

    def row_mass(self, q: Tensor, batch: Batch, spec: AttentionSpec, number: int) -> Tensor:
        """[pages]: the attention that the pages of a row's sequence got from its queries in one layer."""
        group, slot = self.group_slots[spec.layer]
        size = self.store.layout.page_size
        begin, end = batch.query_starts[number : number + 2].tolist()
        length = int(batch.seq_lens[number])
        pages = batch.block_tables[group][number, : -(-length // size)].long()
        k = self.store.read(slot, pages)[0].float()  # [pages, kv_heads, size, dim]
        keys = k.transpose(0, 1).reshape(k.shape[1], -1, k.shape[3])[:, :length]
        queries = q[begin:end].view(end - begin, spec.num_heads, spec.head_dim).float()
        mass = key_mass(queries, keys, spec.scale, spec.softcap)
        return torch.nn.functional.pad(mass, (0, pages.shape[0] * size - length)).view(-1, size).sum(1)

    _watched: list[tuple[int, ScheduledTokens]]

    def watched(self) -> list[int]:
        return [number for number, _ in self._watched]


class WatchingExecutor(Executor[Tensor]):
    """Any executor, but steps with watched requests run on an ObservingExecutor, which is built at the first such
    step."""

    def __init__(self, usual: Executor[Tensor], build_observer: Callable[[], ObservingExecutor]) -> None:
        self._usual, self._build = usual, build_observer
        self._observer: ObservingExecutor | None = None
        self.name, self.sampler, self.max_logit_rows = usual.name, usual.sampler, usual.max_logit_rows
        self.lookahead, self.runs_greedily, self.takes_trees = usual.lookahead, usual.runs_greedily, usual.takes_trees
        self.adapters = usual.adapters  # one bank for both: rows name its slots wherever they are computed

    def step(self, work: StepInput) -> StepOutput[Tensor]:
        if not any(is_watched(row.request) for row in work.rows):
            return self._usual.step(work)
        self._observer = self._observer or self._build()
        self._observer.adapters = self.adapters
        return self._observer.step(work)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._usual.final_norm(hidden)

    def token_logits(self, states: Tensor, token_ids: Sequence[int], adapter_slot: int = 0) -> Tensor:
        return self._usual.token_logits(states, token_ids, adapter_slot)

    def prepare(self) -> bool:
        return self._usual.prepare()

    def keep_layers(self, layers: tuple[int, ...]) -> str:
        return self._usual.keep_layers(layers)

    def attach_drafter(self, needs_hidden: bool, guesser: StepGuesser | None) -> bool:
        return self._usual.attach_drafter(needs_hidden, guesser)


class _ObservingOps(EagerOps):
    absorbs = True

    def __init__(self, executor: ObservingExecutor, batch: Batch) -> None:
        super().__init__(executor, batch)
        self._observer = executor
        self.mass: dict[int, Tensor] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        out = super().attention(q, k, v, spec)
        if not spec.window and not spec.chunk:  # budgets drop pages of layers with full attention only
            for number in self._observer.watched():
                mass = self._observer.row_mass(q, self._batch, spec, number)
                self.mass[number] = self.mass[number] + mass if number in self.mass else mass
        return out
