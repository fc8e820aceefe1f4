"""Answers with tool calls in the shapes of the OpenAI API: a complete message, or the deltas of a stream.

Both come from the same parser events, so they say the same. Called by the chat route; the adapters for other APIs use
`ToolReader` and make shapes of their own.
"""

from __future__ import annotations

from typing import Any

from tokenmill.errors import UserError
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service
from tokenmill.serve.tools.base import Answer, CallArguments, CallEnd, CallStart, Content, ToolEvent
from tokenmill.serve.tools.use import ToolUse, plan_tools


def tools_of(service: Service, body: ChatBody) -> ToolUse | None:
    """The tools that the model may call for this body; None if none."""
    try:
        return plan_tools(service.tool_style, body.tools, body.tool_choice, body.parallel_tool_calls)
    except UserError as error:
        raise ApiError(400, str(error), param="tools") from None


class ToolReader:
    """Reads one answer as it comes. Without tools, all of it is content."""

    def __init__(self, tools: ToolUse | None) -> None:
        self._parser = tools.parser() if tools is not None else None
        self.called = False

    def read(self, text: str, final: bool) -> list[ToolEvent]:
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.feed(text)
        if final:
            events += self._parser.finish()
        self.called = self.called or any(isinstance(event, CallStart) for event in events)
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """A call that the model has ended by itself is a reason of its own."""
        return "tool_calls" if self.called and reason == "stop" else reason


def message_of(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.calls
        ]
    return message


def delta_of(event: ToolEvent) -> dict[str, Any] | None:
    """An event as the `delta` of a chunk; None if it has no delta."""
    match event:
        case Content(text=text):
            return {"content": text}
        case CallStart(index=index, call_id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None
