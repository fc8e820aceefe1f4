"""Routes that other servers have and this one does not: refused by name, with what to use instead.

A client that was written for vLLM or Ollama learns from the answer, not from a bare 404. Once such a route exists, its
line here goes; until then a route of the same path that is registered earlier wins.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import APIRouter, FastAPI

from tokenmill.serve.errors import ApiError

_SPEECH = "speech is not supported: this server generates text"
_BLOBS = "models are files here: start the server with `tokenmill serve FILE`"

ABSENT: tuple[tuple[str, str, str], ...] = (  # method, path, reason
    ("POST", "/v1/audio/transcriptions", _SPEECH),
    ("POST", "/v1/audio/translations", _SPEECH),
    ("POST", "/v1/audio/speech", _SPEECH),
    ("POST", "/v1/images/generations", "images are not generated here"),
    ("POST", "/v1/moderations", "there is no moderation model here"),
    ("POST", "/pooling", "use /v1/embeddings, /v1/score, /v1/rerank or /v1/classify"),
    ("POST", "/reset_prefix_cache", "requests with another cache_salt share nothing with what is cached"),
    ("POST", "/invocations", "use the routes under /v1/"),
    ("POST", "/api/create", "use `tokenmill quantize` or `tokenmill convert`, then serve the result"),
    ("POST", "/api/copy", "serve the model under more names with --served-model-name"),
    ("POST", "/api/push", "there is no registry here"),
    ("HEAD", "/api/blobs/{digest}", _BLOBS),
    ("POST", "/api/blobs/{digest}", _BLOBS),
)


def add_absent_routes(app: FastAPI) -> None:
    router = APIRouter(include_in_schema=False)
    for method, path, reason in ABSENT:
        router.add_api_route(path, _refuser(path, reason), methods=[method], response_model=None)
    app.include_router(router)


def _refuser(path: str, reason: str) -> Callable[[], Coroutine[Any, Any, NoReturn]]:
    async def refuse() -> NoReturn:
        raise ApiError(404, f"{path} is not supported: {reason}", code="route_not_supported")

    return refuse
