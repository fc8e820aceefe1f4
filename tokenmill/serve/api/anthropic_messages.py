"""Converts an Anthropic-style body to a chat body: messages with tool blocks, tools, tool choice.

Raises ValueError for what cannot be said. Called by anthropic.py.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from tokenmill.serve.api.adapter_protocol import AnthropicBody, AnthropicMessage
from tokenmill.serve.api.exchange import to_json
from tokenmill.serve.api.protocol import CacheControlBody, Message, content_text

_MAX_BREAKPOINTS = 4


def chat_messages(body: AnthropicBody) -> list[Message]:
    messages = [Message(role="system", content=content_text(body.system))] if body.system else []
    for each in body.messages:
        messages += _messages(each)
    return messages


def chat_tools(body: AnthropicBody) -> dict[str, Any]:
    """The fields of a chat body that are about tools."""
    if body.tools is None:
        return {}
    for tool in body.tools:
        if tool.get("type", "custom") != "custom":
            raise ValueError(f"a tool of type {str(tool['type'])[:40]!r} is not supported: this server runs no tools")
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description") or "",
                "parameters": tool.get("input_schema"),
            },
        }
        for tool in body.tools
    ]
    choice = body.tool_choice or {"type": "auto"}
    return {
        "tools": tools,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": not choice.get("disable_parallel_tool_use", False),
    }


def cache_control(body: AnthropicBody) -> CacheControlBody | None:
    """The longest requested TTL, at the top level or at any block. A breakpoint keeps the entire prompt here, not only
    what precedes it."""
    blocks = [*(body.tools or ()), *(body.system if isinstance(body.system, list) else ())]
    for message in body.messages:
        blocks += message.content if isinstance(message.content, list) else ()
    marks = [block["cache_control"] for block in blocks if block.get("cache_control") is not None]
    if len(marks) > _MAX_BREAKPOINTS:
        raise ValueError(f"{len(marks)} blocks have cache_control: give at most {_MAX_BREAKPOINTS}")
    controls = [_as_control(mark) for mark in marks] + ([body.cache_control] if body.cache_control is not None else [])
    for control in controls:
        if control.type != "ephemeral" or control.ttl not in (None, "5m", "1h"):
            raise ValueError("cache_control: give the type ephemeral, with a ttl of 5m or 1h")
    return max(controls, key=CacheControlBody.seconds, default=None)


def _as_control(mark: object) -> CacheControlBody:
    try:
        return CacheControlBody.model_validate(mark)
    except ValidationError:
        raise ValueError("cache_control: give the type ephemeral, with a ttl of 5m or 1h") from None


def _choice(choice: dict[str, Any]) -> str | dict[str, Any]:
    match choice.get("type"):
        case "auto" | "none" as same:
            return str(same)
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.get("name")}}
    raise ValueError("tool_choice: give a type of auto, any, tool or none")


def _result_text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return content_text(content)
    raise ValueError("the content of a tool_result is neither text nor a list of parts")


def _messages(message: AnthropicMessage) -> list[Message]:
    """Results of tools are messages of their own; calls belong to the assistant's message."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results, calls, texts, thoughts = [], [], [], []
    for block in message.content:
        match block.get("type"):
            case "tool_result" if message.role == "user":
                content = _result_text(block.get("content") or "")
                results.append(Message(role="tool", content=content, tool_call_id=str(block.get("tool_use_id"))))
            case "tool_use" if message.role == "assistant":
                function = {"name": str(block.get("name")), "arguments": to_json(block.get("input") or {}).decode()}
                calls.append({"id": str(block.get("id")), "type": "function", "function": function})
            case "thinking" if message.role == "assistant":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking" if message.role == "assistant":
                pass
            case _:
                texts.append(block)
    if texts or calls or not results:
        reasoning = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        own = Message(role=message.role, content=content_text(texts), tool_calls=calls or None, **reasoning)
        return [*results, own]
    return results
