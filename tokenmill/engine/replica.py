"""One more engine of an `LLM`, as a process: `python -m tokenmill.engine.replica DESCRIPTOR`, started by replicas.py.

Talks to its own parent only, over a socket that it inherited: objects travel pickled.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.llm import LLM
from tokenmill.errors import UserError
from tokenmill.runtime.ranks.process import die_with


def main() -> None:
    line = Connection(int(sys.argv[1]))
    spec = json.loads(line.recv_bytes())
    die_with(spec["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's interrupt is the parent's to handle
    with LLM(spec["path"], EngineConfig(**spec["config"])) as llm:
        while True:
            try:
                message: tuple[Any, ...] = line.recv()
            except (EOFError, OSError):
                return
            _handle(llm, message, line)


def _handle(llm: LLM, message: tuple[Any, ...], line: Connection) -> None:
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
