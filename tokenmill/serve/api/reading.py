"""Bytes of a request body -> a validated model, at a cost that is bounded before any object is made.

First the structure is counted at the speed of `bytes.count`: strings, containers, values and nesting beyond the limits
are refused unparsed. Then msgspec decodes, and pydantic validates, failing at the first error. Every refusal is an
ApiError. Knows no route's meaning; every POST route calls `read_body`.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import msgspec
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request

from tokenmill.serve.api.exchange import ClientGoneError, record_of
from tokenmill.serve.api.protocol import Body
from tokenmill.serve.errors import ApiError, context_exceeded
from tokenmill.serve.service import Service

MAX_DEPTH = 64  # of nesting
MAX_STRINGS = 1 << 15  # keys included
MAX_CONTAINERS = 1 << 14  # lists and objects
MAX_VALUES = 1 << 18  # mostly token ids; a longer context allows as many
_SLICE = 1 << 18  # bytes that are counted before the event loop gets its turn
_LARGE = 1 << 16  # bytes
_AS_LISTS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_PLAIN_TYPES = ("application/x-www-form-urlencoded", "")  # what clients send that were told no type
_BROWSERS = ("origin", "sec-fetch-site")  # headers that only they send, with every POST

_Body = TypeVar("_Body", bound=Body)
_decode = msgspec.json.Decoder().decode


async def read_body(request: Request, service: Service, model: type[_Body]) -> _Body:
    """The body as `model`. A key whose quota is used up is refused before its body is read."""
    service.check_client(record_of(request).client)
    _check_content_type(request)
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGoneError from None
    await service.turns.take(record_of(request).client)
    large = len(data) > _LARGE  # counting, parsing, validation and what follows are then separate turns of the loop
    await check_structure(data, max_values=max(MAX_VALUES, service.context))
    if large:
        await asyncio.sleep(0)
    values = parse(data)
    if large:
        await asyncio.sleep(0)
    body = validate(model, values)
    if large:
        await asyncio.sleep(0)
    return body


def body_schema(model: type[Body]) -> dict[str, Any]:
    """The body's part of a route's OpenAPI description, which FastAPI cannot derive where it does not parse."""
    schema = model.model_json_schema()
    content = {"application/json": {"schema": _inlined(schema, schema.pop("$defs", {}))}}
    return {"requestBody": {"required": True, "content": content}}


def check_prompts(
    prompts: list[str | list[int]], service: Service, param: str, cut: bool = False
) -> list[str | list[int]]:
    """Raise ApiError for what is refused before anything is tokenized: too many prompts, more token ids than fit.
    `cut`: prompts that are too long are truncated."""
    limit = service.config.max_prompts
    if not 0 < len(prompts) <= limit:
        raise ApiError(400, f"{len(prompts)} prompts in one request: give 1 to {limit}", param=param)
    longest = max((len(prompt) for prompt in prompts if not isinstance(prompt, str)), default=0)
    if longest > service.context and not cut:
        problem = f"the prompt has {longest} tokens, the context holds {service.context}: shorten it or serve with a "
        raise context_exceeded(f"{problem}larger --context.", service.context, param)
    return prompts


async def check_structure(data: bytes, max_values: int = MAX_VALUES) -> None:
    """Raise ApiError if the JSON text has too many parts or is nested too deeply; whether it is JSON is not checked."""
    limits = {"strings": MAX_STRINGS, "lists and objects": MAX_CONTAINERS, "values": max_values}
    few = data.count(b"[") + data.count(b"{") <= MAX_DEPTH and data.count(b'"') <= 2 * MAX_STRINGS
    if few and data.count(b",") <= max_values:  # as in most bodies: no need to know what is inside strings
        return
    inside, brackets, counts, start = False, b"", dict.fromkeys(limits, 0), 0
    while start < len(data):
        end = start + _SLICE
        piece = data[start:end]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # never cut an escape in two
            piece = data[start : end + 1]
        start += len(piece)
        found, inside = _count(piece, inside, counts)
        brackets += found
        for what, limit in limits.items():
            if counts[what] > limit:
                raise ApiError(400, f"the body has more than {limit} {what}: send less in one request")
        if start < len(data):
            await asyncio.sleep(0)
    _check_depth(brackets)


def parse(data: bytes) -> Any:
    try:
        return _decode(data)
    except (ValueError, RecursionError):  # bad JSON, bad UTF-8, half a surrogate pair, NaN, numbers out of range
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None


def validate(model: type[_Body], values: Any) -> _Body:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _explain(error) from None


def _count(piece: bytes, inside: bool, counts: dict[str, int]) -> tuple[bytes, bool]:
    """Add what `piece` has outside of strings to `counts`. Returns its brackets, those of objects as those of
    lists, and whether it ends inside a string; `inside`: it begins there."""
    plain = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_quotes = plain.count(b'"')
    counts["strings"] += (num_quotes + 1) // 2
    if counts["strings"] > MAX_STRINGS:
        return b"", False  # refused without making so many parts
    outside = b"".join(plain.split(b'"')[inside::2])
    brackets = outside.translate(_AS_LISTS, _NOT_BRACKETS)
    counts["lists and objects"] += brackets.count(b"[")
    counts["values"] += outside.count(b",")
    return brackets, inside ^ (num_quotes % 2 == 1)


def _check_depth(brackets: bytes) -> None:
    for _ in range(MAX_DEPTH):  # each round takes the innermost level away
        if not brackets:
            return
        brackets = brackets.replace(b"[]", b"")
    if brackets:
        raise ApiError(400, f"the body is not valid JSON or nested deeper than {MAX_DEPTH} levels", code="invalid_json")


def is_json(request: Request) -> bool:
    """Whether the body is declared as JSON. Ollama's own examples are `curl -d`, and litellm streams from it without a
    type."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _PLAIN_TYPES and "/api/" in request.scope["path"]:
        return not any(name in request.headers for name in _BROWSERS)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _check_content_type(request: Request) -> None:
    """Web pages of other origins may send other types without asking first."""
    if not is_json(request):
        raise ApiError(400, "the body is not declared as JSON: send `content-type: application/json`")


def _explain(error: ValidationError) -> ApiError:
    """The first problem in one line, without repeating what the client sent."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    path = [str(part) for part in first["loc"]]
    param = path[0][:64].encode("ascii", "replace").decode() if path else None
    field = ".".join(path[:6])[:100].encode("ascii", "replace").decode()
    return ApiError(400, f"{field}: {first['msg']}" if field else f"the body: {first['msg']}", param=param)


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its definitions written where they are used."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items()}
