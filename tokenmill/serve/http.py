"""The HTTP server proper: uvicorn around the application, with signals left to server.py."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from tokenmill.serve.app import build_app
from tokenmill.serve.keys import KeyRing
from tokenmill.serve.service import Service


class HttpServer(uvicorn.Server):
    """A drain that answers 503 instead of a closed port: uvicorn's own signal handling would close it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(service: Service, keys: KeyRing) -> HttpServer:
    app = build_app(service, keys)
    return HttpServer(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, lifespan="off", ws="none")
    )
