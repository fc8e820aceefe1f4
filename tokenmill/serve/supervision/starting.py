"""Waits for an engine process that starts. Called by the engine client."""

from __future__ import annotations

import asyncio

from tokenmill.engine.messages import Ready
from tokenmill.errors import UserError
from tokenmill.serve.supervision.link import EngineLink
from tokenmill.serve.supervision.watchdog import Watchdog

WATCH_SECONDS = 0.25
_START_SILENCE = 120.0  # without messages, while the process imports its libraries from a cold disk


async def until_ready(link: EngineLink, ready: asyncio.Future[Ready], watchdog: Watchdog) -> Ready:
    """Wait for an engine that starts; raises what keeps it from that. One that is stuck is killed."""
    watchdog.start()
    hang = None
    ended = asyncio.ensure_future(link.ended())
    try:
        while not ready.done() and not ended.done():
            await asyncio.wait((ready, ended), timeout=WATCH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            hang = watchdog.look(link, _START_SILENCE)
            if hang is not None:
                await link.dump_and_kill()
                await ended
        if ready.done():
            return ready.result()
        if link.failure is not None and link.failure.user_error:
            raise UserError(link.failure.message)
        raise RuntimeError(f"the engine process ended while starting: {hang or ended.result()}")
    finally:
        ended.cancel()
