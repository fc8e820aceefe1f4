"""The logits of all positions of one prompt, by our model from a checkpoint folder, without the engine around it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.loader import load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.executors.base import StepInput
from tokenmill.types import Request, SamplingParams, ScheduledTokens

_DEVICE = torch.device("cpu")
_PAGE_SIZE = 8


def engine_logits(folder: Path, ids: list[int], executor_name: str) -> Tensor:
    """`executor_name`: "eager" runs the plain torch spec, "recorded" the C++ kernels."""
    kernels = "ref" if executor_name == "eager" else ""
    model = load_model(open_checkpoint(folder), _DEVICE, 256, kernels)
    layout = build_layout(model.decoder.kv_layers(), _PAGE_SIZE)
    pages = -(-len(ids) // _PAGE_SIZE)
    store = KV_STORES.get("float32")(layout, pages * len(layout.groups), _DEVICE, kernels)
    executor_class = EXECUTORS.get(executor_name)
    assert executor_class.declines(model, store) is None, executor_class.declines(model, store)
    executor = executor_class(model, store, resolve(EngineConfig(batch_tokens=128)))
    tables = tuple(list(range(group * pages, (group + 1) * pages)) for group in range(len(layout.groups)))
    row = ScheduledTokens(Request("r", ids, SamplingParams()), 0, len(ids), tables, True)
    output = executor.step(StepInput([row], logit_ranges=[range(len(ids))]))
    return output.logits(0, len(ids)).clone()
