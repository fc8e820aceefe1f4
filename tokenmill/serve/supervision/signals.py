"""How the server process is told to end, and how it ends for certain: at every moment, within a known time.

The first SIGTERM or Ctrl-C asks, the second does not wait. Threads that cannot be interrupted (a download, an import)
keep nobody from ending: they are daemons, and a last resort ends the process where something hangs after all. Knows
nothing of engines or HTTP; server.py uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_Result = TypeVar("_Result")
_EXIT_SECONDS = 5.0  # beyond what a shutdown may take, until the process is ended the hard way


class StopSignals:
    """Must be made on the running event loop. `shutdown_timeout`: what requests in flight may take to finish."""

    def __init__(self, shutdown_timeout: float) -> None:
        self.told = asyncio.Event()
        self.hurry = asyncio.Event()  # told twice
        self._shutdown_timeout = shutdown_timeout
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.told.is_set():
            self.hurry.set()
            end_within(_EXIT_SECONDS)
        else:
            self.told.set()
            end_within(self._shutdown_timeout + 2 * _EXIT_SECONDS)

    async def unless_told(self, work: Awaitable[_Result]) -> _Result | None:
        """The result of `work`; None, and `work` is cancelled, if a signal comes first."""
        working = asyncio.ensure_future(work)
        waiting = asyncio.ensure_future(self.told.wait())
        try:
            await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
        finally:
            waiting.cancel()
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await working
        return None


def in_daemon_thread(work: Callable[[], _Result]) -> asyncio.Future[_Result]:
    """The result of blocking work, in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Result] = loop.create_future()

    def deliver(value: _Result | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = work()
        except BaseException as failure:
            error = failure
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits for it any more
            loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="blocking-work", daemon=True).start()
    return outcome


def end_within(seconds: float) -> None:
    """End the process with exit code 0 if it still exists after this time: it was told to, and something hangs."""

    def end() -> None:
        time.sleep(seconds)
        sys.stderr.write(f"not ended after {seconds:.0f} s: ending the process\n")
        sys.stderr.flush()
        os._exit(0)

    threading.Thread(target=end, name="end-within", daemon=True).start()
