"""bitsandbytes and transformers load our nf4, int8 and fp8 files; what bitsandbytes writes, we load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.parity.engine_logits import engine_logits
from tests.parity.tiny_models import make
from tests.quantized_files import MemoryCheckpoint, save_quantized, save_tensors
from tokenmill.model.formats.bitsandbytes import FourBitFormat, Int8RowFormat
from tokenmill.model.formats.quantized import Scheme

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def peer_model(folder: Path) -> Any:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def peer_logits(folder: Path) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = peer_model(folder)(torch.tensor([IDS])).logits[0]
    return logits


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def _weight() -> Tensor:
    return torch.randn(40, 96, generator=torch.Generator().manual_seed(5))  # blocks of 64 cross rows


def _values(functional: Any, packed: Tensor, state: Any) -> Tensor:
    """What their tensors say, by their own table: dequantize of 0.50 goes wrong on x86 where blocks cross rows."""
    peaks = state.absmax
    if state.nested:
        peaks = functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    codes = torch.stack([packed.flatten() >> 4, packed.flatten() & 15], 1).flatten().long()
    values: Tensor = state.code[codes].view(-1, state.blocksize) * peaks[:, None]
    return values.view(state.shape)


@pytest.mark.parametrize("file_format", ["bitsandbytes", "bitsandbytes_double"])
def test_nf4_files(file_format: str, tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    packed, state = functional.quantize_4bit(_weight(), blocksize=64, quant_type="nf4")
    if not torch.allclose(functional.dequantize_4bit(packed, state), _values(functional, packed, state)):
        pytest.skip("this bitsandbytes misplaces blocks that cross rows on a CPU like this one")
    save_quantized(tmp_path, file_format, Scheme("nf4", 4, 32))
    edit_config(tmp_path, bnb_4bit_compute_dtype="float32")
    assert (engine_logits(tmp_path, IDS, "eager") - peer_logits(tmp_path)).abs().max() < 1e-4


def test_int8_files(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    save_quantized(tmp_path, "bitsandbytes", Scheme("int", 8, activations="llm_int8"))
    ours, theirs = engine_logits(tmp_path, IDS, "eager"), peer_logits(tmp_path)
    # The peer rounds inputs to float16 first, and a column is an outlier for all tokens where it is for one.
    assert (ours - theirs).square().mean().sqrt() < 0.03 * theirs.std()


def test_fp8_files(tmp_path: Path) -> None:
    """Without a GPU the peer expands these to bfloat16 and rounds no inputs, so weights are compared."""
    matrices = save_quantized(tmp_path, "fp8", Scheme("e4m3", 8, 32, 32, activations="fp8_group128"))
    state = peer_model(tmp_path).state_dict()
    for name, matrix in matrices.items():
        torch.testing.assert_close(state[f"{name}.weight"].float(), matrix.dequantize(), rtol=2**-8, atol=0)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_we_read_their_4_bit_tensors(kind: str, double: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    packed, state = functional.quantize_4bit(_weight(), blocksize=64, quant_type=kind, compress_statistics=double)
    tensors = {"m.weight": packed, **{f"m.weight.{key}": part for key, part in state.as_dict(packed=True).items()}}
    checkpoint = MemoryCheckpoint(tensors)
    assert set(FourBitFormat.tensor_names(checkpoint, "m")) == set(tensors)
    ours = FourBitFormat.load(checkpoint, "m")
    torch.testing.assert_close(ours.dequantize(0, 40), _values(functional, packed, state), rtol=1e-6, atol=1e-6)


def test_we_run_a_model_with_their_int8_tensors(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    make("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [key for key, value in tensors.items() if "_proj." in key and value.dim() == 2]:
        weight = tensors[key]
        codes, peaks, _ = functional.int8_vectorwise_quant(weight.half())
        tensors |= {key: codes, key.replace("weight", "SCB"): peaks}
        checkpoint = MemoryCheckpoint({"m.weight": codes, "m.SCB": peaks})
        restored = Int8RowFormat.load(checkpoint, "m").dequantize(0, codes.shape[0])
        torch.testing.assert_close(restored, functional.int8_vectorwise_dequant(codes, peaks), rtol=1e-6, atol=1e-7)
    save_tensors(tmp_path, tensors, {"quant_method": "bitsandbytes", "load_in_8bit": True})
    plain, fast = (engine_logits(tmp_path, IDS, executor) for executor in ("eager", "recorded"))
    assert (plain - fast).square().mean().sqrt() < 0.01 * plain.std()
