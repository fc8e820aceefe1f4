"""Architectures by name. Llama, Mistral, Qwen2 and Qwen3 are the plain decoder: what differs between them (biases,
sliding windows, norms of heads) is in the model's description. Add one: a file here and a line in the table; from
outside the package, `ARCHITECTURES.register`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenmill.errors import CheckpointError
from tokenmill.registry import Registry

if TYPE_CHECKING:
    from tokenmill.checkpoint.description import ModelDescription
    from tokenmill.model.architectures.decoder import Decoder

ARCHITECTURES = Registry(
    "architecture",
    {
        "llama": "tokenmill.model.architectures.decoder:Decoder",
        "mistral": "tokenmill.model.architectures.decoder:Decoder",
        "qwen2": "tokenmill.model.architectures.decoder:Decoder",
        "qwen3": "tokenmill.model.architectures.decoder:Decoder",
        "gemma3": "tokenmill.model.architectures.gemma3:Gemma3",
        "deepseek_v2": "tokenmill.model.architectures.deepseek:Deepseek",
        "deepseek_v3": "tokenmill.model.architectures.deepseek:Deepseek",
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
