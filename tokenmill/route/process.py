"""The router process from start to end: replicas, port, serving, drain. Called by `tokenmill route`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx

from tokenmill.log import get_logger
from tokenmill.route.app import RouterApp
from tokenmill.route.config import RouteConfig
from tokenmill.route.fleet import Fleet
from tokenmill.route.metrics import RouterMetrics
from tokenmill.route.relay import Relay
from tokenmill.route.texts import Texts
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.supervision.signals import StopSignals, end_within
from tokenmill.serve.transport.http import HttpServer
from tokenmill.serve.transport.listening import address_of, listening

_log = get_logger(__name__)
_FIRST_LOOK = 2.0  # seconds that the start waits for replicas; those that come later join
_POLL_SECONDS = 0.05
_EXIT_SECONDS = 3.0
_IDLE_SECONDS = 2.0


def run_router(config: RouteConfig, announce: Callable[[dict[str, Any]], None] | None = None) -> None:
    """Route until told to stop."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    texts = Texts(config.tokenizer_of)
    server = ServeConfig(host=config.host, port=config.port, max_connections_per_address=4096)
    with listening(server) as listener, asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_route(config, server, texts, listener, announce))


async def _route(
    config: RouteConfig,
    limits: ServeConfig,
    texts: Texts,
    listener: socket.socket,
    announce: Callable[[dict[str, Any]], None] | None,
) -> None:
    signals = StopSignals(config.shutdown_timeout)
    timeout = httpx.Timeout(None, connect=config.connect_timeout)
    # Less than servers keep idle connections: one that was just closed would look like a replica that died.
    pool = httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_SECONDS)
    async with httpx.AsyncClient(timeout=timeout, limits=pool, trust_env=False) as http:
        metrics, fleet = RouterMetrics(), Fleet(config, http)
        app = RouterApp(config, fleet, texts, Relay(fleet, http, metrics, config), metrics)
        fleet.start()
        await _first_look(fleet, texts)
        server = HttpServer(app, limits)
        listener.listen()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = address_of(listener, limits)
        num_up = sum(each.up for each in fleet.replicas)
        _log.info("router: %s", ", ".join(f"{name}={value}" for name, value in config.shown().items()))
        _log.info("ready on %s: %d of %d replicas are up", address, num_up, len(fleet.replicas))
        if announce is not None:
            announce({"url": address, "replicas": list(config.replica), "up": num_up})
        await signals.unless_told(asyncio.shield(serving))
        app.draining = True
        deadline = time.monotonic() + config.shutdown_timeout
        while app.num_in_flight and time.monotonic() < deadline and not signals.hurry.is_set():
            await asyncio.sleep(_POLL_SECONDS)
        server.should_exit = True
        server.config.timeout_graceful_shutdown = 1
        await serving
        await fleet.close()
        await texts.close()
        end_within(_EXIT_SECONDS)


async def _first_look(fleet: Fleet, texts: Texts) -> None:
    """Wait a moment for the replicas, and for their tokenizers: the first requests are then routed as all others."""
    deadline = time.monotonic() + _FIRST_LOOK
    while time.monotonic() < deadline and not all(each.up for each in fleet.replicas):
        await asyncio.sleep(_POLL_SECONDS)
    for model in {model for each in fleet.replicas for model in each.known_models}:
        await texts.prepare(model)
