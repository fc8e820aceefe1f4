"""The server process from start to end: model, engine, port, serving, drain.

SIGTERM or Ctrl-C stops taking requests and lets those in flight end, within the shutdown timeout; a second signal does
not wait. Before the port is open it ends at once, whatever is under way. The exit code is 0 in all cases. SIGHUP reads
the keys file and the TLS certificate again. What is heavy to import is imported while the engine process starts. Called
by `tokenmill serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.config import SECRET_OPTIONS, ServeConfig
from tokenmill.serve.fleet.catalog import Catalog
from tokenmill.serve.overrides import SamplingDefaults, read_sampling_defaults, read_template
from tokenmill.serve.roles import with_role
from tokenmill.serve.storage import Storage
from tokenmill.serve.supervision.engine import Engine, Grouping
from tokenmill.serve.supervision.making import make_engine
from tokenmill.serve.supervision.signals import StopSignals, end_within, in_daemon_thread
from tokenmill.serve.supervision.spare import SpareEngine
from tokenmill.serve.supervision.startup import StartupReport
from tokenmill.serve.tenants.cache_salt import load_cache_secret
from tokenmill.serve.tenants.key_file import KeyWatch, load_keys, read_cache_secret
from tokenmill.serve.tenants.keys import KeyRing
from tokenmill.serve.tenants.prices import prices_of
from tokenmill.serve.transport.listening import (
    address_of,
    is_local,
    listening,
    load_certificate,
    raise_file_limit,
    tls_context,
)

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokenmill.checkpoint.chat_template import ChatTemplate
    from tokenmill.checkpoint.tokenizer import Tokenizer
    from tokenmill.engine.messages import Ready
    from tokenmill.serve.fleet.fleet import Fleet
    from tokenmill.serve.fleet.host import Host
    from tokenmill.serve.service import Service
    from tokenmill.serve.tracing import Tracing
    from tokenmill.serve.transport.http import HttpServer
    from tokenmill.serve.workers.pool import WorkerPool

_log = get_logger(__name__)
_POLL_SECONDS = 0.05
CLOSE_SECONDS = 2.0  # for the engine to write its cached pages to the tiers
_EXIT_SECONDS = 3.0  # from the end of the engine to the end of the process
_KEYS_SECONDS = 1.0  # between two looks at the keys file
_SECRET_SECONDS = 2.0  # for the disk that has the secret of the cache salts
_MIN_QUEUED = 64  # texts of one key that may wait for a text worker, whatever the limit on requests


Announce = Callable[[dict[str, Any]], None]


def run_server(catalog: Catalog, announce: Announce | None = None, grouping: Grouping | None = None) -> None:
    """Serve until told to stop. `announce` gets the address and what is served, once it is. `grouping` makes one engine
    of several processes, for models that ask for it."""
    config = catalog.config
    keys = read_keys(config)
    tls = tls_context(config)
    config = replace(config, max_connections=raise_file_limit(config.max_connections))
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with listening(config) as listener:
        asyncio.run(_serve(catalog, config, keys, listener, tls, announce, grouping))


def read_keys(config: ServeConfig) -> KeyRing:
    keys = load_keys(config.all_keys(), config.api_keys_file)
    if keys.open and not is_local(config):
        _log.warning("listening on %s without API keys: anyone who can reach it can use it", config.host)
    if keys.with_budget() is not None and not config.bills:
        raise UserError(f"key '{keys.with_budget()}' has a budget, but nothing has a price", "give --price")
    return keys


async def _serve(
    catalog: Catalog,
    config: ServeConfig,
    keys: KeyRing,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    announce: Announce | None,
    grouping: Grouping | None,
) -> None:
    from tokenmill.serve.fleet.making import make_fleet, plan_models

    report = StartupReport()
    signals = StopSignals(config.shutdown_timeout)
    fleet: Fleet | None = None
    storage = Storage()
    opener = ModelOpener(config, keys, report, storage, grouping)
    key_watch = KeyWatch(keys, config.all_keys(), config.api_keys_file)
    reload = _reload_at_signal(config, tls)
    try:
        report.phase("finding the model")
        planned = await signals.unless_told(in_daemon_thread(lambda: plan_models(catalog)))
        if planned is None:
            return
        hosts, plan = planned
        await storage.open(config, hosts[0].name)
        report.phase("starting the engine")
        fleet = opener.fleet = make_fleet(catalog, hosts, plan, opener)
        if await signals.unless_told(fleet.start()) is None:
            return
        service = fleet.default.service
        assert service is not None
        report.phase("opening the port")
        from tokenmill.serve.app import make_server

        server = make_server(fleet, opener.front, keys, opener.tracing, tls)
        listener.listen()  # connections queue from here on; otherwise the first after "ready" could be refused
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = address_of(listener, config)
        report.ready(address, _shown(config, keys, fleet))
        if announce is not None:
            announce({"url": address, "model": service.names[0], "engine": service.identity.options})
        beside = [asyncio.create_task(reload_keys(key_watch, fleet, config, reload)), *storage.start(service)]
        await signals.unless_told(asyncio.shield(serving))
        for task in beside:
            task.cancel()
        await _drain(fleet, config, server, serving, signals)
    finally:
        report.stop()
        if fleet is not None:
            await fleet.close(0.0 if signals.hurry.is_set() else CLOSE_SECONDS)
        await opener.close()
        await storage.close(fleet.default.service if fleet is not None else None)
        if signals.told.is_set():
            end_within(_EXIT_SECONDS)


class ModelOpener:
    """Makes what the models of this server need: their engines, text workers, services and applications."""

    def __init__(
        self,
        config: ServeConfig,
        keys: KeyRing,
        report: StartupReport,
        storage: Storage,
        grouping: Grouping | None = None,
    ) -> None:
        self.fleet: Fleet | None = None
        self.tracing: Tracing | None = None
        self.front: Any = None
        self._config = config
        self._keys = keys
        self._report = report
        self._storage = storage
        self._grouping = grouping
        self._spare = SpareEngine()
        self._workers: dict[str, WorkerPool] = {}
        self._templates: dict[str, str] = {}

    async def open(self, host: Host) -> tuple[Service, ASGIApp]:
        fleet = self.fleet
        assert fleet is not None
        path, spec = host.path, host.spec
        assert path is not None
        is_first = fleet.default is host
        config = self._config if is_first else spec.config
        options = with_adapters(config, spec.engine.fill("its part of the memory plan", memory=host.need.kv or None))
        options = with_role(config, options, len(fleet.hosts))
        self._templates[host.name], defaults = read_overrides(path, config)
        engine = make_engine(path, config, options, self._report, self._spare, self._grouping)
        try:
            workers = self._start_workers(host)
            secret = await _cache_secret(config, options, self._keys)
            found = await start_engine(path, options.load_format, engine, self._templates[host.name])
            service_class, identity, tokenizer, template = found
            prices = await in_daemon_thread(lambda: prices_of(config, str(identity.options["device"])))
            names = (*spec.names, *fleet.routes.split_names(host.name))
            parts = (engine, identity, tokenizer, template, workers, secret, prices, defaults)
            beside = None if is_first else fleet.default.service
            service = service_class(config, names, *parts, host.metrics, beside)
            service.loras.is_taken = lambda name: fleet.is_taken(name, host)
            return service, self._application(service, is_first)
        except BaseException:
            await self.shut(host)
            await engine.close(0.0)
            raise

    async def reopen(self, host: Host) -> None:
        assert host.service is not None
        await self.shut(host)
        host.service.text.use(self._start_workers(host))
        host.service.identity = await host.service.engine.start()

    async def shut(self, host: Host) -> None:
        workers = self._workers.pop(host.name, None)
        if workers is not None:
            await workers.close()

    async def close(self) -> None:
        await self._spare.close()

    def _start_workers(self, host: Host) -> WorkerPool:
        assert host.path is not None
        spec, source = host.spec, self._templates[host.name]
        workers = make_text_workers(host.path, spec.engine.load_format, spec.config, source)
        self._workers[host.name] = workers
        return workers

    def _application(self, service: Service, is_first: bool) -> ASGIApp:
        from tokenmill.serve.app import routes_of
        from tokenmill.serve.front import Front
        from tokenmill.serve.tracing import start_tracing

        assert self.fleet is not None
        if is_first:
            self._storage.attach(service)
            self.tracing, self.front = start_tracing(), Front(self.fleet, service.config.root_path)
        if self.tracing is not None:
            service.engine.observe(self.tracing)
        return routes_of(service, self._keys, *((self.fleet, self.front) if is_first else ()))


def read_overrides(path: Path, config: ServeConfig) -> tuple[str, SamplingDefaults]:
    """A stated chat template ("" without one) and the defaults for sampling."""
    defaults = read_sampling_defaults(path, config.generation_config, config.override_generation_config)
    return read_template(config.chat_template), defaults


def with_adapters(config: ServeConfig, engine_config: EngineConfig) -> EngineConfig:
    """With memory for adapters, where some may be loaded later."""
    for each in config.lora_dir:
        if not Path(each).expanduser().is_dir():
            raise UserError(f"--lora-dir {each} is not a directory", "make it, or leave it out")
    return replace(engine_config, enable_lora=True) if config.lora_dir else engine_config


def _shown(config: ServeConfig, keys: KeyRing, fleet: Fleet) -> dict[str, dict[str, Any]]:
    """What the start prints."""
    service = fleet.default.service
    assert service is not None
    shown = {"server": _shown_settings(config, keys, service), "engine": service.identity.options}
    if len(fleet.hosts) > 1:
        from tokenmill.serve.fleet.making import shown_plan

        shown["models"] = shown_plan(fleet)
    return shown


def _shown_settings(config: ServeConfig, keys: KeyRing, service: Service) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(config).items() if name not in SECRET_OPTIONS}
    settings["keys"] = len(keys)
    prices = service.accounts.prices
    if prices is not None and prices.by_device:
        settings["price"] = f"${prices.hour:.4g} per hour ({prices.basis})"
    settings["tool_call_parser"] = f"{service.tool_style.parser.name} ({service.tool_style.reason})"
    settings["generation_config"] = str(service.sampling_defaults)
    if "\n" in config.chat_template or "{" in config.chat_template:
        settings["chat_template"] = "stated as text"
    reasoning = service.reasoning_style
    settings["reasoning_parser"] = f"{reasoning.parser.name if reasoning.parser else 'none'} ({reasoning.reason})"
    return settings


def make_text_workers(path: Path, load_format: str, config: ServeConfig, template_source: str) -> WorkerPool:
    """They start in the background, at low priority: requests wait for them, "ready" does not."""
    from tokenmill.serve.workers.jobs import Setup
    from tokenmill.serve.workers.pool import WorkerPool

    level = logging.getLevelName(_log.getEffectiveLevel())
    setup = Setup(str(path), config.text_worker_memory, level, load_format, template_source)
    workers = WorkerPool(setup, config.text_workers, max(_MIN_QUEUED, config.max_queued_requests))
    workers.start()
    return workers


async def start_engine(
    path: Path, load_format: str, engine: Engine, template_source: str
) -> tuple[type[Service], Ready, Tokenizer, ChatTemplate | None]:
    """The engine process starts while this one imports the web framework and builds the tokenizer."""
    starting = asyncio.ensure_future(engine.start())

    def prepare() -> tuple[type[Service], Tokenizer, ChatTemplate | None]:
        import tokenmill.serve.app  # noqa: F401
        from tokenmill.checkpoint.tokenizer_files import tokenizer_of
        from tokenmill.serve.service import Service

        return Service, *tokenizer_of(path, load_format, template_source)

    try:
        service_class, tokenizer, template = await in_daemon_thread(prepare)
        identity = await starting
    finally:
        starting.cancel()
    return service_class, identity, tokenizer, template


async def reload_keys(watch: KeyWatch, fleet: Fleet, config: ServeConfig, told: asyncio.Event) -> None:
    """Take in a changed keys file, at SIGHUP or within a second. Requests of keys that are gone end."""
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KEYS_SECONDS):  # wait_for of Python 3.11 may lose a cancellation
                await told.wait()
        if not told.is_set() and not await asyncio.to_thread(watch.changed):
            continue
        told.clear()
        entries = await asyncio.to_thread(watch.read)
        if entries is not None:
            fleet.end_clients(watch.apply(entries))
            if not config.bills and any(client.max_budget for _, client in entries):
                _log.error("keys have budgets, but nothing has a price: start the server with --price")


async def _cache_secret(config: ServeConfig, engine_config: EngineConfig, keys: KeyRing) -> bytes:
    """Of the cache salts. Without keys only requests that bring a salt of their own need one."""
    if keys.open:
        return b""
    stated = read_cache_secret(config.api_keys_file)
    loading = in_daemon_thread(lambda: load_cache_secret(stated, engine_config.kv_disk, engine_config.kv_redis))
    try:
        return await asyncio.wait_for(loading, _SECRET_SECONDS)
    except TimeoutError:
        _log.warning("%s does not answer: what it holds is of no use until the next start", engine_config.kv_disk)
        return secrets.token_bytes(32)


async def _drain(
    fleet: Fleet, config: ServeConfig, server: HttpServer, serving: asyncio.Task[None], signals: StopSignals
) -> None:
    """Accept no new requests; those in flight finish within the timeout or get an error event."""
    fleet.drain()
    batches = fleet.default.service.batches if fleet.default.service is not None else None
    if batches is not None:
        await batches.close()  # the next start goes on with them
    limit, left = config.shutdown_timeout, fleet.num_in_flight
    _log.warning("shutting down: %d requests in flight, waiting up to %.0f s", left, limit)
    deadline = asyncio.get_running_loop().time() + limit
    while fleet.num_in_flight and asyncio.get_running_loop().time() < deadline and not signals.hurry.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    if fleet.num_in_flight:
        _log.warning("%d requests did not finish in time", fleet.num_in_flight)
        for service in fleet.services:
            service.engine.fail_all("the server is shutting down")
        await asyncio.sleep(_POLL_SECONDS)  # lets the error events be sent
    server.should_exit = True
    server.config.timeout_graceful_shutdown = 1
    await serving


def _reload_at_signal(config: ServeConfig, tls: ssl.SSLContext | None) -> asyncio.Event:
    """Is set when the keys are to be read again."""
    told = asyncio.Event()
    if config.api_keys_file or tls is not None:  # else SIGHUP ends the server, as a terminal that closes should
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_files, told, tls, config)
    return told


def _reload_files(keys: asyncio.Event, tls: ssl.SSLContext | None, config: ServeConfig) -> None:
    """At SIGHUP. A file that is wrong leaves what is in use as it was."""
    keys.set()
    if tls is None:
        return
    try:
        tls_context(config)  # a wrong file must not harm the context in use
        load_certificate(tls, config)
        _log.warning("read the TLS certificate again")
    except UserError as error:
        _log.error("the TLS certificate stays as it was: %s", error)
