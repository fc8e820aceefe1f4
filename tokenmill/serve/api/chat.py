"""/v1/chat/completions: messages through the model's template, answers complete or streamed.

`open_chat` is the one way into the engine for every chat-like API; the Ollama and Anthropic adapters use it too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.engine.outputs import CompletionOutput
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import Record, event, record_of, respond, unless_gone
from tokenmill.serve.api.logprobs import LogprobBudget, chat_logprobs, long_chat_logprobs, prompt_scores
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.api.sampling import build_params, resolve_max_tokens
from tokenmill.serve.api.tool_messages import AnswerReader, count_reasoning, delta_of, message_of, reader_of, tools_of
from tokenmill.serve.api.usage import StreamUsage, usage_of
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation
from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.reasoning.use import switch_variables
from tokenmill.serve.service import Caller, Service
from tokenmill.serve.tools.base import fold
from tokenmill.serve.tools.use import ToolUse
from tokenmill.types import SamplingParams


def add_chat_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatBody))
    async def chat_completions(request: Request) -> Response:
        body = await read_body(request, service, ChatBody)
        caller, record = caller_of(request, service, body), record_of(request)
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.check_model(body.model),
        }
        tools = tools_of(service, body) if body.tools or body.tool_choice is not None else None
        opening = open_chat(service, body, caller, tools, streaming=bool(body.stream))
        generation = await unless_gone(request, opening)

        async def complete() -> dict[str, Any]:
            answer = await _answer(service, body, generation, tools, record)
            if body.prompt_logprobs is not None:
                answer["prompt_logprobs"] = await prompt_scores(generation.outputs[0])
            return head | answer

        return await respond(
            request,
            generation,
            complete=complete,
            chunks=lambda: _chunks(service, body, generation, tools, head, record),
        )

    app.include_router(router)


async def open_chat(
    service: Service, body: ChatBody, caller: Caller, tools: ToolUse | None, *, streaming: bool
) -> Generation:
    """Render, tokenize, admit and start. The caller must close the generation."""
    try:
        plain = [message.plain() for message in body.messages]
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    generation_prompt = body.add_generation_prompt is not False
    messages: Sequence[Mapping[str, Any]] = plain
    shown: Sequence[Mapping[str, Any]] | None = None
    if tools is not None or any(map(_has_calls, plain)):
        messages, shown = service.tool_style.for_template(plain, tools.tools if tools is not None else None)
    prompt = await service.render(messages, shown, generation_prompt, _variables(service, body), client=caller.client)

    def params(length: int) -> SamplingParams:
        limit = resolve_max_tokens(body, length, service.context, None)
        LogprobBudget(service.config.max_logprob_entries).spend(length, body.prompt_logprobs, 1)
        own = build_params(body, service.config, limit, logprobs=_num_logprobs(body))
        if tools is not None:
            own = tools.apply(own)
        return service.reasoning_style.apply(own, prompt, body.thinking_token_budget)

    return await service.open([prompt], params, caller, streaming=streaming, chat=True)


def _variables(service: Service, body: ChatBody) -> dict[str, Any]:
    """Template variables of the body; fields of their own for reasoning, as several APIs have them."""
    source = service.template.source if service.template is not None else ""
    variables: dict[str, Any] = {}
    if body.enable_thinking is not None:
        variables = dict(switch_variables(source, body.enable_thinking))
        if not variables and service.template is not None:
            problem = "enable_thinking is set, but the chat template of this model has no such switch: leave it out"
            raise ApiError(400, problem, param="enable_thinking")
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
        if body.reasoning_effort in ("none", "minimal"):
            variables |= switch_variables(source, False)
    return variables | (body.chat_template_kwargs or {})


def _has_calls(message: Mapping[str, Any]) -> bool:
    """Whether a message may need another shape for a template that knows no tools."""
    return message["role"] == "tool" or bool(message.get("tool_calls")) or message.get("content") is None


def finish_reason(reason: str | None) -> str | None:
    return "stop" if reason == "abort" else reason


def _num_logprobs(body: ChatBody) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


async def _answer(
    service: Service, body: ChatBody, generation: Generation, tools: ToolUse | None, record: Record
) -> dict[str, Any]:
    async def choice(completion: CompletionOutput) -> dict[str, Any]:
        logprobs = None
        if completion.logprobs is not None:
            top = body.top_logprobs or 0
            logprobs = await long_chat_logprobs(service.tokenizer, completion.token_ids, completion.logprobs, top)
        reader = reader_of(service, generation, tools)
        answer = fold(reader.read(completion.text, final=True))
        count_reasoning(service, generation, completion.index, reader)
        if body.include_reasoning is False:
            answer.reasoning = ""
        return {
            "index": completion.index,
            "message": message_of(answer),
            "logprobs": logprobs,
            "finish_reason": reader.finish_reason(finish_reason(completion.finish_reason)),
            "stop_reason": completion.stop_reason,
        }

    choices = [await choice(each) for each in generation.outputs[0].outputs]
    return {"choices": choices, "usage": usage_of(generation, record)}


async def _chunks(
    service: Service,
    body: ChatBody,
    generation: Generation,
    tools: ToolUse | None,
    head: dict[str, Any],
    record: Record,
) -> AsyncIterator[bytes]:
    tail = StreamUsage(body, generation, record)

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return event({**head, "choices": [choice], **tail.fields()})

    def news(delta: Delta) -> bytes:
        logprobs = None
        if delta.logprobs:
            logprobs = chat_logprobs(service.tokenizer, delta.token_ids, delta.logprobs, body.top_logprobs or 0)
        reason = finish_reason(delta.finish_reason)
        said: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        reader = readers[delta.index]
        if reader is not None:
            events = reader.read(delta.text, delta.finish_reason is not None)
            if body.include_reasoning is False:
                events = [each for each in events if not isinstance(each, Reasoning)]
            said = [content for each in events if (content := delta_of(each)) is not None]
            reason = reader.finish_reason(reason)
            if delta.finish_reason is not None:
                count_reasoning(service, generation, delta.index, reader)
        if not said and (logprobs or reason):
            said = [{"content": ""} if logprobs else {}]
        # Log-probabilities go with the first piece, the reason with the last.
        last = len(said) - 1
        return b"".join(
            chunk(delta.index, content, logprobs if part == 0 else None, reason if part == last else None)
            for part, content in enumerate(said)
        )

    readers: dict[int, AnswerReader | None] = {}  # None: all text is content
    try:
        async for batch in generation.deltas():
            pieces = []
            for delta in batch:
                if delta.index not in readers:
                    reader = reader_of(service, generation, tools)
                    readers[delta.index] = None if reader.plain else reader
                    pieces.append(chunk(delta.index, {"role": "assistant", "content": ""}))
                tail.count(delta)
                if delta.text or delta.logprobs or delta.finish_reason:
                    pieces.append(news(delta))
            if pieces:
                yield b"".join(pieces)
    except ApiError as error:
        yield tail.end(head, error)
    else:
        yield tail.end(head)
