"""compressed-tensors, the container of llm-compressor and the best supported one: ints of 2 to 8 bits, float8, NVFP4,
MXFP4 and MXFP8, with or without rounded activations, several schemes in one model.

Matrices of one scheme form a config group. Ints of 2, 4 and 8 bits are read by more peers than 3, 5, 6 and 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tokenmill.model.formats.files.base import FileFormat, Shape, refuses_groups
from tokenmill.model.formats.float4 import Float4Format
from tokenmill.model.formats.float8 import MX_GROUP, Float8Format
from tokenmill.model.formats.packed_int import PackedIntFormat
from tokenmill.model.formats.plain_int import PlainIntFormat
from tokenmill.model.formats.quantized import QuantizedMatrix, Scheme

_ENCODERS = {
    "pack-quantized": PackedIntFormat.encode,
    "int-quantized": PlainIntFormat.encode,
    "float-quantized": Float8Format.encode,
    "mxfp8-quantized": Float8Format.encode,
    "nvfp4-pack-quantized": Float4Format.encode,
    "mxfp4-pack-quantized": Float4Format.encode,
}
_BYTE_SCALES = {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
_FLOAT8_SCALES = {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
_INPUTS: dict[str, dict[str, object]] = {
    "int8_token": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
    "int8_static": {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": False},
    "fp8_token": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    "fp8_static": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
    "fp8_group128": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
    "mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True, **_BYTE_SCALES},
    "mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True, **_BYTE_SCALES},
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
        **_FLOAT8_SCALES,
    },
}


class CompressedTensorsFile(FileFormat):
    name = "compressed-tensors"

    @classmethod
    def refuses(cls, scheme: Scheme, shape: Shape) -> str | None:
        if scheme.element not in ("int", "e4m3", "e2m1"):
            other = {"nf4": "bitsandbytes", "float": "dense"}.get(scheme.element, "tokenmill")
            return f"it cannot store {scheme.element} numbers; write it as {other}"
        if scheme.activations != "none" and scheme.activations not in _INPUTS:
            return f"it cannot express {scheme.activations} activations; write it as bitsandbytes"
        if scheme.block_rows > 1 and scheme.element == "e4m3" and scheme.group_size:
            return None  # blocks at the edges may be short
        if scheme.element == "int":
            return _refuses_int(scheme, shape)
        wanted = {"e8m0": MX_GROUP, "e4m3": 16}.get(scheme.scale_type, 0)
        if scheme.group_size != wanted or (wanted and scheme.block_rows != 1):
            return f"{scheme.scale_type} scales of {scheme.element} come in groups of {wanted or 'a row'}; use that"
        if scheme.element == "e2m1" and not wanted:
            return "4-bit floats need e4m3 or e8m0 scales; use the method nvfp4 or mxfp4"
        return refuses_groups(scheme, shape)

    @classmethod
    def encode(cls, matrix: QuantizedMatrix) -> dict[str, Tensor]:
        return _ENCODERS[compression_format(matrix.scheme)](matrix)

    @classmethod
    def quantization_config(cls, schemes: Mapping[str, Scheme], ignored: Sequence[str]) -> dict[str, object]:
        members: dict[Scheme, list[str]] = {}
        for name, scheme in schemes.items():
            members.setdefault(scheme, []).append(name)
        formats = {compression_format(scheme) for scheme in members}
        groups = {
            f"group_{number}": {
                "targets": ["Linear"] if len(members) == 1 else names,
                "format": compression_format(scheme),
                "weights": _weights(scheme),
                "input_activations": _inputs(scheme),
                "output_activations": None,
            }
            for number, (scheme, names) in enumerate(members.items())
        }
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "ignore": list(ignored),
            "kv_cache_scheme": None,
            "config_groups": groups,
        }


def compression_format(scheme: Scheme) -> str:
    """Which of the container's layouts holds this scheme."""
    if scheme.element == "int":
        whole_bytes = scheme.bits == 8 and scheme.activations.startswith("int8") and not scheme.group_size
        return "int-quantized" if whole_bytes else "pack-quantized"
    if scheme.element == "e4m3":
        return "mxfp8-quantized" if scheme.scale_type == "e8m0" else "float-quantized"
    return "mxfp4-pack-quantized" if scheme.scale_type == "e8m0" else "nvfp4-pack-quantized"


def _refuses_int(scheme: Scheme, shape: Shape) -> str | None:
    if not 2 <= scheme.bits <= 8:
        return f"it has ints of 2 to 8 bits, not {scheme.bits}; use --bits"
    if scheme.block_rows != 1 and compression_format(scheme) == "pack-quantized":
        return "ints share a scale per row or per group of columns; use --group-size"
    if scheme.bits == 8 and scheme.activations.startswith("int8"):
        if scheme.group_size:
            return "W8A8 has a scale per row, not per group; use --group-size 0"
        if not scheme.symmetric:
            return "W8A8 weights are symmetric; use a symmetric scheme"
    return refuses_groups(scheme, shape)


def _weights(scheme: Scheme) -> dict[str, object]:
    settings: dict[str, object] = {
        "num_bits": scheme.bits,
        "type": "int" if scheme.element == "int" else "float",
        "symmetric": scheme.symmetric,
        "dynamic": False,
    }
    if scheme.block_rows > 1:
        return {**settings, "strategy": "block", "block_structure": [scheme.block_rows, scheme.group_size]}
    if not scheme.group_size:
        return {**settings, "strategy": "channel" if scheme.block_rows else "tensor"}
    settings["group_size"] = scheme.group_size
    if scheme.scale_type == "e4m3":
        return {**settings, "strategy": "tensor_group", **_FLOAT8_SCALES}
    return {**settings, "strategy": "group", **(_BYTE_SCALES if scheme.scale_type == "e8m0" else {})}


def _inputs(scheme: Scheme) -> dict[str, object] | None:
    if scheme.activations == "none":
        return None
    return {**_INPUTS[scheme.activations], "symmetric": True}
