"""Rival engines by name (`--rivals`). Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

RIVALS = Registry(
    "rival",
    {
        "llama.cpp": "tokenmill.optimize.rivals.llamacpp:LlamaCppRival",
        "vllm": "tokenmill.optimize.rivals.vllm:VllmRival",
        "sglang": "tokenmill.optimize.rivals.sglang:SGLangRival",
        "ollama": "tokenmill.optimize.rivals.ollama:OllamaRival",
    },
)
