"""What config.json says of recurrent layers, for hf_export.py: written for Mamba, for others only taken over.

Hybrids spell the same things in many ways; `quantize` and `convert` copy the config of a source that has one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isinf
from typing import Any

from tokenmill.checkpoint.description import ModelDescription
from tokenmill.checkpoint.mixers import Recurrent
from tokenmill.errors import CheckpointError


def mamba_keys(description: ModelDescription) -> dict[str, Any]:
    """Of models that have nothing but Mamba layers."""
    d = description
    (m,) = d.layers[0].mixers
    assert isinstance(m, Recurrent)
    if m.inner % d.hidden_size:
        raise CheckpointError(
            f"no Hugging Face model type has {m.inner} channels of a hidden size of {d.hidden_size}",
            "choose a GGUF format for it",
        )
    low, high = m.time_step_limits
    limits = [low, {"__float__": "Infinity"} if isinf(high) else high]  # as transformers spells it
    by_head = {"num_heads": m.num_heads, "head_dim": m.head_dim, "n_groups": m.num_groups} if m.num_heads else {}
    return {
        "layer_norm_epsilon": d.norm_eps,
        "intermediate_size": m.inner,
        "expand": m.inner // d.hidden_size,
        "state_size": m.state_size,
        "conv_kernel": m.convolution,
        "use_bias": m.input_bias,
        "use_conv_bias": m.convolution_bias,
        "hidden_act": "silu",
        "residual_in_fp32": True,
        "mixer_rms_eps": m.step_norm_eps,
        **by_head,
        **({"time_step_rank": m.rank} if m.rank else {"time_step_limit": limits}),
    }


def taken_over(config: Mapping[str, Any], dtype: str, tied: bool) -> dict[str, Any]:
    """The source's own config.json for the unquantized text model in it; `tied`: its head is the embedding."""
    text = config.get("text_config")
    if isinstance(text, Mapping):
        names = config.get("architectures") or ()
        classes = [str(name).replace("ForConditionalGeneration", "ForCausalLM") for name in names]
        config = {**config, "architectures": classes, **text}
    left_out = ("text_config", "vision_config", "quantization_config")
    kept = {key: value for key, value in config.items() if key not in left_out}
    return {**kept, "tie_word_embeddings": tied, "dtype": dtype, "torch_dtype": dtype}


def stored_keys(description: ModelDescription) -> dict[str, Any]:
    raise CheckpointError(
        f"a config.json of architecture '{description.architecture}' cannot be written, only taken over",
        "give a checkpoint that has one",
    )
