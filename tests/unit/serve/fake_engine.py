"""An engine process without a model, for tests of the server's side: speaks the messages and behaves as a file says.

The "model" of its EngineSpec is that file, read once at the start: ready, refuse, crash, hang, silent,
parent (ready, with a child process whose id it writes next to that file), sleepless (cannot sleep), restless (ends when
it should wake).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import zmq

from tokenmill.engine import messages
from tokenmill.engine.activity import IDLE
from tokenmill.engine.messages import (
    EngineSpec,
    Events,
    Failed,
    FromEngine,
    Heartbeat,
    Ping,
    Pong,
    Ready,
    Refused,
    Rest,
    Rested,
    Shutdown,
    Submit,
)
from tokenmill.engine.stats import EngineStats
from tokenmill.types import TokenEvent


def main() -> None:
    line = sys.stdin.readline()
    if not line:
        return
    spec = msgspec.json.decode(line, type=EngineSpec)
    behaviour = Path(spec.path).read_text()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox, inbox, heartbeats = context.socket(zmq.PUSH), context.socket(zmq.PULL), context.socket(zmq.PUSH)
    heartbeats.bind(spec.heartbeats)
    inbox.bind(spec.inbox)
    outbox.bind(spec.outbox)

    def send(message: FromEngine) -> None:
        outbox.send(messages.encode(message))

    def beat(message: Heartbeat) -> None:
        with contextlib.suppress(zmq.Again):
            heartbeats.send(messages.encode(message), zmq.NOBLOCK)

    if behaviour == "crash":
        sys.exit(3)
    if behaviour == "refuse":
        send(Failed("the file is gone. put it back.", user_error=True))
        inbox.close()
        heartbeats.close(linger=0)
        outbox.close(linger=1000)
        context.term()
        return
    if behaviour == "parent":
        child = subprocess.Popen(["sleep", "600"])
        Path(f"{spec.path}.child").write_text(str(child.pid))
    began = time.monotonic()
    if behaviour != "silent":
        send(Ready(10, [0], {}, "none", "none", "none", 0, 0.0))
    while behaviour == "silent" or not _handle(inbox, send, behaviour):
        if behaviour == "hang":
            beat(Heartbeat("taking grammars", time.monotonic() - began))
        elif behaviour != "silent":
            beat(Heartbeat(IDLE, 0.0))
        inbox.poll(50)


def _handle(inbox: zmq.Socket[bytes], send: object, behaviour: str) -> bool:
    assert callable(send)
    while inbox.poll(0):
        match messages.decode_to_engine(inbox.recv()):
            case Shutdown():
                return True
            case Ping(number=number):
                send(Pong(number))
            case Rest(asleep=False) if behaviour == "restless":
                sys.exit(4)
            case Rest(asleep=asleep):
                send(Rested(False, problem="no disk") if behaviour == "sleepless" else Rested(asleep, 5 * asleep))
            case Submit(request_id=request_id, deadline=float()):
                send(Refused(request_id, "too late", "deadline"))
            case Submit(request_id=request_id):
                send(Events([TokenEvent(request_id, token_ids=[1], finish_reason="length")], EngineStats()))
    return False


if __name__ == "__main__":
    main()
