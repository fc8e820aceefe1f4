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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.checkpoint.sources import resolve
from tokenmill.config import EngineConfig
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.config import ServeConfig
from tokenmill.serve.files.store import FileStore
from tokenmill.serve.overrides import SamplingDefaults, read_sampling_defaults, read_template
from tokenmill.serve.supervision.engine_client import EngineClient
from tokenmill.serve.supervision.signals import StopSignals, end_within, in_daemon_thread
from tokenmill.serve.supervision.startup import StartupReport
from tokenmill.serve.tenants.cache_salt import load_cache_secret
from tokenmill.serve.tenants.key_file import KeyWatch, load_keys, read_cache_secret
from tokenmill.serve.tenants.keys import KeyRing
from tokenmill.serve.tenants.prices import prices_of
from tokenmill.serve.traffic_log import TrafficLog
from tokenmill.serve.transport.listening import (
    address_of,
    is_local,
    listening,
    load_certificate,
    raise_file_limit,
    tls_context,
)
from tokenmill.serve.usage_file import UsageFile

if TYPE_CHECKING:
    from tokenmill.checkpoint.chat_template import ChatTemplate
    from tokenmill.checkpoint.tokenizer import Tokenizer
    from tokenmill.engine.messages import Ready
    from tokenmill.serve.service import Service
    from tokenmill.serve.transport.http import HttpServer
    from tokenmill.serve.workers.pool import WorkerPool

_log = get_logger(__name__)
_POLL_SECONDS = 0.05
_CLOSE_SECONDS = 2.0  # for the engine to write its cached pages to the tiers
_EXIT_SECONDS = 3.0  # from the end of the engine to the end of the process
_KEYS_SECONDS = 1.0  # between two looks at the keys file
_SECRET_SECONDS = 2.0  # for the disk that has the secret of the cache salts
_SECRET = ("api_key",)
_MIN_QUEUED = 64  # texts of one key that may wait for a text worker, whatever the limit on requests


Announce = Callable[[dict[str, Any]], None]


def run_server(model: str, config: ServeConfig, engine_config: EngineConfig, announce: Announce | None = None) -> None:
    """Serve until told to stop. `announce` gets the address and what is served, once it is."""
    keys = load_keys(config.all_keys(), config.api_keys_file)
    if keys.open and not is_local(config):
        _log.warning("listening on %s without API keys: anyone who can reach it can use it", config.host)
    if keys.with_budget() is not None and not config.bills:
        raise UserError(f"key '{keys.with_budget()}' has a budget, but nothing has a price", "give --price")
    tls = tls_context(config)
    config = replace(config, max_connections=raise_file_limit(config.max_connections))
    with contextlib.suppress(ImportError):
        import uvloop

        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
    with listening(config) as listener:
        asyncio.run(_serve(model, config, engine_config, keys, listener, tls, announce))


async def _serve(
    model: str,
    config: ServeConfig,
    engine_config: EngineConfig,
    keys: KeyRing,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    announce: Announce | None,
) -> None:
    report = StartupReport()
    signals = StopSignals(config.shutdown_timeout)
    engine: EngineClient | None = None
    workers: WorkerPool | None = None
    service: Service | None = None
    storage = _Storage()
    key_watch = KeyWatch(keys, config.all_keys(), config.api_keys_file)
    reload = _reload_at_signal(config, tls)
    try:
        report.phase("finding the model")
        path = await signals.unless_told(in_daemon_thread(lambda: resolve(model).path))
        if path is None:
            return
        template_source, defaults = read_overrides(path, config)
        names = config.served_model_name or (model,)
        await storage.open(config, names[0])
        report.phase("starting the engine")
        engine = make_engine(path, config, with_adapters(config, engine_config), report)
        workers = make_text_workers(path, engine_config.load_format, config, template_source)
        secret = await _cache_secret(config, engine_config, keys)
        started = await signals.unless_told(start_engine(path, engine_config.load_format, engine, template_source))
        if started is None:
            return
        service_class, identity, tokenizer, template = started
        prices = await in_daemon_thread(lambda: prices_of(config, str(identity.options["device"])))
        service = service_class(config, names, engine, identity, tokenizer, template, workers, secret, prices, defaults)
        storage.attach(service)
        report.phase("opening the port")
        from tokenmill.serve.app import make_server

        server = make_server(service, keys, tls)
        listener.listen()  # connections queue from here on; otherwise the first after "ready" could be refused
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        address = address_of(listener, config)
        report.ready(address, {"server": _shown_settings(config, keys, service), "engine": service.identity.options})
        if announce is not None:
            announce({"url": address, "model": service.names[0], "engine": service.identity.options})
        beside = [asyncio.create_task(_reload_keys(key_watch, service, reload)), *storage.start(service)]
        await signals.unless_told(asyncio.shield(serving))
        for task in beside:
            task.cancel()
        await _drain(service, server, serving, signals)
    finally:
        report.stop()
        if workers is not None:
            await workers.close()
        if engine is not None:
            await engine.close(0.0 if signals.hurry.is_set() else _CLOSE_SECONDS)
        await storage.close(service)
        if signals.told.is_set():
            end_within(_EXIT_SECONDS)


@dataclass(slots=True)
class _Storage:
    """What a server keeps on disk, as far as its options say so. Disks may hang: they are used in threads."""

    traffic_log: TrafficLog | None = None
    files: FileStore | None = None
    usage: UsageFile | None = None

    async def open(self, config: ServeConfig, name: str) -> None:
        if config.traffic_log:
            opening = in_daemon_thread(lambda: TrafficLog(config.traffic_log, name, config.traffic_log_size))
            self.traffic_log = await opening
        if config.files_dir:
            self.files = await in_daemon_thread(lambda: FileStore(config.files_dir, config.max_files_size))
        if config.usage_file:
            self.usage = await in_daemon_thread(lambda: UsageFile(config.usage_file))

    def attach(self, service: Service) -> None:
        if self.traffic_log is not None:
            service.record_traffic(self.traffic_log)
        service.files = self.files
        if self.usage is not None:
            self.usage.load_into(service.accounts)

    def start(self, service: Service) -> list[asyncio.Task[None]]:
        """Go on with batches, and begin to keep what is used: the tasks to cancel at the end."""
        if service.batches is not None:
            service.batches.start()
        return [] if self.usage is None else [asyncio.create_task(self.usage.keep(service.accounts))]

    async def close(self, service: Service | None) -> None:
        if self.traffic_log is not None:
            await in_daemon_thread(self.traffic_log.close)
        if self.files is not None:
            self.files.close()
        usage = self.usage
        if usage is not None:
            await in_daemon_thread(lambda: usage.close(service.accounts if service is not None else None))


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


def make_engine(path: Path, config: ServeConfig, engine_config: EngineConfig, report: StartupReport) -> EngineClient:
    steps = str(Path(config.traffic_log).expanduser()) if config.traffic_log else ""
    return EngineClient(
        path, engine_config, config.stall_timeout, report.phase, config.spare_engine, steps, bool(config.price)
    )


def _shown_settings(config: ServeConfig, keys: KeyRing, service: Service) -> dict[str, Any]:
    settings = {name: value for name, value in asdict(config).items() if name not in _SECRET}
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
    path: Path, load_format: str, engine: EngineClient, template_source: str
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


async def _reload_keys(watch: KeyWatch, service: Service, told: asyncio.Event) -> None:
    """Take in a changed keys file, at SIGHUP or within a second. Requests of keys that are gone end."""
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(told.wait(), _KEYS_SECONDS)
        if not told.is_set() and not await asyncio.to_thread(watch.changed):
            continue
        told.clear()
        entries = await asyncio.to_thread(watch.read)
        if entries is not None:
            service.end_clients(watch.apply(entries))
            if not service.config.bills and any(client.max_budget for _, client in entries):
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


async def _drain(service: Service, server: HttpServer, serving: asyncio.Task[None], signals: StopSignals) -> None:
    """Accept no new requests; those in flight finish within the timeout or get an error event."""
    service.admission.draining = True
    if service.batches is not None:
        await service.batches.close()  # the next start goes on with them
    limit, left = service.config.shutdown_timeout, service.engine.num_in_flight
    _log.warning("shutting down: %d requests in flight, waiting up to %.0f s", left, limit)
    deadline = asyncio.get_running_loop().time() + limit
    while service.engine.num_in_flight and asyncio.get_running_loop().time() < deadline and not signals.hurry.is_set():
        await asyncio.sleep(_POLL_SECONDS)
    if service.engine.num_in_flight:
        _log.warning("%d requests did not finish in time", service.engine.num_in_flight)
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
