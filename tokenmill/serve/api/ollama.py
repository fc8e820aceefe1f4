"""The Ollama-style endpoints, as a thin adapter over chat: /api/chat, /api/generate, /api/tags, /api/version.

Streams by default, one JSON object per line. Knows only how that API says things.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.serve.api.adapter_protocol import OllamaBody, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from tokenmill.serve.api.caller import caller_of
from tokenmill.serve.api.chat import finish_reason, open_chat
from tokenmill.serve.api.exchange import NDJSON, Record, json_response, record_of, respond, to_json, unless_gone
from tokenmill.serve.api.logprobs import chat_logprobs, long_chat_logprobs
from tokenmill.serve.api.protocol import ChatBody, GenerationBody, Message
from tokenmill.serve.api.reading import body_schema, read_body, validate
from tokenmill.serve.api.sampling import build_params, resolve_max_tokens
from tokenmill.serve.api.tool_messages import AnswerReader, reader_of, tools_of
from tokenmill.serve.api.usage import cost_of, lossy_policy, usage_of
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Delta, Generation, Member
from tokenmill.serve.reasoning.base import Reasoning
from tokenmill.serve.reasoning.use import switch_variables
from tokenmill.serve.service import Service
from tokenmill.serve.tools.base import Content, ToolCall, ToolEvent, fold
from tokenmill.types import SamplingParams

_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "stop",
    "frequency_penalty",
    "presence_penalty",
)
_Say = Callable[[str, Sequence[ToolCall], str], dict[str, Any]]  # text, calls and reasoning -> fields that carry them


def add_ollama_routes(app: FastAPI, service: Service) -> None:
    router = APIRouter(prefix="/api")

    @router.post("/chat", openapi_extra=body_schema(OllamaChatBody))
    async def chat(request: Request) -> Response:
        body = await read_body(request, service, OllamaChatBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        if any((message.__pydantic_extra__ or {}).get("images") for message in body.messages):
            raise ApiError(400, "images are not supported: this model reads text only", param="messages")
        fields = {"messages": body.messages, "tools": body.tools, **_chat_fields(service, body)}
        wanted = validate(ChatBody, fields)
        tools = tools_of(service, wanted)
        opening = open_chat(service, wanted, caller, tools, streaming=body.stream is not False)
        generation = await unless_gone(request, opening)

        def reader() -> AnswerReader:
            return reader_of(service, generation, tools)

        shape = _Shape(service, model, reader, lambda *said: {"message": _message(*said)}, body.num_logprobs)
        return await _respond(request, generation, shape)

    @router.post("/generate", openapi_extra=body_schema(OllamaGenerateBody))
    async def generate(request: Request) -> Response:
        body = await read_body(request, service, OllamaGenerateBody)
        caller, model = caller_of(request, service, body), service.check_model(body.model)
        opening = _open_generate(service, body, caller)
        generation = await unless_gone(request, opening)
        raw = bool(body.raw) or service.template is None

        def reader() -> AnswerReader:
            return AnswerReader(None) if raw else reader_of(service, generation, None)

        def say(text: str, _calls: Sequence[ToolCall], thinking: str) -> dict[str, Any]:
            return {"response": text, **({"thinking": thinking} if thinking else {})}

        return await _respond(request, generation, _Shape(service, model, reader, say, body.num_logprobs))

    @router.get("/tags")
    async def tags(request: Request) -> Response:
        adapters = [each.name for each in service.loras.visible_to(record_of(request).client)]
        details = {"family": service.identity.architecture, "quantization_level": service.identity.quantization}
        models = [
            {"name": name, "model": name, "size": service.identity.weight_bytes, "details": details}
            for name in (*service.names, *adapters)
        ]
        return json_response({"models": models})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    app.include_router(router)


def _open_generate(service: Service, body: OllamaGenerateBody, caller: Caller) -> Coroutine[Any, Any, Generation]:
    """A prompt as it stands, or as the only message of a chat."""
    for name in ("suffix", "template", "context", "images"):
        if getattr(body, name):
            raise ApiError(400, f"{name} is not supported: leave it out, or use /api/chat", param=name)
    fields, streaming = _chat_fields(service, body), body.stream is not False
    if body.raw or service.template is None:
        for name in ("chat_template_kwargs", "logprobs", "top_logprobs"):
            fields.pop(name, None)
        plain = validate(GenerationBody, fields)

        def params(length: int) -> SamplingParams:
            defaults = service.sampling_defaults
            limit = resolve_max_tokens(plain, length, service.context, defaults.max_tokens)
            return build_params(plain, service.config, limit, defaults.values, logprobs=body.num_logprobs)

        return service.open([body.prompt], params, caller, streaming=streaming)
    system = [Message(role="system", content=body.system)] if body.system else []
    messages = [*system, Message(role="user", content=body.prompt)]
    return open_chat(service, validate(ChatBody, {"messages": messages, **fields}), caller, None, streaming=streaming)


def _message(text: str, calls: Sequence[ToolCall], thinking: str = "") -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in calls
        ]
    return message


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}  # cut off, see done_reason, or nested too deeply


def _chat_fields(service: Service, body: OllamaBody) -> dict[str, Any]:
    """Ollama's options under the names of the OpenAI body. Raises ApiError for those that would change the answer and
    are not supported."""
    options = body.options or OllamaOptions()
    _check_options(service, options)
    values = options.model_dump(exclude_none=True, include=set(_SAME_NAME))
    if options.num_predict is not None and options.num_predict > 0:
        values["max_tokens"] = options.num_predict
    if options.repeat_penalty is not None:
        values["repetition_penalty"] = options.repeat_penalty
    if options.repeat_last_n == 0:  # no token counts for the penalties
        values = {name: value for name, value in values.items() if not name.endswith("_penalty")}
    if body.think is not None:
        values["chat_template_kwargs"] = _thinking_variables(service, body.think)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if body.logprobs:
        values |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.format == "json":
        values["response_format"] = {"type": "json_object"}
    elif body.format:
        values["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return values


def _check_options(service: Service, options: OllamaOptions) -> None:
    """Options that change nothing here (num_gpu, num_thread, ...) are named in a header instead, like unknown ones."""
    penalties = (options.repeat_penalty or 1.0) != 1.0 or options.frequency_penalty or options.presence_penalty
    refusals = {
        "num_ctx": (options.num_ctx or 0) > service.context
        and f"the context is {service.context}: lower it, or serve with a larger --context",
        "mirostat": bool(options.mirostat) and "it is not supported: use temperature, top_p or min_p",
        "tfs_z": options.tfs_z not in (None, 1.0) and "it is not supported: use top_p or min_p",
        "repeat_last_n": options.repeat_last_n not in (None, -1, 0)
        and penalties
        and "penalties look at all tokens here: give -1",
        "penalize_newline": options.penalize_newline is False and penalties and "penalties count line ends here",
    }
    for name, reason in refusals.items():
        if reason:
            raise ApiError(400, f"options.{name} is {getattr(options, name)}, but {reason}", param=f"options.{name}")


def _thinking_variables(service: Service, think: bool | str) -> Mapping[str, Any]:
    source = service.template.source if service.template is not None else ""
    variables = dict(switch_variables(source, bool(think)))
    if isinstance(think, str) and "reasoning_effort" in source:
        variables["reasoning_effort"] = think
    if think and not variables:
        raise ApiError(400, "the chat template of this model has no thinking: leave think out", param="think")
    return variables or {"enable_thinking": False}


@dataclass(frozen=True)
class _Shape:
    """How an answer is said."""

    service: Service
    model: str
    make_reader: Callable[[], AnswerReader]
    say: _Say
    num_logprobs: int | None

    def said(self, text: str, calls: Sequence[ToolCall] = (), thinking: str = "") -> dict[str, Any]:
        return _head(self.model) | self.say(text, calls, thinking)

    def scores(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Log-probabilities of the tokens, where they are wanted."""
        if self.num_logprobs is None:
            return {}
        tokenizer, top = self.service.tokenizer, self.num_logprobs
        each = [chat_logprobs(tokenizer, delta.token_ids, delta.logprobs, top)["content"] for delta in deltas]
        return {"logprobs": [entry for entries in each for entry in entries]}


async def _respond(request: Request, generation: Generation, shape: _Shape) -> Response:
    record, began = record_of(request), time.monotonic()

    def end() -> dict[str, Any]:
        usage, completion = usage_of(generation, record), generation.outputs[0].outputs[0]
        return {
            "done": True,
            "done_reason": finish_reason(completion.finish_reason),
            "total_duration": _nanoseconds(time.monotonic() - began),
            "load_duration": 0,  # the model is in memory
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            **_durations(generation.members[0]),
            **cost_of(generation),
            **lossy_policy(generation),
        }

    async def complete() -> dict[str, Any]:
        completion = generation.outputs[0].outputs[0]
        answer = fold(shape.make_reader().read(completion.text, final=True))
        whole = shape.said(answer.content, answer.calls, answer.reasoning) | end()
        if shape.num_logprobs is None or completion.logprobs is None:
            return whole
        tokenizer, top = shape.service.tokenizer, shape.num_logprobs
        scores = await long_chat_logprobs(tokenizer, completion.token_ids, completion.logprobs, top)
        return whole | {"logprobs": scores["content"]}

    return await respond(
        request,
        generation,
        complete=complete,
        chunks=lambda: _lines(generation, shape, end, record),
        media_type=NDJSON,
        ping=lambda: to_json(shape.said("") | {"done": False}) + b"\n",
    )


def _durations(member: Member) -> dict[str, int]:
    """Time for the prompt and for the answer; clients divide counts by them."""
    line, first = member.timeline, member.first_token
    if line is None or not line.chunks or first is None:
        return {}
    prompt, answer = first - line.chunks[0].began, member.last_token - first
    return {"prompt_eval_duration": _nanoseconds(prompt), "eval_duration": _nanoseconds(answer)}


def _nanoseconds(seconds: float) -> int:
    return max(1, int(seconds * 1e9))


def _head(model: str) -> dict[str, Any]:
    return {"model": model, "created_at": datetime.now(UTC).isoformat().replace("+00:00", "Z")}


async def _lines(
    generation: Generation, shape: _Shape, end: Callable[[], dict[str, Any]], record: Record
) -> AsyncIterator[bytes]:
    calls: list[ToolEvent] = []  # this API has no partial calls: they are sent together, once complete
    reader = shape.make_reader()
    try:
        async for batch in generation.deltas():
            text = "".join(delta.text for delta in batch)
            final = any(delta.finish_reason for delta in batch)
            events = reader.read(text, final)
            content = "".join(each.text for each in events if isinstance(each, Content))
            thinking = "".join(each.text for each in events if isinstance(each, Reasoning))
            calls += [each for each in events if not isinstance(each, (Content, Reasoning))]
            complete, scores = fold(calls).calls if final else [], shape.scores(batch)
            if content or complete or thinking or scores.get("logprobs"):
                yield to_json(shape.said(content, complete, thinking) | scores | {"done": False}) + b"\n"
    except ApiError as error:
        record.error = error.message
        yield to_json({"error": error.message}) + b"\n"
    else:
        yield to_json(shape.said("") | end()) + b"\n"
