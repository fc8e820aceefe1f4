"""Turns at the event loop: of each key, one request at a time is parsed and prepared.

The loop runs what is ready in order of arrival. Without turns, a hundred requests of one key that arrive together are a
hundred pieces of work before the next token or request of another key; with them it is one. A request holds its turn
until it first waits for something. Knows nothing of requests; reading.py takes the turns.
"""

from __future__ import annotations

import asyncio
from collections import deque

from tokenmill.serve.tenants.keys import Client


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[Client, deque[asyncio.Future[None]]] = {}  # a client is here while a turn of it is taken

    async def take(self, client: Client) -> None:
        """Wait for the turn; it ends when the caller next gives way to the loop."""
        queue = self._waiting.get(client)
        if queue is None:
            self._waiting[client] = deque()
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._next(client)  # it was given the turn and does not use it
                raise
        asyncio.get_running_loop().call_soon(self._next, client)

    def _next(self, client: Client) -> None:
        queue = self._waiting[client]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[client]
