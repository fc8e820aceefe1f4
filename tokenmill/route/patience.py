"""How long a stream that has begun may wait for its next token.

Only time spent waiting for the replica counts: a caller that reads slowly takes none of it. What the replica sends
besides tokens, such as pings, does not renew it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class StalledError(Exception):
    """No token came in time."""


class Patience:
    def __init__(self, seconds: float, begun: bool) -> None:
        """`seconds`: 0 for ever. `begun`: whether there are tokens already; before the first nothing is limited."""
        self._seconds = seconds or None
        self._left = self._seconds if begun else None

    def renew(self) -> None:
        """A token came."""
        self._left = self._seconds

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Around what waits for the replica."""
        clock = asyncio.get_running_loop().time
        began = clock()
        scope = asyncio.timeout(self._left)
        try:
            async with scope:
                yield
        except TimeoutError:
            if scope.expired():
                raise StalledError from None
            raise
        if self._left is not None:
            self._left = max(0.0, self._left - (clock() - began))
