"""/v1/responses: OpenAI's Responses API over chat, complete, streamed or, where allowed, in the background.

A conversation is continued by `previous_response_id` from the store of the key (response_store.py); instructions and
tools are those of each request alone, as OpenAI has it. Streams end with response.completed, .incomplete or .failed.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.log import get_logger
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.chat import open_chat
from tokenmill.serve.api.exchange import Record, json_response, record_of, respond, to_json, unless_gone
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.api.response_store import ResponseStore, StoredResponse
from tokenmill.serve.api.responses_items import OutputItems, input_messages
from tokenmill.serve.api.responses_protocol import ResponsesBody, chat_body
from tokenmill.serve.api.tool_messages import count_reasoning, reader_of, tools_of
from tokenmill.serve.api.usage import cost_of, usage_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.service import Service
from tokenmill.serve.tools.use import ToolUse

_log = get_logger(__name__)
_PATH = "/v1/responses"
_FAILED = "server_error"


@dataclass(slots=True)
class _Exchange:
    """One request: what it asked for and what is known of its answer."""

    service: Service
    body: ResponsesBody
    chat: ChatBody
    tools: ToolUse | None
    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation, without instructions
    record: Record
    output: OutputItems = field(default_factory=OutputItems)

    def finished(self, generation: Generation) -> dict[str, Any]:
        """The response of a generation that has ended; its items must be finished."""
        reason = generation.outputs[0].outputs[0].finish_reason
        usage = {"usage": _usage(generation, self.record)}
        if reason == "error":
            return self.failed(ApiError(500, "the output cannot follow its format any further")) | usage
        cut = reason == "length"
        return self.response | {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self.output.items,
            **usage,
        }

    def failed(self, error: ApiError) -> dict[str, Any]:
        self.record.error = error.message
        problem = {"code": _FAILED, "message": error.message}
        return self.response | {"status": "failed", "error": problem, "output": self.output.items}


class _Responses:
    """The store and what runs in the background."""

    def __init__(self, service: Service) -> None:
        self.service = service
        limits = service.config.max_stored_responses, service.config.max_stored_response_bytes
        self.store: ResponseStore = service.response_store or ResponseStore(*limits)
        service.response_store = self.store  # the models of a server share it
        self.running = self.store.running

    def prepare(self, body: ResponsesBody, record: Record) -> _Exchange:
        service = self.service
        refusal = body.refusal()
        if refusal is not None:
            raise ApiError(400, f"{refusal[0]} is not supported: {refusal[1]}", param=refusal[0])
        self._check_background(body)
        earlier: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            earlier = self.find(record, body.previous_response_id, "previous_response_id").messages
        try:
            messages = [*earlier, *input_messages(body.input)]
            system = [{"role": "system", "content": body.instructions}] if body.instructions else []
            chat = chat_body(body, [*system, *messages])
        except ValueError as error:
            raise ApiError(400, str(error), param="input") from None
        tools = tools_of(service, chat) if chat.tools or chat.tool_choice is not None else None
        return _Exchange(service, body, chat, tools, _opening(service, body, chat), messages, record)

    def _check_background(self, body: ResponsesBody) -> None:
        if not body.background:
            return
        if not self.service.config.background_responses:
            problem = "background is off on this server: leave it out, or serve with --background-responses"
            raise ApiError(400, problem, param="background", code="background_disabled")
        if body.stream or body.store is False or not self.service.config.max_stored_responses:
            raise ApiError(400, "a response in the background is stored and not streamed", param="background")

    def find(self, record: Record, name: str, param: str | None = None) -> StoredResponse:
        stored = self.store.get(record.client.name, name)
        if stored is None:
            shown = name[:100].encode("ascii", "replace").decode()
            problem = f"response '{shown}' is not stored here: it is too old, of another key, or was not stored"
            code = "previous_response_not_found" if param else "response_not_found"
            raise ApiError(400 if param else 404, problem, param=param, code=code)
        return stored

    def keep(self, exchange: _Exchange, response: dict[str, Any], complete: bool = True) -> None:
        if exchange.body.store is False:
            return
        given = exchange.body.input
        items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
        messages = exchange.messages + (exchange.output.messages() if complete else [])
        self.store.put(exchange.record.client.name, StoredResponse(response, items, messages))

    def end(self, exchange: _Exchange, generation: Generation) -> dict[str, Any]:
        """The response of a complete answer, which is kept."""
        reader = reader_of(self.service, generation, exchange.tools)
        completion = generation.outputs[0].outputs[0]
        for event in reader.read(completion.text, final=True):
            list(exchange.output.take(event))
        list(exchange.output.finish(_item_status(generation)))
        count_reasoning(self.service, generation, 0, reader)
        response = exchange.finished(generation)
        self.keep(exchange, response)
        return response

    # --- in the background ---

    def start(self, exchange: _Exchange, generation: Generation) -> dict[str, Any]:
        key = (exchange.record.client.name, exchange.response["id"])
        exchange.response["status"] = "in_progress"
        self.keep(exchange, exchange.response, complete=False)
        task = self.running[key] = asyncio.create_task(self._run(exchange, generation))

        def ended(task: asyncio.Task[None]) -> None:  # also if it was cancelled before it began
            generation.close()
            self.running.pop(key, None)
            if task.cancelled():
                self.keep(exchange, exchange.response | {"status": "cancelled"}, complete=False)
            elif task.exception() is not None:  # our own error: whoever polls must not wait for ever
                _log.error("a response in the background failed", exc_info=task.exception())
                self.keep(exchange, exchange.failed(ApiError(500, "internal error")), complete=False)

        task.add_done_callback(ended)
        return exchange.response | {"status": "queued"}

    async def _run(self, exchange: _Exchange, generation: Generation) -> None:
        try:
            await generation.result()
            self.end(exchange, generation)
        except ApiError as error:
            self.keep(exchange, exchange.failed(error), complete=False)

    async def cancel(self, record: Record, name: str) -> None:
        """End a response in the background, if it still runs."""
        task = self.running.get((record.client.name, name))
        if task is not None:
            task.cancel()
            await asyncio.wait([task])


def add_responses_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()
    responses = _Responses(service)

    @router.post(_PATH, openapi_extra=body_schema(ResponsesBody))
    async def create(request: Request) -> Response:
        body = await read_body(request, service, ResponsesBody)
        caller, record = caller_of(request, service, body), record_of(request)
        exchange = responses.prepare(body, record)
        opening = open_chat(service, exchange.chat, caller, exchange.tools, streaming=bool(body.stream))
        generation = await unless_gone(request, opening)
        if body.background:
            return json_response(responses.start(exchange, generation))

        async def complete() -> dict[str, Any]:
            return responses.end(exchange, generation)

        return await respond(
            request, generation, complete=complete, chunks=lambda: _events(responses, exchange, generation)
        )

    @router.get(_PATH + "/{response_id}")
    async def read(request: Request, response_id: str) -> Response:
        return json_response(responses.find(record_of(request), response_id).response)

    @router.get(_PATH + "/{response_id}/input_items")
    async def input_items(request: Request, response_id: str) -> Response:
        given = responses.find(record_of(request), response_id).given
        return json_response({"object": "list", "data": given[::-1], "has_more": False})

    @router.delete(_PATH + "/{response_id}")
    async def delete(request: Request, response_id: str) -> Response:
        responses.find(record_of(request), response_id)
        await responses.cancel(record_of(request), response_id)
        responses.store.remove(record_of(request).client.name, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @router.post(_PATH + "/{response_id}/cancel")
    async def cancel(request: Request, response_id: str) -> Response:
        stored = responses.find(record_of(request), response_id)
        if not stored.response["background"]:
            raise ApiError(400, "only a response in the background can be cancelled", param="response_id")
        await responses.cancel(record_of(request), response_id)
        return json_response(responses.find(record_of(request), response_id).response)

    app.include_router(router)


def _opening(service: Service, body: ResponsesBody, chat: ChatBody) -> dict[str, Any]:
    """The response before there is an answer."""
    wanted = body.text.format if body.text and body.text.format else None
    text = wanted.model_dump(by_alias=True, exclude_none=True) if wanted is not None else {"type": "text"}
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.output_limit(),
        "model": service.check_model(body.model),
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "store": body.store is not False and service.config.max_stored_responses > 0,
        "temperature": _used(service, "temperature", body.temperature),
        "text": {"format": text},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": _used(service, "top_p", body.top_p),
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def _used(service: Service, name: str, value: float | None) -> float:
    """The value of a sampling field, or the default of this server."""
    return float(service.sampling_defaults.values.get(name, 1.0)) if value is None else value


def _item_status(generation: Generation) -> str:
    """Of the last item: whether the output came to its own end."""
    return "incomplete" if generation.outputs[0].outputs[0].finish_reason in ("length", "error") else "completed"


def _usage(generation: Generation, record: Record) -> dict[str, Any]:
    usage = usage_of(generation, record)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": usage["prompt_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens or 0},
        "total_tokens": usage["total_tokens"],
    } | cost_of(generation)


async def _events(responses: _Responses, exchange: _Exchange, generation: Generation) -> AsyncIterator[bytes]:
    number = -1

    def event(kind: str, fields: dict[str, Any]) -> bytes:
        nonlocal number
        number += 1
        value = {"type": kind, "sequence_number": number, **fields}
        return b"event: " + kind.encode() + b"\ndata: " + to_json(value) + b"\n\n"

    output, reader = exchange.output, reader_of(exchange.service, generation, exchange.tools)
    yield event("response.created", {"response": exchange.response})
    yield event("response.in_progress", {"response": exchange.response})
    try:
        async for batch in generation.deltas():
            text = "".join(delta.text for delta in batch)
            read = reader.read(text, any(delta.finish_reason for delta in batch))
            news = b"".join(event(*each) for said in read for each in output.take(said))
            if news:
                yield news
    except ApiError as error:
        yield event("response.failed", {"response": exchange.failed(error)})
        return
    count_reasoning(exchange.service, generation, 0, reader)
    yield b"".join(event(*each) for each in output.finish(_item_status(generation)))
    response = exchange.finished(generation)
    responses.keep(exchange, response)
    yield event(f"response.{response['status']}", {"response": response})
