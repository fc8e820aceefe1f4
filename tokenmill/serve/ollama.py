"""The Ollama-style endpoints, as a thin adapter over chat: /api/chat, /api/generate, /api/tags, /api/version.

Streams by default, one JSON object per line. Knows only how that API says things.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.serve.caller import caller_of
from tokenmill.serve.chat import finish_reason, open_chat
from tokenmill.serve.errors import ApiError
from tokenmill.serve.exchange import NDJSON, Record, json_response, record_of, respond, to_json, unless_gone
from tokenmill.serve.generation import Generation
from tokenmill.serve.protocol import (
    ChatBody,
    GenerationBody,
    Message,
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaOptions,
)
from tokenmill.serve.sampling import build_params, resolve_max_tokens
from tokenmill.serve.service import Service
from tokenmill.serve.tool_messages import ToolReader, tools_of
from tokenmill.serve.tools.base import Content, ToolCall, ToolEvent, fold
from tokenmill.serve.tools.use import ToolUse
from tokenmill.serve.usage import lossy_policy, usage_of

_Say = Callable[[str, Sequence[ToolCall]], dict[str, Any]]  # text and calls -> the field that carries them


def add_ollama_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter(prefix="/api")

    @router.post("/chat")
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        wanted = ChatBody(messages=body.messages, tools=body.tools, **_sampling(body))
        tools = tools_of(service, wanted)
        opening = open_chat(service, wanted, caller, tools, streaming=body.stream is not False)
        generation = await unless_gone(request, opening)
        return await _respond(request, generation, model, tools, lambda *said: {"message": _message(*said)})

    @router.post("/generate")
    async def generate(body: OllamaGenerateBody, request: Request) -> Response:
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        streaming = body.stream is not False
        if body.raw or service.template is None:
            plain = GenerationBody(**_sampling(body))
            opening = service.open(
                [body.prompt],
                lambda length: build_params(
                    plain, service.config, resolve_max_tokens(plain, length, service.context, None)
                ),
                caller,
                streaming=streaming,
            )
        else:
            system = [Message(role="system", content=body.system)] if body.system else []
            wanted = ChatBody(messages=[*system, Message(role="user", content=body.prompt)], **_sampling(body))
            opening = open_chat(service, wanted, caller, None, streaming=streaming)
        generation = await unless_gone(request, opening)
        return await _respond(request, generation, model, None, lambda text, _calls: {"response": text})

    @router.get("/tags")
    async def tags() -> Response:
        details = {"family": service.identity.architecture, "quantization_level": service.identity.quantization}
        models = [
            {"name": name, "model": name, "size": service.identity.weight_bytes, "details": details}
            for name in service.names
        ]
        return json_response({"models": models})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    app.include_router(router)


def _message(text: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in calls
        ]
    return message


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # cut off: see done_reason


def _sampling(body: OllamaBody) -> dict[str, Any]:
    """Ollama's options under the names of the OpenAI body."""
    options = body.options or OllamaOptions()
    values = options.model_dump(exclude_none=True, include=set(OllamaOptions.model_fields))
    limit = values.pop("num_predict", None)
    if limit is not None and limit > 0:
        values["max_tokens"] = limit
    if "repeat_penalty" in values:
        values["repetition_penalty"] = values.pop("repeat_penalty")
    if body.format == "json":
        values["response_format"] = {"type": "json_object"}
    elif body.format:
        values["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return values


async def _respond(request: Request, generation: Generation, model: str, tools: ToolUse | None, say: _Say) -> Response:
    record, began = record_of(request), time.monotonic()

    def end() -> dict[str, Any]:
        usage, completion = usage_of(generation, record), generation.outputs[0].outputs[0]
        return {
            "done": True,
            "done_reason": finish_reason(completion.finish_reason),
            "total_duration": int((time.monotonic() - began) * 1e9),
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            **lossy_policy(generation),
        }

    def complete() -> dict[str, Any]:
        answer = fold(ToolReader(tools).read(generation.outputs[0].outputs[0].text, final=True))
        return _head(model) | say(answer.content, answer.calls) | end()

    return await respond(
        request,
        generation,
        complete=complete,
        chunks=lambda: _lines(generation, model, ToolReader(tools), say, end, record),
        media_type=NDJSON,
    )


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


async def _lines(
    generation: Generation,
    model: str,
    reader: ToolReader,
    say: _Say,
    end: Callable[[], dict[str, Any]],
    record: Record,
) -> AsyncIterator[bytes]:
    calls: list[ToolEvent] = []  # this API has no partial calls: they are sent together, once complete
    try:
        async for batch in generation.deltas():
            text = "".join(delta.text for delta in batch)
            final = any(delta.finish_reason for delta in batch)
            events = reader.read(text, final)
            content = "".join(each.text for each in events if isinstance(each, Content))
            calls += [each for each in events if not isinstance(each, Content)]
            complete = fold(calls).calls if final else []
            if content or complete:
                yield to_json(_head(model) | say(content, complete) | {"done": False}) + b"\n"
    except ApiError as error:
        record.error = error.message
        yield to_json({"error": error.message}) + b"\n"
    else:
        yield to_json(_head(model) | say("", ()) | end()) + b"\n"
