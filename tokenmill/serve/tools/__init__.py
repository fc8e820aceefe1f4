"""Styles in which models write tool calls. Add one: a file here and a line in the table.

Without a stated style, the first whose `writes` recognizes the model's chat template is taken, in this order.
"""

from tokenmill.registry import Registry

TOOL_PARSERS = Registry(
    "tool-call parser",
    {
        "hermes": "tokenmill.serve.tools.hermes:Hermes",
        "pythonic": "tokenmill.serve.tools.pythonic:Pythonic",
        "llama3_json": "tokenmill.serve.tools.llama3_json:Llama3Json",
    },
)
