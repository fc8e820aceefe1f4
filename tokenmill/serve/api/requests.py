"""/v1/requests: a key's own recent requests: where their time went, and where their cached prefix ended and why.

The same is part of an answer where the body asks for it (`return_timeline`, `return_prefix_break`). No key sees
another's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response

from tokenmill.serve.api.exchange import Record, json_response, record_of
from tokenmill.serve.api.protocol import GenerationBody
from tokenmill.serve.errors import ApiError
from tokenmill.serve.generation import Generation
from tokenmill.serve.prefix_breaks import prefix_break
from tokenmill.serve.recent import RecentRequest, timeline_of
from tokenmill.serve.service import Service

_OFF = "this server keeps no requests: serve with --max-recent-requests"


def add_request_routes(app: FastAPI, services: Callable[[], Sequence[Service]]) -> None:
    """`services`: of the models whose requests are shown."""
    router = APIRouter()

    @router.get("/v1/requests")
    async def requests(request: Request) -> Response:
        _check_enabled(services())
        key = record_of(request).client.name
        found = sorted(
            (each for service in services() for each in service.recent.of(key)), key=lambda each: -each.created
        )
        return json_response({"object": "list", "data": [_summary(each) for each in found]})

    @router.get("/v1/requests/{request_id}")
    async def one(request: Request, request_id: str) -> Response:
        _check_enabled(services())
        key = record_of(request).client.name
        for service in services():
            found = service.recent.find(key, request_id)
            if found is not None:
                shown = {"timeline": found.timeline or None, "prefix_breaks": _breaks(service, key, found)}
                return json_response(_summary(found) | shown)
        raise ApiError(404, "no recent request of this key has that X-Request-Id", code="request_not_found")

    app.include_router(router)


def check_diagnosis(service: Service, body: GenerationBody) -> None:
    """Raise ApiError if the body asks for what this server does not keep."""
    if body.return_prefix_break and not service.recent.enabled:
        raise ApiError(400, _OFF, param="return_prefix_break")


def diagnosis_of(service: Service, body: GenerationBody, generation: Generation, record: Record) -> dict[str, Any]:
    """The fields of an answer that its body asked for; called when the answer is complete."""
    shown: dict[str, Any] = service.roles.shown(generation)
    if body.return_timeline:
        shown["timeline"] = timeline_of(generation)
    if body.return_prefix_break:
        own = service.recent.running(generation)
        shown["prefix_breaks"] = _breaks(service, record.client.name, own) if own is not None else []
    return shown


def _check_enabled(services: Sequence[Service]) -> None:
    if not any(service.recent.enabled for service in services):
        raise ApiError(404, _OFF, code="requests_off")


def _breaks(service: Service, key: str, request: RecentRequest) -> list[dict[str, Any]]:
    page_size = int(service.identity.options["page_size"])
    earlier = service.recent.before(key, request)

    def decode(tokens: list[int]) -> str:
        return service.tokenizer.decode(tokens, skip_special_tokens=False)

    return [prefix_break(prompt, earlier, page_size, decode) for prompt in request.prompts]


def _summary(request: RecentRequest) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "object": "request",
        "created": round(request.created, 3),
        "running": not request.timeline,
        "seconds": request.timeline.get("seconds"),
        "prompts": [
            {
                "prompt_tokens": prompt.num_prompt_tokens,
                "cached_tokens": prompt.num_cached_tokens,
                "cache_reason": prompt.cache_reason,
                "output_tokens": len(prompt.tokens) - prompt.num_prompt_tokens,
                "finish_reasons": prompt.finish_reasons,
            }
            for prompt in request.prompts
        ],
    }
