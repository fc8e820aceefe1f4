"""Turns at the event loop: of each key, one request at a time is parsed and prepared.

The loop runs what is ready in order of arrival. Without turns, a hundred requests of one key that arrive together are a
hundred pieces of work before the next token or request of another key; with them it is one. A request holds its turn
until it first waits for something. While other keys send requests too, a crowd of one key also rests between its turns:
on a small machine the processor that it leaves is the engine's. Knows nothing of requests; reading.py takes the turns.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from tokenmill.serve.tenants.keys import Client

_REST = 3.0  # times what a turn took: one key has a quarter of this process
_MAX_REST = 0.05  # seconds: a process that was paused owes nothing
_PRESENT_SECONDS = 1.0  # since its last turn a key counts as one that sends requests


class Turns:
    def __init__(self) -> None:
        self._waiting: dict[Client, deque[asyncio.Future[None]]] = {}  # a client is here while a turn of it is taken
        self._present: dict[Client, float] = {}  # when each last had a turn, the latest at the end

    async def take(self, client: Client) -> None:
        """Wait for the turn; it ends when the caller next gives way to the loop."""
        loop = asyncio.get_running_loop()
        queue = self._waiting.get(client)
        if queue is None:
            self._waiting[client] = deque()
        else:
            turn: asyncio.Future[None] = loop.create_future()
            queue.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on(client)  # it was given the turn and does not use it
                raise
        began = time.monotonic()  # uvloop's own clock stands still within a turn of the loop
        self._note(client, began)
        loop.call_soon(self._end, client, began)

    def _note(self, client: Client, now: float) -> None:
        self._present.pop(client, None)
        self._present[client] = now
        while now - next(iter(self._present.values())) > _PRESENT_SECONDS:
            del self._present[next(iter(self._present))]

    def _end(self, client: Client, began: float) -> None:
        """Of a turn. Its time includes what the loop did beside it: the busier the loop, the longer the rest."""
        if self._waiting[client] and len(self._present) > 1:
            rest = min(_MAX_REST, _REST * (time.monotonic() - began))
            asyncio.get_running_loop().call_later(rest, self._pass_on, client)
        else:
            self._pass_on(client)

    def _pass_on(self, client: Client) -> None:
        queue = self._waiting[client]
        while queue:
            turn = queue.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        del self._waiting[client]
