"""Architectures by name. Llama, Mistral and Qwen2 are the plain decoder: what differs between them (biases, sliding
windows) is in the model's description. Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

ARCHITECTURES = Registry(
    "architecture",
    {
        "llama": "tokenmill.model.architectures.decoder:Decoder",
        "mistral": "tokenmill.model.architectures.decoder:Decoder",
        "qwen2": "tokenmill.model.architectures.decoder:Decoder",
        "qwen3": "tokenmill.model.architectures.qwen3:Qwen3",
        "gemma3": "tokenmill.model.architectures.gemma3:Gemma3",
    },
)
