"""One more engine of an `LLM`, as a process: `python -m tokenmill.engine.replica DESCRIPTOR`, started by replicas.py.

Talks to its own parent only, over a socket that it inherited: objects travel pickled. While it loads or computes, a
thread beside it sends None at regular intervals: a parent that hears nothing takes it for frozen.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.engine.replicas import PULSE_SECONDS
from tokenmill.errors import UserError
from tokenmill.runtime.ranks.process import die_with


class Line:
    """The socket to the parent, with a pulse while there is work."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._at_work = threading.Event()
        self._at_work.set()
        threading.Thread(target=self._beat, name="pulse", daemon=True).start()

    def recv(self) -> tuple[Any, ...]:
        self._at_work.clear()
        message: tuple[Any, ...] = self._connection.recv()
        self._at_work.set()
        return message

    def send(self, answer: Any) -> None:
        with self._lock:
            self._connection.send(answer)

    def _beat(self) -> None:
        while True:
            self._at_work.wait()
            try:
                self.send(None)
            except OSError:
                return  # the parent is gone, and this process with it
            time.sleep(PULSE_SECONDS)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    spec = json.loads(connection.recv_bytes())
    die_with(spec["parent"])
    line = Line(connection)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the parent's to handle
    with LLM(spec["path"], EngineConfig(**spec["config"])) as llm:
        while True:
            try:
                message = line.recv()
            except (EOFError, OSError):
                return
            _handle(llm, message, line)


def _handle(llm: LLM, message: tuple[Any, ...], line: Line) -> None:
    match message:
        case ("load", name, path, replaces):
            llm.load_lora(name, path, replaces)
        case ("unload", name):
            llm.unload_lora(name)
        case ("run", part):
            requests = [submit.request() for submit, _ in part]
            for (submit, _), request in zip(part, requests, strict=True):
                request.adapter = llm.parts.adapters.find(submit.adapter) if submit.adapter else None
            try:
                answer: Any = llm.compute(requests, [text for _, text in part])
            except UserError as error:
                answer = error
            line.send(answer)


if __name__ == "__main__":
    main()
    os._exit(0)
