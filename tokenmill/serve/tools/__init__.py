"""Styles in which models write tool calls. Add one: a file here and a line in the table.

Without a stated style, the first whose `writes` recognizes the model's chat template is taken, in this order.
"""

from tokenmill.registry import Registry

TOOL_PARSERS = Registry(
    "tool-call parser",
    {
        "harmony": "tokenmill.serve.tools.harmony:Harmony",
        "deepseek_v3": "tokenmill.serve.tools.deepseek_v3:DeepSeekV3",
        "deepseek_v31": "tokenmill.serve.tools.deepseek_v31:DeepSeekV31",
        "mistral": "tokenmill.serve.tools.mistral:Mistral",
        "qwen3_coder": "tokenmill.serve.tools.qwen3_coder:Qwen3Coder",
        "granite": "tokenmill.serve.tools.granite:Granite",
        "phi4_mini": "tokenmill.serve.tools.phi4_mini:Phi4Mini",
        "xlam": "tokenmill.serve.tools.xlam:XLam",
        "hermes": "tokenmill.serve.tools.hermes:Hermes",
        "llama4_pythonic": "tokenmill.serve.tools.llama4_pythonic:Llama4Pythonic",
        "pythonic": "tokenmill.serve.tools.pythonic:Pythonic",
        "llama4_json": "tokenmill.serve.tools.llama4_json:Llama4Json",
        "llama3_json": "tokenmill.serve.tools.llama3_json:Llama3Json",
    },
)
# Names that users of vLLM give to the same styles.
ALIASES = {
    "openai": "harmony",
    "gpt_oss": "harmony",
    "deepseek_r1": "deepseek_v3",
    "qwen3_xml": "qwen3_coder",
    "qwen2_5": "hermes",
    "phi4_mini_json": "phi4_mini",
    "granite4": "hermes",
    "granite-20b-fc": "granite",
}
