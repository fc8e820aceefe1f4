"""Quantizing models with experts: routers stay, experts that saw too few tokens are rounded to nearest and reported."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity import tiny_models
from tests.parity.engine_logits import engine_logits
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.errors import UserError
from tokenmill.model.layers.experts import Experts
from tokenmill.quantize.finish import GateRequest
from tokenmill.quantize.job import QuantizeJob, prepare, run_job
from tokenmill.quantize.recipe import RecipeRequest
from tokenmill.quantize.source import SourceModel

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
_TEXT = "Once upon a time there was a small boat that wanted to see the sea. " * 60


def _job(model: Path, out: Path, recipe: RecipeRequest, **changes: Any) -> QuantizeJob:
    return QuantizeJob(str(model), out, recipe, gate=GateRequest(enabled=False), dtype="float32", **changes)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe"])
def test_eight_bits_compute_nearly_the_same(name: str, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    tiny_models.make(name, model)
    save_tokenizer(model, "qwen2")
    source = SourceModel(open_checkpoint(model), 8)
    layer = source.num_blocks - 1
    kept, linears = source.kept_names(layer), source.linear_names(layer)
    assert kept
    assert not set(kept) & set(linears)
    mlp = source.block(layer).mlp
    assert isinstance(mlp, Experts)
    assert sum(".experts." in each for each in linears) == 3 * len(mlp.stacks.down)
    report = run_job(prepare(_job(model, out, RecipeRequest("rtn", bits=8, group_size=16))))
    assert {entry["name"] for entry in report.layers} >= set(linears)
    stored = load_file(out / "model.safetensors")
    assert all(stored[f"{each}.weight"].dtype == torch.float32 for each in kept)
    expected = engine_logits(model, IDS, "eager")
    distance = (engine_logits(out, IDS, "eager") - expected).square().mean().sqrt() / expected.std()
    assert distance < 0.05


@pytest.fixture(scope="module")
def spoken(model_path: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with experts and the tokenizer of stories15m."""
    folder = tmp_path_factory.mktemp("experts")
    sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 32000}
    tiny_models.CONFIGS["experts-tokens"] = lambda: tiny_models._experts("qwen3_moe", **sizes, head_dim=32)
    try:
        tiny_models.make("experts-tokens", folder)
    finally:
        del tiny_models.CONFIGS["experts-tokens"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path("stories15m") / name, folder / name)
    return folder


@pytest.mark.parametrize("least", [0.0, 0.9])
def test_experts_without_tokens_are_rounded_to_nearest(
    least: float, spoken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(_TEXT)
    options = (("gptq.least_tokens", least),)
    recipe = RecipeRequest("gptq", bits=8, group_size=32, options=options)
    job = _job(spoken, tmp_path / "out", recipe, calibration=text, calibration_samples=4, calibration_length=64)
    with caplog.at_level(logging.WARNING):
        run_job(prepare(job))
    assert ("rounded to nearest" in caplog.text) == (least > 0)
    expected = engine_logits(spoken, IDS, "eager")
    distance = (engine_logits(tmp_path / "out", IDS, "eager") - expected).square().mean().sqrt() / expected.std()
    assert distance < 0.05


def test_a_rotated_stream_cannot_feed_a_router(spoken: Path, tmp_path: Path) -> None:
    recipe = RecipeRequest("rotation+rtn", bits=4, group_size=32)
    with pytest.raises(UserError, match="has routers"):
        run_job(prepare(_job(spoken, tmp_path / "out", recipe)))
