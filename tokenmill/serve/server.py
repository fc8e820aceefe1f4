"""The server process from start to end: model, engine, port, serving, drain.

SIGTERM or Ctrl-C stops taking requests and lets those in flight end, within the shutdown timeout; a second signal does
not wait. What is heavy to import is imported while the engine process starts. Called by `tokenmill serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.engine_client import EngineClient
from tokenmill.serve.keys import KeyRing, load_keys
from tokenmill.serve.startup import StartupReport

if TYPE_CHECKING:
    from tokenmill.checkpoint.chat_template import ChatTemplate
    from tokenmill.checkpoint.tokenizer import Tokenizer
    from tokenmill.serve.http import HttpServer
    from tokenmill.serve.service import Service
    from tokenmill.serve.workers.pool import WorkerPool

_log = get_logger(__name__)
_POLL_SECONDS = 0.05
_SECRET = ("api_key",)
_MIN_QUEUED = 64  # texts of one key that may wait for a text worker, whatever the limit on requests


Announce = Callable[[dict[str, Any]], None]


def run_server(model: str, config: ServeConfig, engine_config: EngineConfig, announce: Announce | None = None) -> None:
    """Serve until told to stop. `announce` gets the address and what is served, once it is."""
    keys = load_keys(config.all_keys(), config.api_keys_file)
    if keys.open and config.host not in ("127.0.0.1", "localhost", "::1"):
        _log.warning("listening on %s without API keys: anyone who can reach it can use it", config.host)
    listener = _listen(config.host, config.port)
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    try:
        asyncio.run(_serve(model, config, engine_config, keys, listener, announce))
    finally:
        listener.close()


async def _serve(
    model: str,
    config: ServeConfig,
    engine_config: EngineConfig,
    keys: KeyRing,
    listener: socket.socket,
    announce: Announce | None,
) -> None:
    report = StartupReport()
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    report.phase("finding the model")
    path = await asyncio.to_thread(lambda: resolve(model).path)
    report.phase("starting the engine")
    engine = EngineClient(path, engine_config, config.stall_timeout, report.phase)
    workers = _text_workers(path, config)
    try:
        service = await _unless(interrupted, _start(model, path, config, engine, workers))
        if service is None:
            return
        report.phase("opening the port")
        from tokenmill.serve.http import make_server

        server = make_server(service, keys)
        listener.listen()  # connections queue from here on; otherwise the first after "ready" could be refused
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        settings = {name: value for name, value in asdict(config).items() if name not in _SECRET}
        settings["keys"] = len(keys)
        settings["tool_call_parser"] = f"{service.tool_style.parser.name} ({service.tool_style.reason})"
        report.ready(_address(listener), {"server": settings, "engine": service.identity.options})
        if announce is not None:
            announce({"url": _address(listener), "model": service.names[0], "engine": service.identity.options})
        await _until_told(serving, interrupted)
        await _drain(service, server, serving, interrupted)
    finally:
        report.stop()
        await workers.close()
        await engine.close()


def _text_workers(path: Path, config: ServeConfig) -> WorkerPool:
    """They start in the background, at low priority: requests wait for them, "ready" does not."""
    from tokenmill.serve.workers.jobs import Setup
    from tokenmill.serve.workers.pool import WorkerPool

    setup = Setup(str(path), config.text_worker_memory, logging.getLevelName(_log.getEffectiveLevel()))
    workers = WorkerPool(setup, config.text_workers, max(_MIN_QUEUED, config.max_queued_requests))
    workers.start()
    return workers


async def _start(model: str, path: Path, config: ServeConfig, engine: EngineClient, workers: WorkerPool) -> Service:
    """The engine process starts while this one imports the web framework and builds the tokenizer."""
    starting = asyncio.ensure_future(engine.start())

    def prepare() -> tuple[type[Service], Tokenizer, ChatTemplate | None]:
        import tokenmill.serve.http  # noqa: F401
        from tokenmill.checkpoint.tokenizer_files import load_chat_template, load_tokenizer
        from tokenmill.serve.service import Service

        return Service, load_tokenizer(path), load_chat_template(path)

    try:
        service_class, tokenizer, template = await asyncio.to_thread(prepare)
        identity = await starting
    finally:
        starting.cancel()
    return service_class(config, config.served_model_name or (model,), engine, identity, tokenizer, template, workers)


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, Service]) -> Service | None:
    """The result of `work`, or None if the event comes first."""
    working = asyncio.ensure_future(work)
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if working.done():
        return working.result()
    working.cancel()
    return None


async def _until_told(serving: asyncio.Task[None], interrupted: asyncio.Event) -> None:
    waiting = asyncio.ensure_future(interrupted.wait())
    await asyncio.wait((serving, waiting), return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


async def _drain(service: Service, server: HttpServer, serving: asyncio.Task[None], interrupted: asyncio.Event) -> None:
    """Accept no new requests; those in flight finish within the timeout or get an error event."""
    interrupted.clear()
    service.admission.draining = True
    limit, left = service.config.shutdown_timeout, service.engine.num_in_flight
    _log.warning("shutting down: %d requests in flight, waiting up to %.0f s", left, limit)
    deadline = asyncio.get_running_loop().time() + limit
    while service.engine.num_in_flight and asyncio.get_running_loop().time() < deadline and not interrupted.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    if service.engine.num_in_flight:
        _log.warning("%d requests did not finish in time", service.engine.num_in_flight)
        service.engine.fail_all("the server is shutting down")
        await asyncio.sleep(_POLL_SECONDS)  # lets the error events be sent
    server.should_exit = True
    server.config.timeout_graceful_shutdown = 1
    await serving


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise UserError(f"cannot listen on {host}:{port}: {error}", "choose another --port or --host") from None
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
