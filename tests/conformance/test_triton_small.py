"""Small matrices of few bits become bf16, together with those they share an input with, and multiply as before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("no GPU: test_triton.py runs this file under the interpreter", allow_module_level=True)

from tests.quantized_files import save_quantized
from tokenmill.checkpoint.open import open_checkpoint
from tokenmill.kernels.triton.matmul import choose, repack
from tokenmill.kernels.triton.matmul.joined import JoinedRows, expand_small, join_linears
from tokenmill.kernels.triton.matmul.linear import DenseLinear, GroupedLinear
from tokenmill.model.formats.quantized import Scheme
from tokenmill.model.loader import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ERROR = 8e-3  # bf16 weights, input and output; the interpreter cuts off instead of rounding


def grouped(rows: int, depth: int) -> tuple[GroupedLinear, torch.Tensor]:
    """A matrix in groups of 32 with zero points that are no whole numbers, and its exact values."""
    codes = torch.randint(-8, 8, (rows, depth), dtype=torch.int8)
    scales, zeros = torch.rand(rows, depth // 32) + 0.1, torch.randn(rows, depth // 32)
    weight = repack.pack_groups(codes.to(DEVICE), scales.to(DEVICE), zeros.to(DEVICE), 4)
    exact = (codes.double() - zeros.double().repeat_interleave(32, 1)) * scales.double().repeat_interleave(32, 1)
    return GroupedLinear(weight, torch.ones(rows), "Q4_1 as 4-bit groups of 32"), exact


def test_small_matrices_become_bf16_and_join() -> None:
    (first, one), (second, two) = grouped(48, 96), grouped(16, 96)
    parts = expand_small([first, second])
    assert all(isinstance(part, DenseLinear) for part in parts)
    assert parts[0].nbytes == 48 * 96 * 2
    assert "small" in parts[0].detail
    assert "Q4_1" in parts[0].detail
    whole = join_linears(parts)
    assert whole is not None
    x = torch.randn(3, 96).bfloat16()
    wanted = x.double() @ torch.cat([one, two]).T + 1
    got = whole.multiply(x.to(DEVICE)).double().cpu()
    assert float((got - wanted).norm() / wanted.norm()) < ERROR


def test_together_they_must_be_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "EXPANDED_WEIGHTS", 40 * 64)
    assert isinstance(expand_small([grouped(40, 64)[0]])[0], DenseLinear)
    parts = [grouped(20, 64)[0], grouped(21, 64)[0]]
    assert expand_small(parts) == parts


def test_what_is_bf16_already_stays() -> None:
    values = DenseLinear(torch.randn(8, 64).to(DEVICE), None)
    assert expand_small([values]) == [values]


def test_a_loaded_model_counts_the_bytes_of_what_was_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hidden 64, MLP 96, 4 + 2 heads of 16: q, k, v are 128 x 64, o 64 x 64, gate and up 192 x 64, down 64 x 96."""
    save_quantized(tmp_path, "gptq", Scheme("int", 4, 32), "llama")
    monkeypatch.setattr(choose, "EXPANDED_WEIGHTS", 128 * 64)
    model = load_model(open_checkpoint(tmp_path), DEVICE, 64, "triton")
    kinds: dict[str, Any] = {
        name: weight.kernel.run for name, weight in model.weights.items() if weight.kernel is not None
    }
    layer = {name.split(".")[-1]: run for name, run in kinds.items() if "layers.0." in name}
    assert {name for name, run in layer.items() if "small" in run.detail} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "down_proj",
    }  # fmt: skip
    assert isinstance(layer["k_proj"], JoinedRows)
    assert isinstance(layer["k_proj"].whole, DenseLinear)
    assert isinstance(layer["up_proj"].whole, GroupedLinear)
    assert layer["o_proj"].nbytes == 64 * 64 * 2
    wanted = model.weights["model.layers.0.self_attn.k_proj"].dequantize(0, 32)
    got = layer["k_proj"].whole.weight[64:96].cpu()
    assert (got.float() - wanted).abs().max() <= wanted.abs().max() * 2**-7
