"""/v1/chat/completions: messages through the model's template, answers complete or streamed.

`open_chat` is the one way into the engine for every chat-like API; the Ollama and Anthropic adapters use it too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.checkpoint.chat_template import ChatTemplate
from tokenmill.engine.outputs import CompletionOutput
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.exchange import Record, event, record_of, respond, unless_gone
from tokenmill.serve.api.logprobs import LogprobBudget, chat_logprobs, long_chat_logprobs, prompt_scores
from tokenmill.serve.api.protocol import ChatBody
from tokenmill.serve.api.reading import body_schema, read_body
from tokenmill.serve.api.requests import check_diagnosis, diagnosis_of
from tokenmill.serve.api.sampling import build_params, resolve_max_tokens, resolve_truncation
from tokenmill.serve.api.tool_messages import (
    AnswerReader,
    HasToolStyle,
    count_reasoning,
    delta_of,
    message_of,
    reader_of,
    tools_of,
)
from tokenmill.serve.api.usage import StreamUsage, usage_of
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation
from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.reasoning.use import switch_variables
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import Client
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
        check_diagnosis(service, body)
        tools = tools_of(service, body) if body.tools or body.tool_choice is not None else None
        opening = open_chat(service, body, caller, tools, streaming=bool(body.stream))
        generation = await unless_gone(request, opening)

        def diagnose() -> dict[str, Any]:
            return diagnosis_of(service, body, generation, record)

        async def complete() -> dict[str, Any]:
            answer = await _answer(service, body, generation, tools, record)
            if body.prompt_logprobs is not None:
                answer["prompt_logprobs"] = await prompt_scores(generation.outputs[0])
            if body.return_token_ids:
                answer["prompt_token_ids"] = generation.outputs[0].prompt_token_ids
            return head | answer | diagnose()

        return await respond(
            request,
            generation,
            complete=complete,
            chunks=lambda: _chunks(
                service, body, generation, tools, head, StreamUsage(body, generation, record, diagnose)
            ),
        )

    app.include_router(router)


async def open_chat(
    service: Service, body: ChatBody, caller: Caller, tools: ToolUse | None, *, streaming: bool
) -> Generation:
    """Render, tokenize, admit and start. The caller must close the generation."""
    prompt = await chat_prompt(service, body, caller, tools)
    defaults = service.sampling_defaults

    def params(length: int) -> SamplingParams:
        limit = resolve_max_tokens(body, length, service.context, defaults.max_tokens)
        LogprobBudget(service.config.max_logprob_entries).spend(length, body.prompt_logprobs, 1)
        own = build_params(body, service.config, limit, defaults.values, logprobs=_num_logprobs(body))
        if tools is not None:
            own = tools.apply(own)
        if body.continue_final_message:
            return own  # goes on with an answer that has begun: no reasoning comes first
        return service.reasoning_style.apply(own, prompt, body.thinking_token_budget)

    kept = resolve_truncation(body.truncate_prompt_tokens, body.output_limit(), service.context)
    return await service.open([prompt], params, caller, streaming=streaming, chat=True, max_prompt_tokens=kept)


class ChatTexts(HasToolStyle, Protocol):
    """What makes a prompt of a conversation: a service, or the router, which must make the same."""

    template: ChatTemplate | None

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        *,
        client: Client,
    ) -> str: ...


async def chat_prompt(service: ChatTexts, body: ChatBody, caller: Caller, tools: ToolUse | None) -> str:
    """The text that the model continues."""
    try:
        plain = [message.plain() for message in body.messages]
    except ValueError as error:
        raise ApiError(400, str(error), param="messages") from None
    _check_fields(body)
    generation_prompt = body.add_generation_prompt is not False and not body.continue_final_message
    messages: Sequence[Mapping[str, Any]] = plain
    shown: Sequence[Mapping[str, Any]] | None = None
    if tools is not None or any(map(_has_calls, plain)):
        messages, shown = service.tool_style.for_template(plain, tools.tools if tools is not None else None)
    prompt = await service.render(messages, shown, generation_prompt, _variables(service, body), client=caller.client)
    if body.continue_final_message:
        prompt = continued(prompt, str(messages[-1].get("content") or ""))
    return prompt


def _check_fields(body: ChatBody) -> None:
    if body.chat_template is not None:
        problem = "chat_template is not part of requests here: serve with --chat-template FILE"
        raise ApiError(400, problem, param="chat_template")
    if body.continue_final_message and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other: leave one of them out"
        raise ApiError(400, problem, param="continue_final_message")
    if body.continue_final_message and body.thinking_token_budget is not None:
        problem = "thinking_token_budget has no meaning for a message that is continued: leave it out"
        raise ApiError(400, problem, param="thinking_token_budget")


def continued(prompt: str, text: str) -> str:
    """The prompt up to the end of its last message's text. Templates may strip that, and close the message."""
    start = prompt.rfind(text.strip()) if text.strip() else -1
    if start < 0:
        problem = "continue_final_message needs a last message with text that the chat template shows as it is"
        raise ApiError(400, problem, param="continue_final_message")
    whole = text.lstrip()
    return prompt[: start + len(whole if prompt.startswith(whole, start) else text.strip())]


def _variables(service: ChatTexts, body: ChatBody) -> dict[str, Any]:
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
        reader = reader_of(service, generation, tools, reasons=not body.continue_final_message)
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
            **({"token_ids": completion.token_ids} if body.return_token_ids else {}),
        }

    choices = [await choice(each) for each in generation.outputs[0].outputs]
    return {"choices": choices, "usage": usage_of(generation, record)}


class _Stream:
    """The chunks of a streamed answer: what each delta says, by choice."""

    def __init__(
        self,
        service: Service,
        body: ChatBody,
        generation: Generation,
        tools: ToolUse | None,
        head: dict[str, Any],
        tail: StreamUsage,
    ) -> None:
        self._service, self._body, self._generation, self._tools = service, body, generation, tools
        self._head, self._tail = head, tail
        self._readers: dict[int, AnswerReader | None] = {}  # None: all text is content

    def chunks(self, delta: Delta) -> list[bytes]:
        """Of one delta; the first of a choice opens it."""
        found = []
        if delta.index not in self._readers:
            opening = self._open(delta.index)
            found += [] if self._generation.members[0].num_resumed else [opening]
        self._tail.count(delta)
        if delta.text or delta.logprobs or delta.finish_reason or self._body.return_token_ids:
            found += self._news(delta)
        return found

    def _open(self, index: int) -> bytes:
        reader = reader_of(self._service, self._generation, self._tools, not self._body.continue_final_message)
        self._readers[index] = None if reader.plain else reader
        reader.read(self._generation.members[0].resumed_text, final=False)  # the client has what it says
        prompt: dict[str, Any] = {}
        if self._body.return_token_ids:
            prompt["prompt_token_ids"] = self._generation.outputs[0].prompt_token_ids
        return self._chunk(index, {"role": "assistant", "content": ""}, **prompt)

    def _news(self, delta: Delta) -> list[bytes]:
        body, logprobs = self._body, None
        if delta.logprobs:
            top = body.top_logprobs or 0
            logprobs = chat_logprobs(self._service.tokenizer, delta.token_ids, delta.logprobs, top)
        token_ids = delta.token_ids if body.return_token_ids else []
        said, reason = self._read(delta)
        if not said and (logprobs or reason or token_ids):
            said = [{"content": ""} if logprobs else {}]
        # Log-probabilities go with the first piece, the reason with the last; so do the ids, which tell a router that
        # it has all that these tokens say.
        found, last = [], len(said) - 1
        for part, content in enumerate(said):
            choice: dict[str, Any] = {"finish_reason": reason if part == last else None}
            choice["logprobs"] = logprobs if part == 0 else None
            if body.return_token_ids:
                choice["token_ids"] = token_ids if part == last else []
            found.append(self._chunk(delta.index, content, choice))
        return found

    def _read(self, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        """(the pieces of `delta` in this API, the finish reason)."""
        reason, reader = finish_reason(delta.finish_reason), self._readers[delta.index]
        if reader is None:
            return [{"content": delta.text}] if delta.text else [], reason
        events = reader.read(delta.text, delta.finish_reason is not None)
        if self._body.include_reasoning is False:
            events = [each for each in events if not isinstance(each, Reasoning)]
        if delta.finish_reason is not None:
            count_reasoning(self._service, self._generation, delta.index, reader)
        return [said for each in events if (said := delta_of(each)) is not None], reader.finish_reason(reason)

    def _chunk(self, index: int, delta: dict[str, Any], choice: dict[str, Any] | None = None, **fields: Any) -> bytes:
        whole = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(choice or {})}
        return event({**self._head, **fields, "choices": [whole], **self._tail.fields()})


async def _chunks(
    service: Service,
    body: ChatBody,
    generation: Generation,
    tools: ToolUse | None,
    head: dict[str, Any],
    tail: StreamUsage,
) -> AsyncIterator[bytes]:
    stream = _Stream(service, body, generation, tools, head, tail)
    try:
        async for batch in generation.deltas():
            pieces = [piece for delta in batch for piece in stream.chunks(delta)]
            if pieces:
                yield b"".join(pieces)
    except ApiError as error:
        yield tail.end(head, error)
    else:
        yield tail.end(head)
