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
_ONE_MODEL = "this server has one model, which is loaded"
_POOLING = "this server has no pooling models: use /v1/embeddings"
_BLOBS = "models are files here: start the server with `tokenmill serve FILE`"

ABSENT: tuple[tuple[str, str, str], ...] = (  # method, path, reason
    ("POST", "/v1/audio/transcriptions", _SPEECH),
    ("POST", "/v1/audio/translations", _SPEECH),
    ("POST", "/v1/audio/speech", _SPEECH),
    ("POST", "/v1/images/generations", "images are not generated here"),
    ("POST", "/v1/moderations", "there is no moderation model here"),
    ("POST", "/pooling", _POOLING),
    ("POST", "/classify", _POOLING),
    ("POST", "/score", _POOLING),
    ("POST", "/v1/score", _POOLING),
    ("POST", "/rerank", _POOLING),
    ("POST", "/v1/rerank", _POOLING),
    ("POST", "/v2/rerank", _POOLING),
    ("POST", "/v1/load_lora_adapter", "adapters are not loaded by requests here"),
    ("POST", "/v1/unload_lora_adapter", "adapters are not loaded by requests here"),
    ("POST", "/reset_prefix_cache", "requests with another cache_salt share nothing with what is cached"),
    ("POST", "/invocations", "use the routes under /v1/"),
    ("POST", "/sleep", _ONE_MODEL),
    ("POST", "/wake_up", _ONE_MODEL),
    ("POST", "/v1/messages/count_tokens", "use POST /tokenize with messages"),
    ("POST", "/api/create", "use `tokenmill quantize` or `tokenmill convert`, then serve the result"),
    ("POST", "/api/copy", "serve the model under more names with --served-model-name"),
    ("DELETE", "/api/delete", _ONE_MODEL),
    ("POST", "/api/pull", "use `tokenmill pull`"),
    ("POST", "/api/push", "there is no registry here"),
    ("HEAD", "/api/blobs/{digest}", _BLOBS),
    ("POST", "/api/blobs/{digest}", _BLOBS),
    ("POST", "/api/show", "use GET /v1/models/NAME"),
    ("GET", "/api/ps", "use GET /v1/models"),
    ("POST", "/api/embed", "use /v1/embeddings"),
    ("POST", "/api/embeddings", "use /v1/embeddings"),
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
