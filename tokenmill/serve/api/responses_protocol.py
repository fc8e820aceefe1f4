"""What clients of /v1/responses may send, and how it reads as a chat body. Called by responses.py.

Like protocol.py: unknown fields are named, lists fail at their first bad element. Raises ValueError, with the remedy,
for what this server cannot do: tools that it would have to run itself, items that are not text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tokenmill.serve.api.protocol import MAX_MESSAGES, Body, ChatBody, GenerationBody, Int, Objects, unknown_names
from tokenmill.serve.api.reading import validate

_MAX_METADATA = 16
Items = Annotated[list[dict[str, Any]], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
# Fields of the chat body under the same name; the rest of it is made from items, tools and text.format.
_OWN = {"stream", "stream_options", "max_tokens", "response_format", "n", "prompt_logprobs", "return_token_ids"}


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None


class ReasoningOptions(Body):
    effort: str | None = Field(default=None, max_length=16)


class ResponsesBody(GenerationBody):
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Int | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    previous_response_id: str | None = Field(default=None, max_length=128)
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=_MAX_METADATA)] | None = None
    user: str | None = None
    top_logprobs: Int | None = None
    conversation: Any = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_token_budget: Int | None = Field(default=None, ge=0)

    def output_limit(self) -> int | None:
        return self.max_output_tokens if self.max_output_tokens is not None else self.max_tokens

    def iter_ignored(self, template: str) -> Iterator[str]:
        yield from super().iter_ignored(template)
        yield from (f"chat_template_kwargs.{name}" for name in self.chat_template_kwargs or () if name not in template)
        if self.truncation == "auto":
            yield "truncation"  # a conversation that does not fit is refused, never cut
        if self.reasoning and self.reasoning.effort and "reasoning_effort" not in template:
            yield "reasoning.effort"
        known = ("type", "name", "description", "parameters", "strict")
        yield from unknown_names("tools", self.tools or (), known)

    def refusal(self) -> tuple[str, str] | None:
        """(field, why) if it asks for what is not supported."""
        if self.conversation is not None:
            return "conversation", "conversations are not stored here: use previous_response_id"
        if self.prompt is not None:
            return "prompt", "there are no prompt templates here: send their text as instructions"
        if self.top_logprobs:
            return "top_logprobs", "log-probabilities are part of /v1/chat/completions only"
        if self.n not in (None, 1):
            return "n", "a response has one answer: use /v1/chat/completions"
        if self.prompt_logprobs is not None:
            return "prompt_logprobs", "prompt log-probabilities are part of /v1/chat/completions only"
        if self.return_token_ids:
            return "return_token_ids", "token ids are part of /v1/chat/completions only"
        return None


def chat_body(body: ResponsesBody, messages: list[dict[str, Any]]) -> ChatBody:
    """The same request as a chat body. Raises ValueError."""
    same = {name: getattr(body, name) for name in GenerationBody.model_fields if name not in _OWN}
    fields = {name: value for name, value in same.items() if value is not None}
    tools, choice = _tools(body.tools, body.tool_choice)
    fields |= {
        "messages": messages,
        "max_tokens": body.output_limit(),
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "chat_template_kwargs": body.chat_template_kwargs,
        "enable_thinking": body.enable_thinking,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "thinking_token_budget": body.thinking_token_budget,
    }
    wanted = body.text.format if body.text and body.text.format else TextFormat()
    if wanted.type == "json_schema":
        if wanted.schema_ is None:
            raise ValueError("text.format of type json_schema has no schema")
        schema = {"name": wanted.name, "schema": wanted.schema_, "strict": wanted.strict}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted.type == "json_object":
        fields["response_format"] = {"type": "json_object"}
    return validate(ChatBody, {name: value for name, value in fields.items() if value is not None})


def _tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> tuple[list[dict[str, Any]] | None, str | dict[str, Any] | None]:
    """Tools and their choice as chat has them: functions one level deeper."""
    for tool in tools or ():
        if tool.get("type", "function") != "function":
            kind = str(tool["type"])[:40]
            raise ValueError(f"a tool of type {kind!r} is not supported: this server runs no tools, give functions")
    nested: list[dict[str, Any]] = [{"type": "function", "function": _function(tool)} for tool in tools or ()]
    if not isinstance(choice, Mapping):
        return nested or None, choice
    if choice.get("type") == "function":
        return nested, {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        names = [each.get("name") for each in choice["tools"] if isinstance(each, Mapping)]
        allowed = [tool for tool in nested if tool["function"].get("name") in names]
        return allowed or None, str(choice.get("mode", "auto"))
    raise ValueError("tool_choice is unknown: give auto, none, required, a function or allowed_tools")


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
