"""What `quantization_config` says of one matrix, where its tensors alone do not: bits, groups, rounding of its input.

Reads the variants of compressed-tensors, `fp8`, ModelOpt, GPTQ and bitsandbytes. A setting that would change the
result and that we do not run is an error, never ignored. Knows nothing of tensors. Used by the readers of this folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tokenmill.checkpoint.base import Checkpoint
from tokenmill.checkpoint.configs.tensor_names import naming_of, stored_name
from tokenmill.errors import CheckpointError
from tokenmill.kernels.rounding import OUTLIER_THRESHOLD

_OTHER_SCHEME = "requantize the model with a scheme that tokenmill runs (W8A8, FP8, W4A16, NVFP4, MXFP4, MXFP8)"


def compressed_tensors_group(checkpoint: Checkpoint, prefix: str) -> Mapping[str, Any]:
    """The config group whose targets match `prefix`: by name or pattern first, else by class; empty if none does."""
    groups = checkpoint.quantization().get("config_groups")
    if not isinstance(groups, Mapping):
        return {}
    names = {prefix, stored_name(naming_of(checkpoint.description.architecture), prefix)}
    by_class: Mapping[str, Any] = {}
    for group in groups.values():
        if not isinstance(group, Mapping):
            continue
        for target in group.get("targets") or ():
            pattern = str(target)[3:] if str(target).startswith("re:") else ""
            if target in names or (pattern and any(re.match(pattern, name) for name in names)):
                return group
            if target == "Linear":
                by_class = by_class or group
    return by_class


def weight_settings(checkpoint: Checkpoint, prefix: str) -> Mapping[str, Any]:
    """`weights` of the group of compressed-tensors; empty without one."""
    weights = compressed_tensors_group(checkpoint, prefix).get("weights")
    return weights if isinstance(weights, Mapping) else {}


def input_rounding(checkpoint: Checkpoint, prefix: str) -> str:
    """How the input of this product is rounded, as a kind of kernels/rounding.py."""
    settings = checkpoint.quantization()
    method = settings.get("quant_method")
    if method == "fp8":
        return _fp8_rounding(settings)
    if str(method or "").startswith("modelopt") or "quant_algo" in settings:
        return _modelopt_rounding(str(settings.get("quant_algo", "")), prefix)
    group = compressed_tensors_group(checkpoint, prefix)
    if group.get("output_activations"):
        raise CheckpointError(f"{prefix} has quantized outputs, which tokenmill does not support", _OTHER_SCHEME)
    inputs = group.get("input_activations")
    return "none" if not inputs else _compressed_tensors_rounding(inputs, prefix)


def outlier_rounding(checkpoint: Checkpoint) -> str:
    """The rounding of LLM.int8() under the threshold of the config."""
    threshold = checkpoint.quantization().get("llm_int8_threshold", OUTLIER_THRESHOLD)
    if threshold == 0:
        return "int8_token"
    if threshold != OUTLIER_THRESHOLD:
        raise CheckpointError(
            f"llm_int8_threshold is {threshold!r}; tokenmill runs {OUTLIER_THRESHOLD:g} (the default) and 0",
            "set it to one of these in config.json",
        )
    return "llm_int8"


def _fp8_rounding(settings: Mapping[str, Any]) -> str:
    if settings.get("activation_scheme") == "static":
        return "fp8_static"
    return "fp8_group128" if settings.get("weight_block_size") else "fp8_token"


def _modelopt_rounding(algorithm: str, prefix: str) -> str:
    kinds = {
        "FP8": "fp8_static",
        "FP8_PER_CHANNEL_PER_TOKEN": "fp8_token",
        "FP8_PB_WO": "none",
        "NVFP4": "nvfp4",
        "W4A16_NVFP4": "none",
        "MXFP8": "mxfp8",
    }
    if algorithm not in kinds:
        raise CheckpointError(
            f"{prefix}: ModelOpt algorithm '{algorithm}' is not one that tokenmill runs", _OTHER_SCHEME
        )
    return kinds[algorithm]


def _compressed_tensors_rounding(inputs: Mapping[str, Any], prefix: str) -> str:
    bits, kind, strategy = inputs.get("num_bits"), inputs.get("type", "int"), inputs.get("strategy")
    dynamic, size = inputs.get("dynamic", False), inputs.get("group_size")
    size = size if isinstance(size, int) and size > 0 else None
    powers_of_two = "uint8" in str(inputs.get("scale_dtype"))
    dynamic_kinds: dict[tuple[object, ...], str | None] = {
        ("int", 8, "token", None): "int8_token",
        ("float", 8, "token", None): "fp8_token",
        ("int", 8, "tensor", None): "int8_token",  # other engines use one scale per step, this one per token
        ("float", 8, "tensor", None): "fp8_token",
        ("float", 8, "group", 128): "fp8_group128",
        ("float", 8, "group", 32): "mxfp8" if powers_of_two else None,
        ("float", 4, "group", 32): "mxfp4",
        ("float", 4, "tensor_group", 16): "nvfp4",
    }
    static: dict[tuple[object, ...], str | None] = {
        ("int", 8, "tensor", None): "int8_static",
        ("float", 8, "tensor", None): "fp8_static",
    }
    rounding = (dynamic_kinds if dynamic else static).get((str(kind), bits, str(strategy), size))
    if rounding is None or not inputs.get("symmetric", True):
        symmetry = "" if inputs.get("symmetric", True) else " asymmetric"
        raise CheckpointError(
            f"{prefix}: inputs as{symmetry} {kind}{bits} per {strategy} are not what tokenmill runs", _OTHER_SCHEME
        )
    return rounding
