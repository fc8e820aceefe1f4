"""Tiny random models match transformers' float32 logits within 1e-4: prefill and decode, whole and in chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.tiny_models import CONFIGS, make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import KVLayout, build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.loader import load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.runner import Executor
from tokenmill.types import Request, SamplingParams, ScheduledTokens, StepPlan

_DEVICE = torch.device("cpu")
_PAGE_SIZE = 4
_LENGTH = 90


def _tables(layout: KVLayout, generator: torch.Generator, length: int) -> list[list[int]]:
    """Scattered pages for every group: neighbours in the sequence are no neighbours in memory."""
    pages = -(-length // _PAGE_SIZE)
    order = torch.randperm(pages * len(layout.groups), generator=generator).tolist()
    return [order[group * pages : (group + 1) * pages] for group in range(len(layout.groups))]


def _logits(
    executor: Executor, layout: KVLayout, ids: list[int], tables: list[list[int]], chunks: list[int]
) -> torch.Tensor:
    """Logits of all positions, computed in the given chunks; pages that left a window are withdrawn as we go."""
    request = Request("r", ids, SamplingParams())
    found, start = [], 0
    for count in chunks:
        for group, table in zip(layout.groups, tables, strict=True):
            for page in range(layout.first_live_page(group, start)):
                table[page] = -1
        needed = -(-(start + count) // _PAGE_SIZE)
        row = ScheduledTokens(request, start, count, tuple(table[:needed] for table in tables), True)
        batch = build_batch(StepPlan([row]), _PAGE_SIZE, _DEVICE)
        batch.logit_rows = torch.arange(count)
        hidden = executor.forward(batch)
        found.append(executor.logits(hidden, batch, 0, count).clone())
        start += count
    return torch.cat(found)


@pytest.mark.parametrize("executor_name", list(EXECUTORS))
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_match_transformers(name: str, executor_name: str, tmp_path: Path) -> None:
    oracle = make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    # The eager executor is tested as the spec; others run what they run in production.
    kernels = "ref" if executor_name == "eager" else ""
    model = load_model(checkpoint, _DEVICE, 256, kernels)
    layout = build_layout(model.decoder.kv_layers(), _PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 131, (_LENGTH,), generator=generator).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    for chunks in ([_LENGTH], [60] + [1] * 30, [7] * 12 + [6], [1] * 40 + [50]):
        store = KV_STORES.get("float32")(layout, 400, _DEVICE, kernels)
        executor_class = EXECUTORS.get(executor_name)
        reason = executor_class.declines(model, store)
        if reason is not None:
            pytest.skip(reason)
        executor = executor_class(model, store, resolve(EngineConfig(batch_tokens=128)))
        got = _logits(executor, layout, ids, _tables(layout, generator, _LENGTH), chunks)
        assert (got - expected).abs().max() < 1e-4
