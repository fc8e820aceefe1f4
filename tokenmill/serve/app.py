"""Puts the HTTP application together: routes, error shapes, the edge around them. Owns no behaviour of its own."""

from __future__ import annotations

import ssl
from collections.abc import Callable

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp

from tokenmill import __version__
from tokenmill.log import get_logger
from tokenmill.serve.api.absent import add_absent_routes
from tokenmill.serve.api.anthropic import add_anthropic_routes
from tokenmill.serve.api.background import BackgroundCalls
from tokenmill.serve.api.batches import add_batch_routes
from tokenmill.serve.api.chat import add_chat_routes
from tokenmill.serve.api.completions import add_completion_routes
from tokenmill.serve.api.embeddings import add_embedding_routes
from tokenmill.serve.api.error_shapes import shaped_error
from tokenmill.serve.api.exchange import ClientGoneError, record_of
from tokenmill.serve.api.files import add_file_routes, add_missing_file_routes
from tokenmill.serve.api.info import add_info_routes
from tokenmill.serve.api.loras import add_lora_routes
from tokenmill.serve.api.models import add_model_routes
from tokenmill.serve.api.ollama import add_ollama_routes
from tokenmill.serve.api.ollama_embeddings import add_ollama_embedding_routes
from tokenmill.serve.api.ollama_models import add_ollama_model_routes
from tokenmill.serve.api.page import add_page_routes
from tokenmill.serve.api.replica import add_replica_routes
from tokenmill.serve.api.requests import add_request_routes
from tokenmill.serve.api.rerank import add_rerank_routes
from tokenmill.serve.api.responses import add_responses_routes
from tokenmill.serve.api.spending import add_spending_routes
from tokenmill.serve.api.tokens import add_token_routes
from tokenmill.serve.batches.runner import BatchRunner
from tokenmill.serve.batches.store import BatchStore
from tokenmill.serve.edge import Edge, route_path, with_cors
from tokenmill.serve.errors import ApiError
from tokenmill.serve.fleet.fleet import Fleet
from tokenmill.serve.service import Service
from tokenmill.serve.tenants.keys import KeyRing
from tokenmill.serve.tracing import Tracing
from tokenmill.serve.transport.http import HttpServer

_log = get_logger(__name__)
_ROUTES = (
    add_info_routes,
    add_token_routes,
    add_completion_routes,
    add_chat_routes,
    add_responses_routes,
    add_embedding_routes,
    add_rerank_routes,
    add_ollama_routes,
    add_ollama_embedding_routes,
    add_anthropic_routes,
    add_spending_routes,
    add_lora_routes,
    add_page_routes,
)


def routes_of(service: Service, keys: KeyRing, fleet: Fleet | None = None, front: ASGIApp | None = None) -> FastAPI:
    """The application of a model. That of the first has `fleet` and `front` too: what concerns all models, and batches,
    whose rows name their models."""
    config = service.config
    app = FastAPI(title="tokenmill", version=__version__, docs_url=None, redoc_url=None, root_path=config.root_path)
    app.state.ping_seconds = config.sse_ping
    if fleet is not None:
        add_model_routes(app, fleet)
        add_ollama_model_routes(app, fleet)
    for add_routes in _ROUTES:
        add_routes(app, service)
    add_replica_routes(app, service, fleet)
    add_request_routes(app, (lambda: fleet.services) if fleet is not None else lambda: [service])
    _add_batches(app, service, keys, front or app, fleet)
    add_absent_routes(app)  # last: a route that exists comes first
    _add_error_handlers(app, service)
    return app


def build_app(
    service: Service,
    keys: KeyRing,
    app: ASGIApp | None = None,
    tracing: Tracing | None = None,
    body_limit: Callable[[str], int] | None = None,
) -> ASGIApp:
    """With everything around it. `app`: the routes, unless they are those of `service`; `body_limit`: by path, unless
    it is that of `service`."""
    config = service.config
    edge: ASGIApp = Edge(app or routes_of(service, keys), keys, service.metrics, config, body_limit)
    if tracing is not None:
        edge = tracing.around(edge)
    return with_cors(edge, config.cors_origin) if config.cors_origin else edge


def _add_batches(app: FastAPI, service: Service, keys: KeyRing, way_in: ASGIApp, fleet: Fleet | None) -> None:
    if service.files is None:
        add_missing_file_routes(app)
        return
    service.batches = BatchRunner(
        service.files,
        BatchStore(service.files),
        BackgroundCalls(way_in),
        keys.owned_by,
        service.has_room if fleet is None else fleet.has_room,
        concurrency=service.config.batch_concurrency or service.admission.num_slots,
        max_line=max(service.config.max_body_bytes, 0 if fleet is None else fleet.body_limit("")),
    )
    add_file_routes(app, service, service.files)
    add_batch_routes(app, service, service.batches)


def make_server(
    fleet: Fleet, front: ASGIApp, keys: KeyRing, tracing: Tracing | None, tls: ssl.SSLContext | None = None
) -> HttpServer:
    service = fleet.default.service
    assert service is not None, "the first model is loaded"
    app = build_app(service, keys, front, tracing, fleet.body_limit)

    def count(reason: str) -> None:
        service.metrics.add("connections_refused", 1.0, reason)

    return HttpServer(app, service.config, tls, count, fleet.body_limit)


def _add_error_handlers(app: FastAPI, service: Service) -> None:
    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        record_of(request).error = error.message
        if request.method == "POST" and error.status < 500 and error.status != 429:
            service.charge(record_of(request).client)  # admission charges only what it admits
        return shaped_error(error, route_path(request.scope["path"], request.app.root_path))

    @app.exception_handler(HTTPException)
    async def plain(request: Request, error: HTTPException) -> Response:
        return await refused(request, ApiError(error.status_code, str(error.detail)))

    @app.exception_handler(RequestValidationError)
    async def wrong_query(request: Request, error: RequestValidationError) -> Response:
        names = ", ".join(sorted({str(each["loc"][-1]) for each in error.errors()}))
        return await refused(request, ApiError(400, f"the query is not valid: {names}"))

    @app.exception_handler(ClientGoneError)
    async def gone(request: Request, _error: ClientGoneError) -> Response:
        record_of(request).error = "the client left"
        return Response(status_code=499)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        _log.error("request %s failed", record_of(request).request_id, exc_info=error)
        return await refused(request, ApiError(500, "internal error; the server's log has the request id"))
