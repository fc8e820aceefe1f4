"""Styles in which models write their reasoning. Add one: a file here and a line in the table.

Without a stated style, the first whose `writes` recognizes the model's chat template is taken, in this order; a model
whose template none recognizes is read as one that does not reason.
"""

from tokenmill.registry import Registry

REASONING_PARSERS = Registry(
    "reasoning parser",
    {
        "gpt_oss": "tokenmill.serve.reasoning.gpt_oss:GptOss",
        "mistral": "tokenmill.serve.reasoning.mistral:Mistral",
        "granite": "tokenmill.serve.reasoning.granite:Granite",
        "qwen3": "tokenmill.serve.reasoning.qwen3:Qwen3",
        "deepseek_r1": "tokenmill.serve.reasoning.deepseek_r1:DeepSeekR1",
    },
)
# Names that users of vLLM give to the same styles.
ALIASES = {"openai_gptoss": "gpt_oss", "deepseek_v3": "deepseek_r1", "glm45": "qwen3"}
