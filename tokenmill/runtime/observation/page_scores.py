"""Scores of stored pages for budget policies (engine/kv/budget/base.py).

"norms" is computed from the stored keys and values, once per page; "attention" is summed while steps run, on an
executor that computes attention weights. Knows pages and page tables of requests, not policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.config import ResolvedConfig
from tokenmill.kernels.host import has_torch, on_host, torch_device
from tokenmill.log import get_logger
from tokenmill.model.loader import load_model
from tokenmill.runtime.build import Runtime
from tokenmill.types import Request

if TYPE_CHECKING:
    from tokenmill.model.kvstore.base import KVStore
    from tokenmill.model.loader import LoadedModel
    from tokenmill.runtime.observation.attention_mass import AttentionMass, ObservingExecutor

_log = get_logger(__name__)


class StoredPageScores:
    def __init__(self, runtime: Runtime, config: ResolvedConfig) -> None:
        self._store = runtime.store
        # Latent rows are keys and values at once: there is no ratio of their norms.
        self.kinds = frozenset({"attention"} if runtime.layout.is_latent else {"norms", "attention"})
        if on_host(runtime.store.device) and not has_torch():  # attention weights are computed by the eager executor
            self.kinds -= {"attention"}
        if runtime.crew is not None:  # a rank sees its own heads only
            self.kinds = frozenset()
        self._runner, self._executor, self._model, self._config = (
            runtime.runner,
            runtime.executor,
            runtime.model,
            config,
        )
        self._mass: AttentionMass | None = None
        self._norms: dict[Request, list[float]] = {}  # of the leading entries of its tables

    def keep(self, kind: str) -> None:
        """Attention is watched from the first request on whose policy needs it: until then steps are as usual."""
        if kind != "attention" or self._runner.executor is not self._executor:
            return
        from tokenmill.runtime.observation.attention_mass import AttentionMass, ObservingExecutor, WatchingExecutor

        mass = self._mass = AttentionMass()
        model, store, config = self._model, self._store, self._config

        def observer() -> ObservingExecutor:  # does not hold the runner, which holds it
            executor = ObservingExecutor(*_of_tensors(model, store, config), config)
            executor.mass = mass
            return executor

        self._runner.executor = WatchingExecutor(self._executor, observer)

    def scores(self, kind: str, request: Request, tables: tuple[list[int], ...], count: int) -> list[float]:
        if kind == "attention":
            assert self._mass is not None, "attention was not watched"
            return self._mass.of(request, count)
        known = self._norms.setdefault(request, [])
        known += self._value_key_norms(tables, len(known), count)
        return known[:count]

    def dropped(self, request: Request, entries: Sequence[int]) -> None:
        if request in self._norms:
            dropped = set(entries)
            self._norms[request] = [norm for entry, norm in enumerate(self._norms[request]) if entry not in dropped]
        elif self._mass is not None and request.params.cache is not None and request.params.cache.needs_attention:
            self._mass.drop(request, list(entries))

    def released(self, request: Request) -> None:
        self._norms.pop(request, None)
        if self._mass is not None:
            self._mass.forget(request)

    def _value_key_norms(self, tables: tuple[list[int], ...], begin: int, end: int) -> list[float]:
        """Mean over tokens, heads and layers of |value| / |key|, for the entries [begin, end)."""
        store = self._store
        total = np.zeros(max(0, end - begin), dtype=np.float32)
        num_layers = 0
        for group, table in zip(store.layout.groups, tables, strict=True):
            if group.kind != "full" or begin >= end:
                continue
            for slot in range(len(group.layers)):
                k, v = _read(store, slot, table[begin:end])  # [n, kv_heads, size, dim]
                total += (np.linalg.norm(v, axis=-1) / np.linalg.norm(k, axis=-1).clip(1e-6)).mean((1, 2))
            num_layers += len(group.layers)
        values: list[float] = (total / max(1, num_layers)).tolist()
        return values


def _read(store: Any, slot: int, pages: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of some pages in float32."""
    if on_host(store.device):
        k, v = store.read(slot, np.array(pages, dtype=np.int64))
        return k.astype(np.float32), v.astype(np.float32)
    import torch

    with torch.inference_mode():
        k, v = store.read(slot, torch.tensor(pages, dtype=torch.int64, device=store.device))
        return k.float().cpu().numpy(), v.float().cpu().numpy()


def _of_tensors(model: LoadedModel, store: KVStore, config: ResolvedConfig) -> tuple[LoadedModel, KVStore]:
    """The model and the store for an executor of torch: the same, unless they hold numpy arrays."""
    if not on_host(model.device):
        return model, store
    _log.warning("attention is summed with torch: the weights are loaded a second time")
    device = torch_device("attention is summed with it")
    return load_model(model.checkpoint, device, config.context, config.kernels), store.as_tensors(device)
