"""The recorded program against the eager executor on the same kernels: same logits for every kind of step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.tiny_models import make
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.config import EngineConfig
from tokenmill.hardware.kv_layout import build_layout
from tokenmill.kernels import cpu
from tokenmill.model.kvstore import KV_STORES
from tokenmill.model.loader import LoadedModel, load_model
from tokenmill.resolution import resolve
from tokenmill.runtime.batch import build_batch
from tokenmill.runtime.executors.base import StepInput
from tokenmill.runtime.executors.eager import EagerExecutor
from tokenmill.runtime.executors.recorded import RecordedExecutor
from tokenmill.types import Batch, Request, SamplingParams, ScheduledTokens

CPU = torch.device("cpu")
PAGE_SIZE = 8
PAGES_EACH = 12

pytestmark = pytest.mark.skipif(cpu.unavailable(CPU) is not None, reason=str(cpu.unavailable(CPU)))

# Steps as (sequence, first token, count): a prompt, chunks beside a decode, decodes only, several tokens at once.
STEPS = [
    [(0, 0, 33)],
    [(0, 33, 1), (1, 0, 20), (2, 0, 5)],
    [(0, 34, 1), (1, 20, 1), (2, 5, 1)],
    [(2, 6, 1)],
    [(0, 35, 4), (2, 7, 1), (1, 21, 2)],
    [(0, 39, 1), (1, 23, 1)],
]


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "mistral", "deepseek_v3-yarn"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    make(request.param, folder)
    return load_model(open_checkpoint(folder), CPU, 128)


def batch_of(model: LoadedModel, step: list[tuple[int, int, int]]) -> Batch:
    groups = len(build_layout(model.decoder.kv_layers(), PAGE_SIZE).groups)
    rows = []
    for sequence, start, count in step:
        ids = [(7 * position + 3 * sequence) % 100 + 3 for position in range(start + count)]
        first = sequence * groups * PAGES_EACH
        tables = tuple(
            list(range(first + group * PAGES_EACH, first + (group + 1) * PAGES_EACH)) for group in range(groups)
        )
        rows.append(ScheduledTokens(Request(str(sequence), ids, SamplingParams()), start, count, tables, samples=True))
    return build_batch(StepInput(rows, hidden=True), PAGE_SIZE, CPU)


def run(model: LoadedModel, executor_class: type, threads: int = 0, store_name: str = "float32") -> list[torch.Tensor]:
    layout = build_layout(model.decoder.kv_layers(), PAGE_SIZE)
    if declined := KV_STORES.get(store_name).declines(layout):
        pytest.skip(f"{store_name} pages do not support {declined}")
    store = KV_STORES.get(store_name)(layout, 3 * len(layout.groups) * PAGES_EACH, CPU)
    executor = executor_class(
        model, store, resolve(EngineConfig(batch_tokens=40, concurrency=4, threads=threads or None))
    )
    logits = []
    for step in STEPS:
        batch = batch_of(model, step)
        hidden = executor.forward(batch)
        logits.append(executor.logits(hidden, batch, 0, len(step)).clone())
    return logits


CODED = ["fp8", "fp8_e5m2", "int8", "int4", "turboquant3", "turboquant_4bit_nc"]


@pytest.mark.parametrize("store_name", ["float32", "float16", "bfloat16", *CODED])
def test_same_logits_as_eager(model: LoadedModel, store_name: str) -> None:
    eager = run(model, EagerExecutor, store_name=store_name)
    recorded = run(model, RecordedExecutor, store_name=store_name)
    # Latents that differ in the last bit may be stored as neighbours, and every head reads them: of 16 bits it
    # shows, most where they are multiplied as halves.
    is_latent = model.decoder.description.model_type.startswith("deepseek")
    tolerance = {"bfloat16": 1e-4, "float16": 1e-3}.get(store_name, 1e-5) if is_latent else 1e-5
    for actual, expected in zip(recorded, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("store_name", ["float32", "int8", "int4", "turboquant3"])
def test_same_bits_whatever_the_threads(model: LoadedModel, store_name: str) -> None:
    runs = []
    for threads in (1, 2, 3):
        cpu.use_threads(threads)
        runs.append(run(model, RecordedExecutor, store_name=store_name))
    cpu.use_threads(0)
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


def test_logits_in_parts(model: LoadedModel) -> None:
    """More rows than one call keeps: the head runs again over the hidden state that the program holds."""
    layout = build_layout(model.decoder.kv_layers(), PAGE_SIZE)
    store = KV_STORES.get("float32")(layout, 3 * len(layout.groups) * PAGES_EACH, CPU)
    executor = RecordedExecutor(model, store, resolve(EngineConfig(batch_tokens=40, concurrency=4)))
    batch = batch_of(model, [(0, 0, 30)])
    batch.logit_rows = torch.arange(30)
    whole = executor.logits(executor.forward(batch), batch, 0, 30).clone()
    executor.max_logit_rows = 8
    hidden = executor.forward(batch)
    parts = [executor.logits(hidden, batch, begin, min(begin + 8, 30)).clone() for begin in range(0, 30, 8)]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-5)


def test_steps_beyond_the_recorded_sizes_are_refused(model: LoadedModel) -> None:
    layout = build_layout(model.decoder.kv_layers(), PAGE_SIZE)
    store = KV_STORES.get("float32")(layout, 3 * len(layout.groups) * PAGES_EACH, CPU)
    executor = RecordedExecutor(model, store, resolve(EngineConfig(batch_tokens=16, concurrency=2)))
    with pytest.raises(ValueError, match="more tokens"):
        executor.forward(batch_of(model, [(0, 0, 17)]))
    with pytest.raises(ValueError, match="more sequences"):
        executor.forward(batch_of(model, [(0, 0, 1), (1, 0, 1), (2, 0, 1)]))
    batch = batch_of(model, [(0, 0, 3)])
    batch.token_ids[1] = 10_000
    with pytest.raises(ValueError, match="vocabulary"):
        executor.forward(batch)
