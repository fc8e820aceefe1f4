"""How a model writes tool calls and reasoning: chosen once, by the options, its chat template and its tokens."""

from __future__ import annotations

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.registry import load_plugin
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.reasoning.use import ReasoningStyle
from tokenmill.serve.tools.use import ToolStyle


def choose_styles(
    config: ServeConfig, template: ChatTemplate | None, tokenizer: Tokenizer
) -> tuple[ToolStyle, ReasoningStyle]:
    for plugin in filter(None, dict.fromkeys((config.tool_parser_plugin, config.reasoning_parser_plugin))):
        load_plugin(plugin)
    tools = ToolStyle.choose(template, tokenizer, config.tool_call_parser)
    return tools, ReasoningStyle.choose(template, tokenizer, config.reasoning_parser)
