"""Tools in one chat request: which may be called, whether one must be, and what that means for prompt and output.

Joins the style of the model (`ToolStyle`, one per server) with the wishes of a request (`ToolUse`). Every refusal is a
UserError. Knows no HTTP shapes beyond the fields `tools` and `tool_choice` of the OpenAI API.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.checkpoint.tokenizer import Tokenizer
from tokenmill.errors import UserError
from tokenmill.serve.tools import ALIASES, TOOL_PARSERS
from tokenmill.serve.tools.base import ToolParser
from tokenmill.serve.tools.functions import Function, read_functions
from tokenmill.serve.tools.prompting import plain_messages, with_tools
from tokenmill.types import SamplingParams, StructuredSpec

AUTOMATIC = "auto"
_FALLBACK = "hermes"
_CHOICES = '"auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True, slots=True)
class ToolStyle:
    """How this model is told of tools and how it writes calls."""

    parser: type[ToolParser]
    in_template: bool  # the chat template shows tools; otherwise a system message does
    marker_hidden: bool  # what announces a call is a control token, which plain text does not show
    reason: str  # why this parser

    @classmethod
    def choose(cls, template: ChatTemplate | None, tokenizer: Tokenizer, name: str = AUTOMATIC) -> ToolStyle:
        source = template.tool_source if template is not None else ""
        in_template = re.search(r"\btools\b", source) is not None
        if name != AUTOMATIC:
            parser, reason = TOOL_PARSERS.get(name if name in TOOL_PARSERS else ALIASES.get(name, name)), "as stated"
        else:
            matching = [name for name in TOOL_PARSERS if in_template and TOOL_PARSERS.get(name).writes(source)]
            parser = TOOL_PARSERS.get(matching[0] if matching else _FALLBACK)
            reason = "from the chat template" if matching else "default: the chat template does not tell"
        marker: list[int] = []
        if parser.marker and tokenizer.reads_text:
            marker = tokenizer.encode(parser.marker, add_special_tokens=False, parse_special=True)
        return cls(parser, in_template, len(marker) == 1 and marker[0] in tokenizer.special_ids, reason)

    def for_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None]:
        """Messages and tools as the template gets them."""
        if self.in_template:
            return messages, tools
        return (with_tools(messages, tools) if tools else plain_messages(messages)), None


@dataclass(frozen=True, slots=True)
class ToolUse:
    style: ToolStyle
    tools: tuple[Mapping[str, Any], ...]  # as the client sent them
    functions: tuple[Function, ...]  # those that may be called
    forced: bool
    parallel: bool

    def parser(self) -> ToolParser:
        return self.style.parser(self.functions, self.forced, self.parallel)

    def apply(self, params: SamplingParams) -> SamplingParams:
        """What forces a call, or lets one stand in for a JSON answer, joins the sampling parameters."""
        if self.style.marker_hidden:
            params = replace(params, skip_special_tokens=False)
        wanted = params.structured
        if not self.forced and wanted is None:
            return params
        if wanted is None:
            rules = self.style.parser.grammar(self.functions, self.parallel)
            return replace(params, structured=StructuredSpec("grammar", f"start: calls\n{rules}"))
        if self.forced:
            raise UserError("tool_choice requires a call, but response_format is set too", "leave one of them out")
        rules = self.style.parser.grammar_beside_json(self.functions, self.parallel)
        return replace(params, structured=_either(wanted, rules))


def plan_tools(
    style: ToolStyle,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    parallel: bool | None,
) -> ToolUse | None:
    """None if no tool may be called."""
    if not tools:
        if choice not in (None, AUTOMATIC, "none"):
            raise UserError("tool_choice requires a call, but there are no tools", "give tools")
        return None
    functions = read_functions(tools)
    if choice == "none":
        return None
    forced = choice not in (None, AUTOMATIC)
    if isinstance(choice, Mapping):
        functions = [each for each in functions if each.name == _chosen(choice)]
        if not functions:
            raise UserError("tool_choice names a function that is not among the tools", "correct the name")
    elif choice not in (None, AUTOMATIC, "required"):
        raise UserError("tool_choice is unknown", f"give {_CHOICES}")
    single = isinstance(choice, Mapping) or parallel is False
    return ToolUse(style, tuple(tools), tuple(functions), forced, not single)


def _chosen(choice: Mapping[str, Any]) -> object:
    function = choice.get("function")
    if choice.get("type") != "function" or not isinstance(function, Mapping):
        raise UserError("tool_choice is unknown", f"give {_CHOICES}")
    return function.get("name")


def _either(wanted: StructuredSpec, rules: str) -> StructuredSpec:
    """The stated JSON, or calls."""
    from tokenmill.grammar.schemas import json_rule, read_schema

    if wanted.kind not in ("json_object", "json_schema"):
        raise UserError(f"tools and a {wanted.kind} are given", 'leave one of them out, or set tool_choice to "none"')
    schema = read_schema(wanted.text) if wanted.kind == "json_schema" else {"type": "object"}
    return StructuredSpec("grammar", f"start: answer | calls\nanswer: {json_rule(schema)}\n{rules}")
