"""Architectures by name. Nearly all are one decoder: what differs between them (norms, biases, gates, windows, scales,
rotation, experts, latents) is in the model's description. Add one: a line in the table, or a file here where it
computes something else; from outside the package, `ARCHITECTURES.register`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import CheckpointError
from tokenmill.registry import Registry

if TYPE_CHECKING:
    from tokenmill.checkpoint.description import ModelDescription
    from tokenmill.model.architectures.decoder import Decoder

_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss", "llama4_text")
_LATENT = ("deepseek_v2", "deepseek_v3")
_DENSE = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "olmo3",
    "granite",
    "cohere",
    "cohere2",
    "smollm3",
    "glm",
    "glm4",
    "starcoder2",
    "stablelm",
    "gpt_neox",
    "gpt2",
    "falcon",
    "phi",
)
ARCHITECTURES = Registry(
    "architecture",
    {
        **dict.fromkeys((*_DENSE, *_EXPERTS, *_LATENT), "tokenmill.model.architectures.decoder:Decoder"),
        **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "tokenmill.model.architectures.hybrid:Mamba"),
        **dict.fromkeys(("jamba", "bamba", "falcon_h1"), "tokenmill.model.architectures.hybrid:Hybrid"),
        "granitemoehybrid": "tokenmill.model.architectures.hybrid:GraniteHybrid",
        **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_moe"), "tokenmill.model.architectures.hybrid:QwenNext"),
    },
)


def architecture_of(description: ModelDescription) -> type[Decoder]:
    """The class that computes this model. Raises CheckpointError that names the features none supports."""
    known = description.architecture in ARCHITECTURES
    architecture: type[Decoder] | None = ARCHITECTURES.get(description.architecture) if known else None
    missing = [
        feature for feature in description.features() if architecture is None or feature not in architecture.features
    ]
    if architecture is not None and not missing:
        return architecture
    reasons = f" ({', '.join(missing)})" if missing else ""
    raise CheckpointError(
        f"model type '{description.model_type or description.architecture}' is not supported yet{reasons}",
        f"supported architectures: {', '.join(ARCHITECTURES)}; `tokenmill plan` can plan for the others",
    )
