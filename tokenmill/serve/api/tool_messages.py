"""Answers with reasoning and tool calls in the shapes of the OpenAI API: a complete message, or deltas of a stream.

Both come from the same parser events, so they say the same. Called by the chat route; the adapters for other APIs use
`AnswerReader` and make shapes of their own.
"""

from __future__ import annotations

from typing import Any, Protocol

from tokenmill.errors import UserError
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.reasoning.base import Reasoning, ReasoningParser
from tokenmill.serve.service import Service
from tokenmill.serve.tools.base import Answer, CallArguments, CallEnd, CallStart, Content, ToolEvent
from tokenmill.serve.tools.use import ToolStyle, ToolUse, plan_tools


class HasToolStyle(Protocol):
    tool_style: ToolStyle


def tools_of(service: HasToolStyle, body: ChatBody) -> ToolUse | None:
    """The tools that the model may call for this body; None if none."""
    try:
        return plan_tools(service.tool_style, body.tools, body.tool_choice, body.parallel_tool_calls)
    except UserError as error:
        raise ApiError(400, str(error), param="tools") from None


class AnswerReader:
    """Reads one answer as it comes: reasoning, then content and calls. Without parsers, all of it is content."""

    def __init__(self, tools: ToolUse | None, reasoning: ReasoningParser | None = None) -> None:
        self._tools = tools.parser() if tools is not None else None
        self._reasoning = reasoning
        self.called = False
        self.reasoned = False

    @property
    def plain(self) -> bool:
        return self._tools is None and self._reasoning is None

    def read(self, text: str, final: bool) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        if self._reasoning is None:
            events += self._content(text)
        else:
            pieces = self._reasoning.feed(text)
            if final:
                pieces += self._reasoning.finish()
            for piece in pieces:
                if isinstance(piece, Reasoning):
                    events.append(piece)
                else:
                    events += self._content(piece.text)
        if final and self._tools is not None:
            events += self._tools.finish()
        self.called = self.called or any(isinstance(event, CallStart) for event in events)
        self.reasoned = self.reasoned or any(isinstance(event, Reasoning) for event in events)
        return events

    def finish_reason(self, reason: str | None) -> str | None:
        """A call that the model has ended by itself is a reason of its own."""
        return "tool_calls" if self.called and reason == "stop" else reason

    def _content(self, text: str) -> list[ToolEvent]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []


def reader_of(service: Service, generation: Generation, tools: ToolUse | None, reasons: bool = True) -> AnswerReader:
    """The reader of an answer to a chat prompt. `reasons`: it may begin with reasoning."""
    if not reasons or (tools is not None and tools.style.parser.reads_reasoning):
        return AnswerReader(tools)
    prompt, params = generation.outputs[0].prompt or "", generation.members[0].request.params
    return AnswerReader(tools, service.reasoning_style.reader(prompt, params.structured))


def count_reasoning(service: Service, generation: Generation, index: int, reader: AnswerReader) -> None:
    """Add the reasoning tokens of a finished choice to the usage."""
    if service.reasoning_style.parser is None:
        return
    ids = generation.outputs[0].outputs[index].token_ids
    num_tokens = service.reasoning_style.num_tokens(ids) if reader.reasoned else 0
    if num_tokens is not None:
        generation.num_reasoning_tokens = (generation.num_reasoning_tokens or 0) + num_tokens


def message_of(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
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
        case Reasoning(text=text):
            return {"reasoning_content": text}
        case CallStart(index=index, call_id=call_id, name=name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case CallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None
