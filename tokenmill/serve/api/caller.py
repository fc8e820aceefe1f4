"""The caller of a request and its priority: from the key, the headers and the body."""

from __future__ import annotations

import math

from starlette.requests import Request

from tokenmill.serve.api.adapter_protocol import AnthropicBody
from tokenmill.serve.api.exchange import record_of
from tokenmill.serve.api.protocol import Body, GenerationBody
from tokenmill.serve.callers import Caller
from tokenmill.serve.errors import ApiError
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import MAX_PRIORITY

DEADLINE_HEADER = "x-request-deadline-ms"


def caller_of(request: Request, service: Service, body: Body) -> Caller:
    """Also records unknown body fields, for the response header and the counter; refuses a model that is not there, or
    not for this key."""
    record = record_of(request)
    record.ignored = tuple(body.ignored(service.template.source if service.template is not None else ""))
    if record.ignored:
        service.metrics.add("ignored_fields", len(record.ignored))
    adapter = service.loras.find(getattr(body, "model", None), record.client)
    deadline = deadline_of(request)
    lane = "batch" if record.background else None
    if isinstance(body, GenerationBody):
        deadline = body.deadline_ms / 1000 if body.deadline_ms is not None else deadline
        priority = body.priority or 0
        if priority < record.client.most_urgent:
            limit = f"the most urgent priority of this key is {record.client.most_urgent}, lower numbers are sooner"
            raise ApiError(400, limit, param="priority", code="priority_limit")
        if record.background:
            priority = MAX_PRIORITY
        salt = body.cache_salt or ""
        moves = service.roles.read(record.client, body.kv_source, body.kv_publish)
        return Caller(
            record.client,
            priority,
            lane or body.lane,
            deadline,
            salt,
            adapter,
            record.request_id,
            record.began,
            resumes=tuple(body.resume_token_ids or ()),
            moves=moves,
        )
    cache_salt = body.cache_salt if isinstance(body, AnthropicBody) else None
    priority = MAX_PRIORITY if record.background else 0
    return Caller(record.client, priority, lane, deadline, cache_salt or "", adapter, record.request_id, record.began)


def deadline_of(request: Request) -> float | None:
    text = request.headers.get(DEADLINE_HEADER)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e9:
        raise ApiError(400, f"{DEADLINE_HEADER} is not a number of milliseconds", param=DEADLINE_HEADER)
    return value / 1000
