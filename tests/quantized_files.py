"""Quantized matrices and models for tests: random ones of any scheme, weights rounded to a scheme in the plainest way,
a tiny model saved in a quantized file format, and one sample of everything that can be written.

The rounding here is only good enough to make a model that still computes something; methods are tested elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.tiny_models import make
from tokenmill.checkpoint.base import StoredTensor
from tokenmill.kernels.rounding import CALIBRATED, nearest_e2m1, power_of_two_scale
from tokenmill.model.formats.files import FILE_FORMATS
from tokenmill.model.formats.quantized import NF4_VALUES, QuantizedMatrix, Scheme


def scale_shape(scheme: Scheme, rows: int, columns: int) -> tuple[int, int]:
    return -(-rows // (scheme.block_rows or rows)), -(-columns // (scheme.group_size or columns))


def random_matrix(scheme: Scheme, rows: int, columns: int, seed: int = 0, largest: float = 0.02) -> QuantizedMatrix:
    """Codes over their whole range; float scales up to `largest`, as a half holds them."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**scheme.bits, (rows, columns), generator=generator).to(torch.uint8)
    shape = scale_shape(scheme, rows, columns)
    scales = ((torch.rand(shape, generator=generator) + 0.1) * largest).half().float()
    if scheme.element == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # not a number
    if scheme.scale_type == "e8m0":
        scales = torch.exp2(scales.log2().round())
    if scheme.scale_type == "e4m3":
        scales = (scales / largest * 400).to(torch.float8_e4m3fn).float()
    zeros = None if scheme.symmetric else torch.randint(0, 2**scheme.bits, shape, generator=generator).float()
    matrix = QuantizedMatrix(scheme, codes, scales, zeros)
    if scheme.scale_type == "e4m3":
        matrix = replace(matrix, global_scale=1 / 2048.0)
    if scheme.element == "codebook":
        matrix = replace(matrix, table=torch.linspace(-1, 1, 2**scheme.bits))
    return replace(matrix, input_scale=0.0625) if scheme.activations in CALIBRATED else matrix


def rounded(weight: Tensor, scheme: Scheme, input_scale: float = 0.05) -> QuantizedMatrix:
    """`weight` to the nearest numbers of the scheme, scales from the largest magnitudes (float32, not shortened)."""
    rows, columns = weight.shape
    across, down = scheme.group_size or columns, scheme.block_rows or rows
    padded = torch.nn.functional.pad(weight, (0, -columns % across, 0, -rows % down))
    blocks = padded.view(padded.shape[0] // down, down, -1, across).transpose(1, 2)  # [down, across, rows, columns]
    peak = blocks.abs().amax((2, 3))
    matrix = QuantizedMatrix(scheme, torch.empty(0), peak)
    if scheme.element == "int" and not scheme.symmetric:
        low, high = blocks.amin((2, 3)).clamp(max=0), blocks.amax((2, 3)).clamp(min=0)
        scales = (high - low) / (2**scheme.bits - 1)
        matrix = replace(matrix, scales=scales, zeros=(-low / scales).round())
    else:
        matrix = _with_scales(matrix, peak, float(weight.abs().max()))
    wide = (matrix.scales * matrix.global_scale)[:, :, None, None]
    codes = _codes(blocks / wide, matrix)
    flat = codes.transpose(1, 2).reshape(padded.shape)[:rows, :columns].contiguous()
    calibrated = input_scale if scheme.activations in CALIBRATED else None
    return replace(matrix, codes=flat, input_scale=calibrated)


def _with_scales(matrix: QuantizedMatrix, peak: Tensor, largest: float) -> QuantizedMatrix:
    scheme = matrix.scheme
    top = {"int": 2 ** (scheme.bits - 1) - 0.5, "e4m3": 448.0, "e2m1": 6.0, "nf4": 1.0}[scheme.element]
    if scheme.scale_type == "e8m0":
        return replace(matrix, scales=power_of_two_scale(peak, 8 if scheme.element == "e4m3" else 2))
    if scheme.scale_type == "e4m3":
        scales = (peak / largest * 448).to(torch.float8_e4m3fn).float()
        return replace(matrix, scales=scales, global_scale=1.0 / float(torch.tensor(448 * top / largest)))
    return replace(matrix, scales=peak / top)


def _codes(relative: Tensor, matrix: QuantizedMatrix) -> Tensor:
    scheme = matrix.scheme
    if scheme.element == "int":
        zeros: float | Tensor = 2 ** (scheme.bits - 1) if matrix.zeros is None else matrix.zeros[:, :, None, None]
        return (relative + zeros).round().clamp(0, 2**scheme.bits - 1).to(torch.uint8)
    if scheme.element == "e4m3":
        return relative.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if scheme.element == "e2m1":
        return nearest_e2m1(relative.clamp(-6, 6))
    return (relative.unsqueeze(-1) - torch.tensor(NF4_VALUES)).abs().argmin(-1).to(torch.uint8)


def save_quantized(
    folder: Path, file_format: str, scheme_of: Scheme | Callable[[str], Scheme], name: str = "llama"
) -> dict[str, QuantizedMatrix]:
    """A tiny random model in `folder`, its block linears written in `file_format`; returns them by module name."""
    make(name, folder)
    stored = load_file(folder / "model.safetensors")
    matrices: dict[str, QuantizedMatrix] = {}
    writer = FILE_FORMATS.get(file_format)
    tensors = dict(stored)
    for key, value in stored.items():
        if value.dim() == 2 and "_proj." in key:
            module = key.removesuffix(".weight")
            scheme = scheme_of if isinstance(scheme_of, Scheme) else scheme_of(module)
            matrices[module] = rounded(tensors.pop(key).float(), scheme)
            tensors |= {f"{module}.{suffix}": part for suffix, part in writer.encode(matrices[module]).items()}
    schemes = {module: matrix.scheme for module, matrix in matrices.items()}
    writer.check(schemes, {module: matrix.shape for module, matrix in matrices.items()})
    save_tensors(folder, tensors, writer.quantization_config(schemes, ["lm_head"]))
    return matrices


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], quantization_config: Mapping[str, Any]) -> None:
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))


class MemoryCheckpoint:
    """A Checkpoint over tensors at hand, for one matrix or a few."""

    def __init__(self, tensors: Mapping[str, Tensor], quantization: Mapping[str, object] | None = None) -> None:
        self.path = Path("memory")
        self.description = SimpleNamespace(architecture="llama")  # as much of it as names of tensors need
        self._tensors = dict(tensors)
        self._quantization = dict(quantization or {})

    def names(self) -> list[str]:
        return list(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> StoredTensor:
        data = self._tensors[name]
        return StoredTensor(name, tuple(data.shape), _TYPE_NAMES[data.dtype], data)

    def release(self, name: str) -> None:
        assert name in self._tensors

    def is_quantized(self) -> bool:
        return bool(self.quantization())

    def stores_halves(self) -> bool:
        return False

    def quantization(self) -> dict[str, object]:
        return self._quantization


_TYPE_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}


def in_memory(matrix: QuantizedMatrix, file_format: str, prefix: str = "model.q_proj") -> MemoryCheckpoint:
    """One matrix as `file_format` writes it, with its config."""
    writer = FILE_FORMATS.get(file_format)
    tensors = {f"{prefix}.{suffix}": part for suffix, part in writer.encode(matrix).items()}
    return MemoryCheckpoint(tensors, writer.quantization_config({prefix: matrix.scheme}, []))


# Everything each file format can hold, for tests that go through all of them. By what it is and where it is written.
SAMPLES: dict[str, tuple[str, Scheme]] = {
    **{f"pack {bits} bit": ("compressed-tensors", Scheme("int", bits, 32)) for bits in range(2, 9)},
    **{
        f"pack {bits} bit asym": ("compressed-tensors", Scheme("int", bits, 32, symmetric=False))
        for bits in (2, 3, 4, 7)
    },
    "pack channel": ("compressed-tensors", Scheme("int", 4)),
    "pack groups of 16": ("compressed-tensors", Scheme("int", 4, 16)),
    "pack with int8 input": ("compressed-tensors", Scheme("int", 4, 32, activations="int8_token")),
    "pack with float8 input": ("compressed-tensors", Scheme("int", 4, 32, activations="fp8_token")),
    "W8A8": ("compressed-tensors", Scheme("int", 8, activations="int8_token")),
    "W8A8 static": ("compressed-tensors", Scheme("int", 8, activations="int8_static")),
    "W8A8 tensor": ("compressed-tensors", Scheme("int", 8, 0, 0, activations="int8_token")),
    "float8 tensor": ("compressed-tensors", Scheme("e4m3", 8, 0, 0, activations="fp8_static")),
    "float8 channel": ("compressed-tensors", Scheme("e4m3", 8, activations="fp8_token")),
    "float8 channel, weights only": ("compressed-tensors", Scheme("e4m3", 8)),
    "float8 block": ("compressed-tensors", Scheme("e4m3", 8, 128, 128, activations="fp8_group128")),
    "mxfp8": ("compressed-tensors", Scheme("e4m3", 8, 32, scale_type="e8m0", activations="mxfp8")),
    "mxfp4": ("compressed-tensors", Scheme("e2m1", 4, 32, scale_type="e8m0", activations="mxfp4")),
    "mxfp4, weights only": ("compressed-tensors", Scheme("e2m1", 4, 32, scale_type="e8m0")),
    "nvfp4": ("compressed-tensors", Scheme("e2m1", 4, 16, scale_type="e4m3", activations="nvfp4")),
    "nvfp4, weights only": ("compressed-tensors", Scheme("e2m1", 4, 16, scale_type="e4m3")),
    **{f"gptq {bits} bit": ("gptq", Scheme("int", bits, 32)) for bits in (2, 3, 4, 8)},
    **{f"gptq_v2 {bits} bit asym": ("gptq_v2", Scheme("int", bits, 32, symmetric=False)) for bits in (2, 3, 4, 8)},
    "gptq channel": ("gptq", Scheme("int", 4)),
    "awq": ("awq", Scheme("int", 4, 32)),
    "awq asym": ("awq", Scheme("int", 4, 32, symmetric=False)),
    "awq asym channel": ("awq", Scheme("int", 4, symmetric=False)),
    "nf4": ("bitsandbytes", Scheme("nf4", 4, 32)),
    "codebook 4 bit": ("tokenmill", Scheme("codebook", 4)),
    "codebook 3 bit": ("tokenmill", Scheme("codebook", 3)),
    "llm.int8": ("bitsandbytes", Scheme("int", 8, activations="llm_int8")),
    "fp8 block": ("fp8", Scheme("e4m3", 8, 128, 128, activations="fp8_group128")),
    "fp8 tensor": ("fp8", Scheme("e4m3", 8, 0, 0, activations="fp8_token")),
}
