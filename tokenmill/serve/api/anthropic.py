"""The Anthropic-style endpoints, as a thin adapter over chat: /v1/messages, complete or streamed in its own events, and
/v1/messages/count_tokens.

Knows only how that API says things. Its errors have their own shape, made by `anthropic_error`.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.errors import UserError
from tokenmill.serve.api.adapter_protocol import AnthropicBody, AnthropicCountBody
from tokenmill.serve.api.anthropic_messages import cache_control, chat_messages, chat_tools
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.chat import chat_prompt, open_chat
from tokenmill.serve.api.exchange import Record, json_response, record_of, respond, to_json, unless_gone
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.api.reading import body_schema, read_body, validate
from tokenmill.serve.api.tool_messages import AnswerReader, reader_of, tools_of
from tokenmill.serve.api.usage import cost_of, lossy_policy, usage_of
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.reasoning.use import switch_variables
from tokenmill.serve.service import Service
from tokenmill.serve.tools.base import CallArguments, CallEnd, CallStart, Content, ToolEvent, fold

PATH = "/v1/messages"
_ERROR_TYPES = {413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error"}


def add_anthropic_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post(PATH, openapi_extra=body_schema(AnthropicBody))
    async def messages(request: Request) -> Response:
        body = await read_body(request, service, AnthropicBody)
        caller, record = caller_of(request, service, body), record_of(request)
        head = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": service.check_model(body.model),
        }
        chat = _as_chat(body, _thinking(service, body))
        tools = tools_of(service, chat)
        opening = open_chat(service, chat, caller, tools, streaming=bool(body.stream))
        generation = await unless_gone(request, opening)

        def reader() -> AnswerReader:
            return reader_of(service, generation, tools, reasons=not chat.continue_final_message)

        async def complete() -> dict[str, Any]:
            return head | _answer(generation, reader(), record)

        return await respond(
            request,
            generation,
            complete=complete,
            chunks=lambda: _events(generation, reader(), head, record),
            ping=lambda: _event("ping"),
        )

    @router.post(f"{PATH}/count_tokens", openapi_extra=body_schema(AnthropicCountBody))
    async def count_tokens(request: Request) -> Response:
        """How many tokens the prompt of such a request has, tools included."""
        body = await read_body(request, service, AnthropicCountBody)
        caller = caller_of(request, service, body)
        service.check_model(body.model)
        chat = _as_chat(body, _thinking(service, body))
        with service.metered(caller.client) as charged:
            counting = _count(service, chat, caller)
            charged.append(await unless_gone(request, counting))
            return json_response({"input_tokens": charged[0]})

    app.include_router(router)


async def _count(service: Service, chat: ChatBody, caller: Caller) -> int:
    try:
        prompt = await chat_prompt(service, chat, caller, tools_of(service, chat))
        (ids,) = await service.encode([prompt], client=caller.client, chat=True)
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None
    return len(ids)


def anthropic_error(error: ApiError) -> dict[str, Any]:
    kind = "billing_error" if error.code == "insufficient_quota" else _ERROR_TYPES.get(error.status, error.type)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _as_chat(body: AnthropicBody, thinking: dict[str, Any] | None = None) -> ChatBody:
    try:
        messages, tools, cache = chat_messages(body), chat_tools(body), cache_control(body)
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    fields = {
        "messages": messages,
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "cache_control": cache,
        "kv_policy": body.kv_policy,
        "kv_budget": body.kv_budget,
    }
    last = messages[-1]
    if last.role == "assistant" and last.content and not last.tool_calls:  # the answer goes on with it
        fields["continue_final_message"] = True
    return validate(ChatBody, fields | tools | (thinking or {}))  # blocks become messages, which may be too many


def _thinking(service: Service, body: AnthropicBody) -> dict[str, Any]:
    """The fields of a chat body that are about reasoning."""
    if body.thinking is None or service.template is None:
        return {}
    enabled = body.thinking.get("type") in ("enabled", "adaptive")
    fields: dict[str, Any] = {"chat_template_kwargs": dict(switch_variables(service.template.source, enabled))}
    if enabled and service.reasoning_style.can_be_limited:
        fields["thinking_token_budget"] = body.thinking.get("budget_tokens")
    return fields


def _stop(generation: Generation, called: bool) -> dict[str, Any]:
    completion = generation.outputs[0].outputs[0]
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "tool_use" if called else "end_turn", "stop_sequence": None}


def _usage(generation: Generation, record: Record) -> dict[str, Any]:
    usage = usage_of(generation, record)
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        **cost_of(generation),
        **lossy_policy(generation),
    }


def _answer(generation: Generation, reader: AnswerReader, record: Record) -> dict[str, Any]:
    answer = fold(reader.read(generation.outputs[0].outputs[0].text, final=True))
    content: list[dict[str, Any]] = [_call_block(call.call_id, call.name, call.arguments) for call in answer.calls]
    if answer.content or not content:
        content.insert(0, {"type": "text", "text": answer.content})
    if answer.reasoning:
        content.insert(0, {"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    return {"content": content, **_stop(generation, reader.called), "usage": _usage(generation, record)}


def _call_block(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = {}  # cut off, see the stop reason, or nested too deeply
    return {"type": "tool_use", "id": call_id, "name": name, "input": parsed}


def _event(name: str, **fields: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + to_json({"type": name, **fields}) + b"\n\n"


class _Blocks:
    """Content blocks of a stream: one at a time is open, numbered in order."""

    def __init__(self) -> None:
        self._index = -1
        self._kind = ""  # of the open block

    def say(self, event: ToolEvent) -> bytes:
        match event:
            case Content(text=text):
                head = b"" if self._kind == "text" else self.open({"type": "text", "text": ""})
                return head + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text=text):
                opening = {"type": "thinking", "thinking": "", "signature": ""}
                head = b"" if self._kind == "thinking" else self.open(opening)
                return head + self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(call_id=call_id, name=name):
                return self.open({"type": "tool_use", "id": call_id, "name": name, "input": {}})
            case CallArguments(text=text):
                return self._delta({"type": "input_json_delta", "partial_json": text})
            case CallEnd():
                return b""

    def open(self, block: dict[str, Any]) -> bytes:
        closed = self.close()
        self._index += 1
        self._kind = block["type"]
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._index)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


async def _events(
    generation: Generation, reader: AnswerReader, head: dict[str, Any], record: Record
) -> AsyncIterator[bytes]:
    opening = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(generation, record)}
    blocks = _Blocks()
    yield _event("message_start", message=opening)
    if reader.plain:
        yield blocks.open({"type": "text", "text": ""})
    try:
        async for batch in generation.deltas():
            text = "".join(delta.text for delta in batch)
            events = reader.read(text, any(delta.finish_reason for delta in batch))
            if events:
                yield b"".join(map(blocks.say, events))
    except ApiError as error:
        record.error = error.message
        yield _event("error", error=anthropic_error(error)["error"])
        return
    yield blocks.close()
    yield _event("message_delta", delta=_stop(generation, reader.called), usage=_usage(generation, record))
    yield _event("message_stop")
