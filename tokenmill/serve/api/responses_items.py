"""The items of /v1/responses: input items -> chat messages, parser events -> output items and the events of a stream.

Complete and streamed answers go through the same `OutputItems`, so they hold the same items. Events come in OpenAI's
order: an item is added, its part is added, deltas, the text is done, the part is done, the item is done. Knows no HTTP.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.tools.base import CallArguments, CallEnd, CallStart, Content, ToolEvent

_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_ROLES = ("user", "assistant", "system", "developer")
Event = tuple[str, dict[str, Any]]  # its type and fields


def input_messages(given: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chat messages of an input. Raises ValueError for items that cannot be shown to the model."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(given):
        _add_item(messages, number, item)
    return messages


def _add_item(messages: list[dict[str, Any]], number: int, item: Mapping[str, Any]) -> None:
    match item.get("type", "message"):
        case "message":
            if item.get("role") not in _ROLES:
                raise ValueError(f"input item {number} has no known role: give user, assistant, system or developer")
            text = _text(number, item.get("content"))
            if item["role"] == "assistant":
                message = _assistant(messages, new=bool(messages and messages[-1].get("content")))
                message["content"] = text
            else:
                messages.append({"role": item["role"], "content": text})
        case "function_call":
            function = {"name": str(item.get("name")), "arguments": str(item.get("arguments") or "{}")}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            content = _text(number, item.get("output"))
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": content})
        case "reasoning":
            text = _text(number, item.get("content") or item.get("summary") or "")
            if text:
                _assistant(messages, new=True)["reasoning_content"] = text
        case kind:
            raise ValueError(
                f"input item {number} of type {str(kind)[:40]!r} is not supported: give messages and calls"
            )


def _assistant(messages: list[dict[str, Any]], new: bool = False) -> dict[str, Any]:
    """The assistant's message that an item belongs to: reasoning, text and calls of one turn are one message."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(number: int, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"input item {number} has no content: give text or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, Mapping) else None
        if kind not in (*_TEXT_PARTS, "refusal") or not isinstance(text, str):
            raise ValueError(f"input item {number} has a part of type {str(kind)[:40]!r}: this model reads text only")
        texts.append(text)
    return "".join(texts)


class OutputItems:
    """The items of an answer as they come: `take` and `finish` return the events of a stream, `items` is the output."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last item, while text is still added to it
        self._text = ""

    def take(self, event: ToolEvent) -> Iterator[Event]:
        match event:
            case Reasoning(text=text):
                yield from self._begin("reasoning", {"type": "reasoning", "summary": [], "content": []}, "rs")
                yield self._delta("response.reasoning_text.delta", text)
            case Content(text=text):
                yield from self._begin("message", {"type": "message", "role": "assistant", "content": []}, "msg")
                yield self._delta("response.output_text.delta", text, logprobs=[])
            case CallStart(call_id=call_id, name=name):
                yield from self._end("completed")
                item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
                yield from self._begin("", item, "fc")
            case CallArguments(text=text):
                self._text += text
                yield self._at("response.function_call_arguments.delta", {"delta": text})
            case CallEnd():
                yield from self._end("completed")

    def finish(self, status: str) -> Iterator[Event]:
        """`status` of the item that is still open: completed or incomplete."""
        if not self.items:  # the answer is empty: say so
            yield from self._begin("message", {"type": "message", "role": "assistant", "content": []}, "msg")
        yield from self._end(status)

    def messages(self) -> list[dict[str, Any]]:
        """The answer as chat messages, for the requests that follow."""
        return input_messages(self.items)

    def _begin(self, kind: str, item: dict[str, Any], prefix: str) -> Iterator[Event]:
        """Open an item, unless one of this kind is open."""
        if self._open is not None and self._open["type"] == kind:
            return
        yield from self._end("completed")
        self._open = {"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"}
        self._text = ""
        self.items.append(self._open)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": _copy(self._open)}
        if kind:
            yield self._at("response.content_part.added", {"content_index": 0, "part": self._part("")})

    def _end(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        if item["type"] == "function_call":
            item["arguments"] = self._text
            fields = {"name": item["name"], "arguments": self._text}
            yield self._at("response.function_call_arguments.done", fields)
        else:
            message = item["type"] == "message"
            done = {"content_index": 0, "text": self._text, **({"logprobs": []} if message else {})}
            yield self._at("response.output_text.done" if message else "response.reasoning_text.done", done)
            item["content"] = [self._part(self._text)]
            yield self._at("response.content_part.done", {"content_index": 0, "part": self._part(self._text)})
        item["status"] = status
        self._open = None
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": _copy(item)}

    def _part(self, text: str) -> dict[str, Any]:
        assert self._open is not None
        if self._open["type"] == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _delta(self, kind: str, text: str, **fields: Any) -> Event:
        self._text += text
        return self._at(kind, {"content_index": 0, "delta": text, **fields})

    def _at(self, kind: str, fields: dict[str, Any]) -> Event:
        """An event about the last item."""
        return kind, {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """As it is now: the stream may be encoded later."""
    return {key: list(value) if isinstance(value, list) else value for key, value in item.items()}
