"""Engines to deploy by name (`--engine`). Add one: a file here and a line in the table."""

from tokenmill.registry import Registry

ENGINES = Registry(
    "engine to deploy",
    {
        "tokenmill": "tokenmill.deploy.engines.tokenmill:Tokenmill",
        "vllm": "tokenmill.deploy.engines.vllm:Vllm",
        "sglang": "tokenmill.deploy.engines.sglang:SGLang",
        "trtllm": "tokenmill.deploy.engines.trtllm:TensorRTLLM",
        "llamacpp": "tokenmill.deploy.engines.llamacpp:LlamaCpp",
        "ollama": "tokenmill.deploy.engines.ollama:Ollama",
    },
)
