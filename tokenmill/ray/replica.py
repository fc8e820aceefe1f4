"""One replica on Ray Serve: the server without a port, with its engine process, as an actor.

Ray decides when it starts and ends: it asks for health and load, and lets running requests end before it closes the
replica. An engine that dies within it is replaced by our own supervisor, which is faster than a new actor.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from starlette.types import Message

from tokenmill.log import configure
from tokenmill.ray.calls import Call, answered
from tokenmill.ray.policy import KV_USE, WAITING
from tokenmill.ray.settings import RaySettings
from tokenmill.route.engine_group import EngineGroup
from tokenmill.serve.embedded import EmbeddedServer


class Replica:
    async def __init__(self, settings: RaySettings) -> None:  # type: ignore[misc]  # Ray awaits it
        configure("info")
        self._server = EmbeddedServer(settings.catalog(), EngineGroup)
        await self._server.start()

    async def answer(self, call: Call) -> AsyncIterator[list[Message]]:
        pieces = answered(self._server.app, call)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()  # type: ignore[attr-defined]

    # --- what Ray Serve asks ---

    async def record_autoscaling_stats(self) -> dict[str, Any]:
        waiting, kv_use = self._server.pressure()
        return {WAITING: waiting, KV_USE: kv_use}

    async def check_health(self) -> None:
        self._server.check()

    async def __del__(self) -> None:
        """Called by Ray, once, when no request is left."""
        if hasattr(self, "_server"):
            await self._server.close()
