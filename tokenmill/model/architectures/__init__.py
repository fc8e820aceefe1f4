"""Architectures by name. All dense families are one decoder: what differs between them (norms, biases, gates, windows,
rotation, scales) is in the model's description. Add one: a line in the table, and a file here where it computes
something else; from outside the package, `ARCHITECTURES.register`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import CheckpointError
from tokenmill.registry import Registry

if TYPE_CHECKING:
    from tokenmill.checkpoint.description import ModelDescription
    from tokenmill.model.architectures.decoder import Decoder

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
ARCHITECTURES = Registry("architecture", dict.fromkeys(_DENSE, "tokenmill.model.architectures.decoder:Decoder"))


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
