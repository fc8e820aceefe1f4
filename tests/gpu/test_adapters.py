"""Adapters through the GPU executors: decodes, prompts and mixtures against the torch reference, captured or not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_interpreted.py runs this file under the interpreter", allow_module_level=True)

from tests.gpu.models import write_config
from tests.gpu.test_executors import SHALLOW
from tests.interpreter import slow_if_interpreted, slow_interpreted
from tokenmill.checkpoint.adapters.adapter import EMBEDDING, Adapter, AdapterMatrix
from tokenmill.checkpoint.adapters.fit import HEAD, module_shapes
from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.open import open_source
from tokenmill.config import EngineConfig
from tokenmill.resolution import resolve
from tokenmill.runtime.build import Runtime, build_runtime
from tokenmill.runtime.executors.base import StepInput
from tokenmill.types import Request, SamplingParams, ScheduledTokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_PAGES, _PAGE_SIZE = 4, 16


def adapter(description: ModelDescription, rank: int, targets: tuple[str, ...], seed: int) -> Adapter:
    """A random one for every matrix whose name ends so."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {}
    for name, (out, inputs) in module_shapes(description).items():
        if name.endswith(targets):
            a = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(out, rank, generator=generator) * 0.3
            matrices[name] = AdapterMatrix(name, a, b, 1.0)
    return Adapter(str(seed), matrices)


def build(folder: Path, executor: str) -> Runtime:
    config = EngineConfig(
        device=DEVICE.type,
        executor=executor,
        kernels="ref" if executor == "eager" else "triton",
        kv_cache_dtype="float32" if executor == "eager" else "bfloat16",
        context=_PAGES * _PAGE_SIZE,
        concurrency=4,
        page_size=_PAGE_SIZE,
        batch_tokens=64,
        load_format="dummy",
        enable_lora=True,
        max_loras=3,
        max_lora_rank=20,
        memory=64 << 20,
    )
    return build_runtime(open_source(folder, "dummy"), resolve(config), DEVICE)


def rows(step: list[tuple[int, int, int]], slots: list[int]) -> list[ScheduledTokens]:
    """(sequence, first token, count) of each row."""
    made = []
    for sequence, start, count in step:
        ids = [(7 * position + 3 * sequence) % 100 + 3 for position in range(start + count)]
        table = list(range(sequence * _PAGES, (sequence + 1) * _PAGES))
        request = Request(str(sequence), ids, SamplingParams(min_tokens=1))  # such rows are drawn from the logits
        made.append(ScheduledTokens(request, start, count, (table,), True, adapter_slot=slots[sequence]))
    return made


STEPS = [
    [(0, 0, 9), (1, 0, 5)],
    [(2, 0, 12), (0, 9, 1), (3, 0, 3)],
    [(0, 10, 1), (1, 5, 1), (2, 12, 1), (3, 3, 1)],
    [(0, 11, 1), (1, 6, 1), (2, 13, 1), (3, 4, 1)],
    [(0, 12, 1), (1, 7, 1), (2, 14, 1), (3, 5, 1)],
][: 5 if torch.cuda.is_available() else 4]


def logits(runtime: Runtime, slots: list[int]) -> Tensor:
    found = []
    for step in STEPS:
        output = runtime.executor.step(StepInput(rows(step, slots), queue_next=False))  # else the logits are not kept
        found.append(output.logits(0, len(step)).float().cpu().clone())
    return torch.cat(found)


@pytest.fixture(autouse=True)
def same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy weights are drawn where they lie: for a comparison across devices all are drawn on the CPU."""
    from tokenmill.model import dummy_reader
    from tokenmill.model.dummy_reader import DummyReader

    monkeypatch.setattr(
        dummy_reader, "DummyReader", lambda checkpoint, _device: DummyReader(checkpoint, torch.device("cpu"))
    )


def _adapters(description: ModelDescription) -> list[Adapter]:
    """Factors of many matrices, of few, and an adapter that also changes both ends."""
    edges = adapter(description, 3, (EMBEDDING, "v_proj"), 3)
    head = torch.randn(module_shapes(description)[HEAD], generator=torch.Generator().manual_seed(5)) * 0.05
    return [
        adapter(description, 16, ("_proj",), 1),
        adapter(description, 4, ("q_proj", "down_proj", HEAD), 2),
        Adapter("edges", edges.matrices, {f"{HEAD}.weight": head}),
    ]


def _loaded(folder: Path, executor: str) -> Runtime:
    runtime = build(folder, executor)
    for slot, each in enumerate(_adapters(runtime.model.decoder.description), start=1):
        runtime.runner.load_adapter(slot, each)
    return runtime


MIXTURES = [[1, 0, 2, 1], [3, 0, 1, 2], [2, 2, 2, 2]]


@pytest.mark.parametrize("name", ["llama", pytest.param("stablelm", marks=slow_interpreted)])  # the second has biases
@pytest.mark.parametrize("executor", ["cuda_graph", pytest.param("cuda_eager", marks=slow_interpreted)])
def test_mixtures_equal_the_reference(name: str, executor: str, tmp_path: Path) -> None:
    folder = write_config(tmp_path, name, **SHALLOW[name])
    spec, own = _loaded(folder, "eager"), _loaded(folder, executor)
    for slots in MIXTURES:
        plain, wanted, got = logits(spec, [0] * 4), logits(spec, slots), logits(own, slots)
        scale = wanted.abs().max()
        assert float((got - wanted).abs().max() / scale) < 0.05
        assert float((plain - wanted).abs().max() / scale) > 0.1
    assert torch.equal(logits(own, [0] * 4), logits(build(folder, executor), [0] * 4))


@slow_if_interpreted
def test_a_slot_can_be_cleared_between_steps(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama", **SHALLOW["llama"])
    own = _loaded(folder, "cuda_graph")
    plain, first = logits(own, [0] * 4), logits(own, [1] * 4)
    own.runner.clear_adapter(1)
    assert torch.equal(logits(own, [0] * 4), plain)
    own.runner.load_adapter(1, _adapters(own.model.decoder.description)[0])
    assert torch.equal(logits(own, [1] * 4), first)


@slow_if_interpreted
def test_a_captured_step_does_not_remember_whole_matrices_of_another_slot(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "llama", **SHALLOW["llama"])
    own, fresh = _loaded(folder, "cuda_graph"), build(folder, "cuda_graph")
    logits(own, [1, 2, 1, 2])  # captured while slot 3 holds a head and an embedding
    plain = _adapters(own.model.decoder.description)[0]
    for runtime in (own, fresh):
        runtime.runner.load_adapter(3, plain)
    assert torch.equal(logits(own, [3] * 4), logits(fresh, [3] * 4))
