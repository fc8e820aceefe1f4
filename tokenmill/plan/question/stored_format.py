"""The weight format that a config.json says its checkpoint holds, as a name of hardware/weight_formats.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stored_format(config: Mapping[str, Any]) -> str:
    quantization = config.get("quantization_config") or {}
    method = str(quantization.get("quant_method", ""))
    if method in ("gptq", "awq"):
        return f"int{quantization.get('bits', 4)}-g{quantization.get('group_size', 128)}"
    if method == "mxfp4":
        return "mxfp4"
    if method == "fp8":
        return "fp8-block" if quantization.get("weight_block_size") else "fp8"
    if method == "modelopt":
        algorithm = str(quantization.get("quant_algo", "")).lower()
        return "nvfp4" if "fp4" in algorithm else "fp8"
    if method in ("compressed-tensors", "compressed_tensors"):
        return _compressed_format(quantization)
    dtype = str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    return "fp32" if dtype == "float32" else "bf16"


def _compressed_format(quantization: Mapping[str, Any]) -> str:
    for group in dict(quantization.get("config_groups") or {}).values():
        weights = dict(group).get("weights") or {}
        bits, kind = int(weights.get("num_bits", 8)), str(weights.get("type", "int"))
        if kind == "float":
            return {4: "nvfp4", 8: "fp8"}.get(bits, "bf16")
        return f"int4-g{weights.get('group_size') or 128}" if bits == 4 else "int8"
    return "bf16"
