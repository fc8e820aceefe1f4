"""Tiny random models match transformers' float32 logits: prefill and decode, whole and in chunks, on every device.

The reference and the C++ program within 1e-4; GPU kernels, whose activations are bfloat16, within that type's error.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.devices import DEVICES
from tests.parity.tiny_models import CONFIGS, make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import KVLayout, build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.loader import load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.executors.base import Executor, StepInput
from tokenmill.types import Request, SamplingParams, ScheduledTokens

_PAGE_SIZE = 16
_LENGTH = 90
_EXECUTORS = {"cpu": ("eager", "recorded"), "cuda": ("eager", "cuda_eager", "cuda_graph")}
_CASES = [(device, name) for device in DEVICES for name in _EXECUTORS[device.type]]


def _tables(layout: KVLayout, generator: torch.Generator, length: int) -> list[list[int]]:
    """Scattered pages for every group: neighbours in the sequence are no neighbours in memory."""
    pages = -(-length // layout.page_size)
    order = torch.randperm(pages * len(layout.groups), generator=generator).tolist()
    return [order[group * pages : (group + 1) * pages] for group in range(len(layout.groups))]


def _logits(
    executor: Executor[Tensor], layout: KVLayout, ids: list[int], tables: list[list[int]], chunks: list[int]
) -> Tensor:
    """Logits of all positions, computed in the given chunks; pages that left a window are withdrawn as we go."""
    # Log-probabilities are asked for, so that no executor keeps the logits of single tokens to itself.
    found, start = [], 0
    for count in chunks:
        for group, table in zip(layout.groups, tables, strict=True):
            for page in range(layout.first_live_page(group, start)):
                table[page] = -1
        needed = -(-(start + count) // layout.page_size)
        request = Request("r", ids[: start + count], SamplingParams(logprobs=1))
        row = ScheduledTokens(request, start, count, tuple(table[:needed] for table in tables), True)
        output = executor.step(StepInput([row], logit_ranges=[range(count)] if count > 1 else None))
        found.append(output.logits(0, count).to("cpu", copy=True))
        start += count
    return torch.cat(found)


@pytest.mark.parametrize(("device", "executor_name"), _CASES, ids=[f"{d.type}-{name}" for d, name in _CASES])
@pytest.mark.parametrize("name", list(CONFIGS))
def test_logits_match_transformers(name: str, device: torch.device, executor_name: str, tmp_path: Path) -> None:
    oracle = make(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    # The eager executor is tested as the spec; others run what they run in production.
    kernels = "ref" if executor_name == "eager" else ""
    model = load_model(checkpoint, device, 256, kernels)
    layout = build_layout(model.decoder.kv_layers(), _PAGE_SIZE)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 131, (_LENGTH,), generator=generator).tolist()
    with torch.inference_mode():
        expected = oracle(torch.tensor([ids])).logits[0]
    rounded = executor_name.startswith("cuda")
    for chunks in ([_LENGTH], [60] + [1] * 12 + [18], [7] * 12 + [6], [1] * 12 + [78]):
        store = KV_STORES.get("bfloat16" if rounded else "float32")(layout, 400, device, kernels)
        executor_class = EXECUTORS.get(executor_name)
        reason = executor_class.declines(model, store)
        if reason is not None:
            pytest.skip(reason)  # no C++ kernels are built here
        executor = executor_class(model, store, resolve(EngineConfig(batch_tokens=128, context=256)))
        got = _logits(executor, layout, ids, _tables(layout, generator, _LENGTH), chunks)
        error = (got - expected).abs().max() / (expected.abs().max() if rounded else 1.0)
        assert error < (0.05 if rounded else 1e-4)
