"""Scores of stored pages for budget policies (engine/kv/budget/base.py).

"norms" is computed from the stored keys and values, once per page; "attention" is summed while steps run, on an
executor that computes attention weights. Knows pages and page tables of requests, not policies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.config import ResolvedConfig
from tokenmill.runtime.build import Runtime
from tokenmill.runtime.observation.attention_mass import AttentionMass, ObservingExecutor, WatchingExecutor, is_watched
from tokenmill.types import Request


class StoredPageScores:
    def __init__(self, runtime: Runtime, config: ResolvedConfig) -> None:
        self._store = runtime.store
        # Latent rows are keys and values at once: there is no ratio of their norms.
        self.kinds = frozenset({"attention"} if runtime.layout.is_latent else {"norms", "attention"})
        self._runner, self._executor, self._model, self._config = (
            runtime.runner,
            runtime.executor,
            runtime.model,
            config,
        )
        self._mass = AttentionMass()
        self._norms: dict[Request, list[float]] = {}  # of the leading entries of its tables

    def keep(self, kind: str) -> None:
        """Attention is watched from the first request on whose policy needs it: until then steps are as usual."""
        if kind != "attention" or self._runner.executor is not self._executor:
            return
        model, store, config, mass = self._model, self._store, self._config, self._mass

        def observer() -> ObservingExecutor:  # does not hold the runner, which holds it
            executor = ObservingExecutor(model, store, config)
            executor.mass = mass
            return executor

        self._runner.executor = WatchingExecutor(self._executor, observer)

    def scores(self, kind: str, request: Request, tables: tuple[list[int], ...], count: int) -> list[float]:
        if kind == "attention":
            return self._mass.of(request, count)
        known = self._norms.setdefault(request, [])
        known += self._value_key_norms(tables, len(known), count)
        return known[:count]

    def dropped(self, request: Request, entries: Sequence[int]) -> None:
        if request in self._norms:
            dropped = set(entries)
            self._norms[request] = [norm for entry, norm in enumerate(self._norms[request]) if entry not in dropped]
        elif is_watched(request):
            self._mass.drop(request, list(entries))

    def released(self, request: Request) -> None:
        self._norms.pop(request, None)
        self._mass.forget(request)

    @torch.inference_mode()
    def _value_key_norms(self, tables: tuple[list[int], ...], begin: int, end: int) -> list[float]:
        """Mean over tokens, heads and layers of |value| / |key|, for the entries [begin, end)."""
        store = self._store
        total = torch.zeros(max(0, end - begin))
        num_layers = 0
        for group, table in zip(store.layout.groups, tables, strict=True):
            if group.kind != "full" or begin >= end:
                continue
            pages = torch.tensor(table[begin:end], dtype=torch.int64, device=store.device)
            for slot in range(len(group.layers)):
                k, v = store.read(slot, pages)  # [n, kv_heads, size, dim]
                ratio = v.float().norm(dim=-1) / k.float().norm(dim=-1).clamp(min=1e-6)
                total += ratio.mean((1, 2)).cpu()
            num_layers += len(group.layers)
        values: list[float] = (total / max(1, num_layers)).tolist()
        return values
