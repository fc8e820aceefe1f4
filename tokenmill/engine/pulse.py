"""Heartbeats of an engine process, from a thread beside its loop: a hang is seen from outside. Knows no requests."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading

import zmq

from tokenmill.engine import messages
from tokenmill.engine.activity import Activity
from tokenmill.engine.loop import EngineLoop
from tokenmill.engine.messages import EngineSpec, Heartbeat
from tokenmill.engine.usage_watch import UsageWatch


class Pulse:
    """Sends a heartbeat at regular intervals from its own thread, and ends the process when the server is gone."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], spec: EngineSpec, activity: Activity) -> None:
        self.loop: EngineLoop | None = None  # once there is one: its steps are counted
        self.usage: UsageWatch | None = None  # the same
        self._context = context
        self._spec = spec
        self._activity = activity
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def _beat(self) -> None:
        socket = bind_socket(self._context, zmq.PUSH, self._spec.heartbeats)
        while True:
            loop = self.loop
            num_steps = loop.core.stats.num_steps if loop is not None else 0
            usage = self.usage.read() if self.usage is not None else (0, [])
            with contextlib.suppress(zmq.Again):  # nobody is connected: the server comes, or is gone
                socket.send(messages.encode(Heartbeat(*self._activity.read(), num_steps, *usage)), zmq.NOBLOCK)
            readable, _, _ = select.select([sys.stdin], [], [], self._spec.heartbeat_seconds)
            if readable and not os.read(sys.stdin.fileno(), 1):
                os._exit(0)  # the server has ended: nobody waits for an answer


def bind_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.set_hwm(0)  # never drop, never block a step: the server reads or is gone
    socket.bind(address)
    return socket
