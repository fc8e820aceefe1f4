"""compressed-tensors and transformers load what we write and give our logits; what they write, we load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.parity.engine_logits import engine_logits
from tests.parity.tiny_models import make
from tests.quantized_files import save_quantized
from tokenmill.kernels.rounding import round_input
from tokenmill.model.formats.quantized import Scheme

pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")

IDS = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(0)).tolist()

SCHEMES = {
    "W4A16": Scheme("int", 4, 32),
    "W4A16_ASYM": Scheme("int", 4, 32, symmetric=False),
    "W2A16": Scheme("int", 2, 32),
    "W3A16": Scheme("int", 3, 32),
    "W5A16_ASYM channel": Scheme("int", 5, symmetric=False),
    "W6A16": Scheme("int", 6, 16),
    "W8A16 channel": Scheme("int", 8),
    "W8A8": Scheme("int", 8, activations="int8_token"),
    "W8A8 static": Scheme("int", 8, activations="int8_static"),
    "W4A8": Scheme("int", 4, 32, activations="int8_token"),
    "FP8_DYNAMIC": Scheme("e4m3", 8, activations="fp8_token"),
    "FP8": Scheme("e4m3", 8, 0, 0, activations="fp8_static"),
    "FP8_BLOCK": Scheme("e4m3", 8, 32, 32),
    "NVFP4A16": Scheme("e2m1", 4, 16, scale_type="e4m3"),
    "NVFP4": Scheme("e2m1", 4, 16, scale_type="e4m3", activations="nvfp4"),
    "MXFP4A16": Scheme("e2m1", 4, 32, scale_type="e8m0"),
    "MXFP4": Scheme("e2m1", 4, 32, scale_type="e8m0", activations="mxfp4"),
    "MXFP8": Scheme("e4m3", 8, 32, scale_type="e8m0", activations="mxfp8"),
}


def peer_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    linear = torch.nn.functional.linear

    def widened(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, weight.to(x.dtype), bias)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # The peer expands small floats to bfloat16, whatever is asked for.
    with torch.inference_mode(), patch.object(torch.nn.functional, "linear", widened):
        logits: Tensor = model(torch.tensor([IDS])).logits[0]
    return logits


def assert_alike(ours: Tensor, theirs: Tensor, scheme: Scheme) -> None:
    """Equal to float32 rounding, where a hair's difference is not blown up by rounding of activations.

    A value on the edge between two codes may fall either way, so with rounded activations the mean error counts. Per
    token the peer divides by 127.5, we (as the integer kernels do) by 127. NVFP4 weights are bfloat16 at the peer.
    """
    distance = (ours - theirs).square().mean().sqrt() / theirs.std()
    if scheme.activations == "int8_token":
        assert distance < 0.05
    elif scheme.scale_type == "e4m3" and scheme.activations != "none":
        assert distance < 0.25  # a step of 4 bits on an edge is a large one; the rounding itself is tested below
    elif scheme.scale_type == "e4m3" or scheme.activations != "none":
        assert distance < 0.02
    else:
        assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", list(SCHEMES))
def test_the_peer_loads_our_files_and_gives_our_logits(name: str, tmp_path: Path) -> None:
    scheme = SCHEMES[name]
    save_quantized(tmp_path, "compressed-tensors", scheme)
    ours = engine_logits(tmp_path, IDS, "eager")
    assert_alike(ours, peer_logits(tmp_path), scheme)
    # The C++ kernels round activations to int8 in blocks where the scheme leaves them alone, and keep scales as halves,
    # after which values on an edge fall otherwise; a static scale rounds small activations coarsely.
    distance = (engine_logits(tmp_path, IDS, "recorded") - ours).square().mean().sqrt() / ours.std()
    assert distance < (0.1 if scheme.activations == "int8_static" else 0.03)


def test_several_schemes_in_one_file(tmp_path: Path) -> None:
    four, eight = Scheme("int", 4, 32), Scheme("e4m3", 8)
    save_quantized(tmp_path, "compressed-tensors", lambda module: eight if "down_proj" in module else four)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert_alike(engine_logits(tmp_path, IDS, "eager"), peer_logits(tmp_path), four)


@pytest.mark.parametrize(
    ("preset", "kind"),
    [
        ("NVFP4", "nvfp4"),
        ("MXFP4", "mxfp4"),
        ("MXFP8", "mxfp8"),
        ("FP8_DYNAMIC", "fp8_token"),
        ("FP8_BLOCK", "fp8_group128"),
    ],
)
def test_activations_are_rounded_as_the_peer_does(preset: str, kind: str) -> None:
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    x = torch.randn(1, 30, 256, generator=torch.Generator().manual_seed(1)) * 2
    arguments = PRESET_SCHEMES[preset]["input_activations"]
    shared = torch.tensor([300.0]) if kind == "nvfp4" else None
    scale, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module(), global_scale=shared)
    theirs = fake_quantize(x, scale, zero, arguments, global_scale=shared)[0]
    torch.testing.assert_close(round_input(x[0], kind, 1 / 300.0), theirs, rtol=1e-6, atol=1e-6)


def save_by_peer(folder: Path, preset: str, group_size: int) -> None:
    """A tiny model quantized, packed and saved by the peer's own code."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    model = make("llama", folder)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    if scheme.weights.strategy == "group":
        scheme.weights.group_size = group_size
    if scheme.weights.strategy == "block":
        scheme.weights.block_structure = [32, 32]
        scheme.input_activations = None  # groups of 128 do not divide a model this small
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            set_parameters(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))


def set_parameters(module: Any, weights: Any) -> None:
    """Scales and zero points as the peer computes them, where it would observe them itself."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.data
    rows, columns = weight.shape
    if weights.strategy == "block":
        high, wide = weights.block_structure
        blocks = weight.view(rows // high, high, columns // wide, wide)
        low, top = blocks.amin((1, 3)), blocks.amax((1, 3))
    else:
        size = {"tensor": rows * columns, "channel": columns}.get(weights.strategy) or weights.group_size
        groups = weight.reshape(
            -1 if weights.strategy == "tensor" else rows,
            weight.numel() // size // (1 if weights.strategy == "tensor" else rows),
            size,
        )
        low, top = groups.amin(-1), groups.amax(-1)
    shared = None
    if weights.strategy == "tensor_group":
        shared = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(shared)
    scale, zero = calculate_qparams(low, top, weights, global_scale=shared)
    module.weight_scale.data.copy_(scale.view_as(module.weight_scale))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero.view_as(module.weight_zero_point))
    for name in ("input_scale", "input_global_scale"):
        if hasattr(module, name):
            getattr(module, name).data.fill_(0.03 if name == "input_scale" else 300.0)


PRESETS = ("W4A16", "W4A16_ASYM", "W3A16", "W7A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4")


@pytest.mark.parametrize("preset", [*PRESETS, "MXFP4A16", "MXFP4", "MXFP8"])
def test_we_load_what_the_peer_writes(preset: str, tmp_path: Path) -> None:
    save_by_peer(tmp_path, preset, 32)
    rounds = {"W8A8": "int8_token"}.get(preset, "none" if "A16" in preset or preset == "FP8_BLOCK" else "fp8_token")
    kind = Scheme("e2m1", 4, 16, scale_type="e4m3") if preset.startswith("NVFP4") else Scheme("int", 4)
    scheme = Scheme(kind.element, kind.bits, kind.group_size, scale_type=kind.scale_type, activations=rounds)
    assert_alike(engine_logits(tmp_path, IDS, "eager"), peer_logits(tmp_path), scheme)
