"""The server without a port: the same models, engine processes, keys and routes, behind something else that carries
requests.

A cluster's own proxy listens, and decides when a process starts and ends; what runs here is an ASGI application and the
facts such a manager asks for. Knows nothing of who that is; tokenmill/ray uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from tokenmill.serve.errors import engine_gone
from tokenmill.serve.fleet.catalog import Catalog
from tokenmill.serve.server import CLOSE_SECONDS, ModelOpener, read_keys, reload_keys
from tokenmill.serve.storage import Storage
from tokenmill.serve.supervision.engine import Grouping
from tokenmill.serve.supervision.signals import in_daemon_thread
from tokenmill.serve.supervision.startup import StartupReport
from tokenmill.serve.tenants.key_file import KeyWatch

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from tokenmill.serve.fleet.fleet import Fleet


class EmbeddedServer:
    """Lives in one event loop. `app` is there once `start` has returned."""

    app: ASGIApp

    def __init__(self, catalog: Catalog, grouping: Grouping | None = None) -> None:
        """`grouping`: as `run_server` takes it."""
        self._catalog, self._grouping = catalog, grouping
        self._storage = Storage()
        self._fleet: Fleet | None = None
        self._opener: ModelOpener | None = None
        self._beside: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the models that fit. Raises what keeps the first from being loaded; nothing is left then."""
        from tokenmill.serve.fleet.making import make_fleet, plan_models

        catalog, config = self._catalog, self._catalog.config
        keys = read_keys(config)
        report = StartupReport()
        try:
            report.phase("finding the model")
            hosts, plan = await in_daemon_thread(lambda: plan_models(catalog))
            await self._storage.open(config, hosts[0].name)
            report.phase("starting the engine")
            opener = self._opener = ModelOpener(config, keys, report, self._storage, self._grouping)
            fleet = self._fleet = opener.fleet = make_fleet(catalog, hosts, plan, opener)
            await fleet.start()
            report.phase("")
        except BaseException:
            await self.close()
            raise
        finally:
            report.stop()
        from tokenmill.serve.app import build_app

        service = fleet.default.service
        assert service is not None
        self.app = build_app(service, keys, opener.front, opener.tracing)
        watch = KeyWatch(keys, config.all_keys(), config.api_keys_file)
        keys_task = asyncio.create_task(reload_keys(watch, fleet, config, asyncio.Event()))
        self._beside = [keys_task, *self._storage.start(service)]

    def pressure(self) -> tuple[float, float]:
        """(requests that wait, share of the KV cache that is held): of all models, and of the fullest."""
        services = self._fleet.services if self._fleet is not None else []
        waiting = sum(service.engine.stats.num_waiting for service in services)
        waiting += self._fleet.num_waiting if self._fleet is not None else 0
        return float(waiting), max((service.engine.stats.kv_usage for service in services), default=0.0)

    def check(self) -> None:
        """Raises where only a new process helps: as /livez says it, an engine that is replaced is no such case."""
        if not all(service.engine.supervised for service in (self._fleet.services if self._fleet is not None else [])):
            raise engine_gone("nobody supervises the engine")

    async def close(self) -> None:
        """Whoever carries requests has let them end."""
        for task in self._beside:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        self._beside = []
        fleet, self._fleet = self._fleet, None
        if fleet is not None:
            await fleet.close(CLOSE_SECONDS)
        if self._opener is not None:
            await self._opener.close()
        await self._storage.close(fleet.default.service if fleet is not None else None)
