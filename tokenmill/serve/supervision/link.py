"""One engine process seen from the server: its start, its sockets, its last message, its end.

A link is used once: a new engine gets a new one with new addresses, so nothing of a dead engine can be taken for the
new one's. Knows nothing of requests; engine_client.py owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import msgspec
import zmq

from tokenmill.config import EngineConfig
from tokenmill.engine import messages
from tokenmill.engine.messages import EngineSpec, Failed, FromEngine, Heartbeat, Pong, ToEngine
from tokenmill.log import get_logger

_log = get_logger(__name__)
_DUMP_SECONDS = 0.5
_RECONNECT_MS = 10  # until the engine process has its addresses
_LOG_LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error"}
ENGINE_COMMAND = (sys.executable, "-m", "tokenmill.engine.process")


class LinkDownError(ConnectionError):
    """The engine cannot be reached."""


async def spawn_engine() -> asyncio.subprocess.Process:
    """An engine process that imports its libraries and then waits for its specification on standard input; it ends
    when that closes."""
    return await asyncio.create_subprocess_exec(
        *ENGINE_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        start_new_session=True,  # a terminal's Ctrl-C is for the server alone
    )


class EngineLink:
    def __init__(self, folder: Path, number: int, deliver: Callable[[FromEngine], None]) -> None:
        self._deliver = deliver
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._addresses = [f"ipc://{folder}/{name}{number}" for name in ("requests", "events", "heartbeats")]
        self._outbox = self._connect(zmq.PUSH, self._addresses[:1])
        try:
            self._inbox = self._connect(zmq.PULL, self._addresses[1:])
        except zmq.ZMQError:
            self._outbox.close(linger=0)
            raise
        self._process: asyncio.subprocess.Process | None = None
        self._pongs: dict[int, asyncio.Future[None]] = {}
        self._num_pings = 0
        self.last_sign = time.monotonic()
        self.heartbeat = Heartbeat()
        self.failure: Failed | None = None  # what the engine said before it ended

    async def launch(
        self,
        path: str,
        config: EngineConfig,
        spare: asyncio.subprocess.Process | None = None,
        step_log: str = "",
        meters: bool = False,
        adapters: dict[str, str] | None = None,
    ) -> None:
        """Have an engine started, in the process `spare` if there is one. `adapters`: paths by name."""
        level = _LOG_LEVELS.get(_log.getEffectiveLevel(), "info")
        requests, events, heartbeats = self._addresses
        spec = EngineSpec(
            path, asdict(config), requests, events, heartbeats, log_level=level, step_log=step_log, meters=meters,
            adapters=adapters or {},
        )  # fmt: skip
        self._process = spare or await spawn_engine()
        self.last_sign = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self._process.stdin.write(msgspec.json.encode(spec) + b"\n")
            await self._process.stdin.drain()
        asyncio.get_running_loop().add_reader(int(self._inbox.getsockopt(zmq.FD)), self._read)
        self._read()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def send(self, message: ToEngine) -> None:
        try:
            self._outbox.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise LinkDownError(f"the engine cannot be reached: {error.strerror}") from None

    async def ping(self, timeout: float) -> bool:
        """Whether the engine's loop, not only its process, answers in time."""
        self._num_pings += 1
        number = self._num_pings
        answer = self._pongs[number] = asyncio.get_running_loop().create_future()
        try:
            self.send(messages.Ping(number))
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 may lose a cancellation
                await answer
            return True
        except (TimeoutError, LinkDownError):
            return False
        finally:
            self._pongs.pop(number, None)

    async def ended(self) -> str:
        """Wait for the process to end; returns how it ended."""
        assert self._process is not None
        code = await self._process.wait()
        self._kill_group()  # children that it could not end itself
        self._read()  # its last messages may still be in the socket
        if self.failure is not None:
            return self.failure.message
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    async def dump_and_kill(self) -> None:
        """Have all stacks printed to standard error, then kill the process."""
        self._signal(signal.SIGUSR1)
        await asyncio.sleep(_DUMP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the process and its children at once."""
        if self._process is not None and self._process.returncode is None:
            self._kill_group()

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own

    async def stop(self, timeout: float) -> None:
        """Ask the process to shut down; kill it after `timeout` seconds."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(LinkDownError):
                self.send(messages.Shutdown())
            try:
                await asyncio.wait_for(self._process.wait(), timeout)
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.close()

    def close(self) -> None:
        if not self._inbox.closed:
            with contextlib.suppress(ValueError, RuntimeError, zmq.ZMQError):
                asyncio.get_running_loop().remove_reader(int(self._inbox.getsockopt(zmq.FD)))
            self._inbox.close(linger=0)
            self._outbox.close(linger=0)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _connect(self, kind: int, addresses: list[str]) -> zmq.Socket[bytes]:
        """The engine binds, not the server: libzmq aborts a process that cannot accept for want of open files, but
        tries again where it cannot connect."""
        socket = self._context.socket(kind)
        try:
            socket.set_hwm(0)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            for address in addresses:
                socket.connect(address)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        return socket

    def _read(self) -> None:
        """Read all pending messages: the descriptor signals new ones only once."""
        while not self._inbox.closed and int(self._inbox.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            try:
                message = messages.decode_from_engine(self._inbox.recv(zmq.NOBLOCK))
            except msgspec.DecodeError:
                _log.exception("unusable message from the engine")
                continue
            self.last_sign = time.monotonic()
            match message:
                case Heartbeat():
                    self.heartbeat = message
                case Pong(number=number):
                    waiting = self._pongs.get(number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(None)
                case Failed():
                    self.failure = message
                case _:
                    try:
                        self._deliver(message)
                    except Exception:  # the messages behind it must still be read
                        _log.exception("cannot handle a message of type %s", type(message).__name__)
