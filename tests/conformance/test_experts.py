"""Experts by the C++ program against the torch spec, for weights of every block type, alone and in batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity import tiny_models
from tests.parity.engine_logits import engine_logits
from tests.unit.model.test_experts import to_blocks
from tests.unit.quantize.ggml.test_export import save_tokenizer
from tokenmill import LLM, SamplingParams
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels import cpu
from tokenmill.quantize.ggml.export import quantize_gguf

pytestmark = pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="no C++ kernels are built")

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()
_WIDE = {"hidden_size": 256, "num_hidden_layers": 2, "num_experts": 8}


def _make(folder: Path, experts_per_token: int) -> Path:
    """Rows of 256, so that every block type fits."""
    from transformers import Qwen2MoeConfig

    values: dict[str, Any] = {**tiny_models._COMMON, **_WIDE, "num_experts_per_tok": experts_per_token}
    sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    tiny_models.CONFIGS["wide-experts"] = lambda: Qwen2MoeConfig(**values, **sizes)
    try:
        tiny_models.make("wide-experts", folder)
    finally:
        del tiny_models.CONFIGS["wide-experts"]
    save_tokenizer(folder, "qwen2")
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("experts"), 3)


@pytest.fixture(scope="module")
def all_chosen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every token has all experts: rounding cannot send it to another one, only change their weights."""
    return _make(tmp_path_factory.mktemp("all_experts"), _WIDE["num_experts"])


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).square().mean().sqrt() / theirs.std())


_FLOATS = ("F32", "F16", "BF16")
_BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize("mix", [*_FLOATS, *_BLOCKS])
def test_every_block_type(mix: str, source: Path, all_chosen: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    quantize_gguf(open_checkpoint(source if mix in _FLOATS else all_chosen), path, mix)
    spec, program = (engine_logits(path, IDS, executor) for executor in ("eager", "recorded"))
    # Activations are rounded to int8 in blocks where weights are integers, to halves where the CPU multiplies them.
    # With AMX they become two bfloat16 terms.
    halves = mix == "F16" and cpu.multiplies_halves(8)
    limit = 1e-2 if halves else {"F32": 1e-5, "F16": 1e-5, "BF16": 3e-5}.get(mix, 0.05)
    assert _distance(program, spec) < limit


def test_a_token_has_the_same_experts_alone_and_in_a_batch(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    # Of most formats the products of few rows are rounded otherwise than those of many; not of Q8_0.
    quantize_gguf(open_checkpoint(source), path, "Q8_0")
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(3, 131, (5 + 3 * n,), generator=generator).tolist() for n in range(16)]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    # Fewer rows in a step than go to tiles of bfloat16 where there are some, which round otherwise.
    with LLM(str(path), context=128, batch_tokens=56, prefix_caching=False, device="cpu") as llm:
        alone = [llm.generate([prompt], greedy)[0].outputs[0].token_ids for prompt in prompts]
        together = [output.outputs[0].token_ids for output in llm.generate(prompts, greedy)]
    assert alone == together


def test_mxfp4_experts_with_biases_and_sinks(tmp_path: Path) -> None:
    tiny_models.make("gpt_oss", tmp_path)
    blocks, _ = to_blocks(load_file(tmp_path / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in blocks.items()}, tmp_path / "model.safetensors")
    spec, program = (engine_logits(tmp_path, IDS, executor) for executor in ("eager", "recorded"))
    assert _distance(program, spec) < 0.05
