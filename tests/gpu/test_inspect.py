"""What `inspect` says of a GPU: which executor runs, and why a faster one or a kernel does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.test_executors import ON_GPU  # skips without a GPU or the interpreter
from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.model.kvstore import KV_STORES
from tokenmill.resolution import resolve
from tokenmill.runtime.executors import EXECUTORS
from tokenmill.runtime.report import implementations, survey

_DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@pytest.mark.parametrize(("name", "reads"), [("bfloat16", True), ("kivi4", False)])
def test_attention_over_pages_without_a_kernel_falls_back_with_a_reason(name: str, reads: bool, tmp_path: Path) -> None:
    make("llama", tmp_path)
    kernels = "" if ON_GPU else "triton"
    model = survey(open_checkpoint(tmp_path), resolve(EngineConfig(kernels=kernels)), _DEVICE)
    store_class = KV_STORES.get(name)
    layout = build_layout(model.decoder.kv_layers(), store_class.page_multiple if store_class.page_multiple > 1 else 16)
    store = store_class(layout, 1, _DEVICE, kernels)
    captured = EXECUTORS.get("cuda_graph").declines(model, store)
    assert EXECUTORS.get("cuda_eager").declines(model, store) is None
    (attention,) = (each for each in implementations(model, "cuda_eager", store) if each.what == "attention")
    if reads:
        assert captured is None
        assert attention.declined == ()
    else:
        assert captured is not None
        assert name in captured
        assert attention.runs_on == "ref"
        assert name in attention.declined[0]
