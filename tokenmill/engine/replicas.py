"""More engines of the same model beside the one of an `LLM`, as processes: each takes its part of a batch.

A batch is known whole, so it is divided at once: ordered by tokens, so that prompts with a common beginning stay
together, and cut where the tokens are even. A process that dies or freezes is replaced, and its part computed by the
engine that is left: requests carry their seeds, so every engine gives the same tokens. Used by llm.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tokenmill.config import EngineConfig
from tokenmill.engine.messages import Submit
from tokenmill.engine.outputs import RequestOutput
from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.types import Request

_log = get_logger(__name__)
_END_SECONDS = 5.0
PULSE_SECONDS = 1.0  # between signs of life of a process that is at work
SILENCE_SECONDS = 10.0  # without one: it is stuck
Part = list[tuple[Request, str | None]]  # with the text of its prompt, where that was text


def divided(requests: Sequence[Request], parts: int) -> list[list[int]]:
    """Numbers of requests for each engine: neighbours share prefixes, parts have about as many tokens."""
    order = sorted(range(len(requests)), key=lambda number: requests[number].prompt_ids)
    costs = [len(each.prompt_ids) + each.params.n * each.params.max_tokens for each in requests]
    found: list[list[int]] = [[] for _ in range(parts)]
    share, taken = sum(costs) / parts, 0.0
    for number in order:
        found[min(parts - 1, int((taken + costs[number] / 2) / share))].append(number)
        taken += costs[number]
    return found


class Replica:
    """One more engine process."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self._path, self._config = path, config
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Connection | None = None
        self._adapters: dict[str, str] = {}
        self._start()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tokenmill.engine.replica", str(theirs.fileno())]
        self._process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        theirs.close()
        self._line = Connection(ours.detach())
        spec = {"path": str(self._path), "config": asdict(self._config), "parent": os.getpid()}
        self._line.send_bytes(json.dumps(spec).encode())
        for name, path in self._adapters.items():
            self._line.send(("load", name, path, True))

    def load(self, name: str, path: str) -> None:
        """What the engine beside has loaded: nothing that could be refused."""
        self._adapters[name] = path
        self._tell(("load", name, path, True))

    def unload(self, name: str) -> None:
        self._adapters.pop(name, None)
        self._tell(("unload", name))

    def submit(self, part: Part) -> None:
        self._tell(("run", [(Submit.of(request), text) for request, text in part]))

    def collect(self) -> list[RequestOutput] | None:
        """The answers of what was submitted; None if the process has ended or gives no sign of life: another is
        started."""
        assert self._line is not None
        assert self._process is not None
        answer: Any = None
        try:
            while answer is None:
                if not self._is_heard():
                    self._process.kill()
                    raise EOFError
                answer = self._line.recv()  # None: it is at work
        except (EOFError, OSError):
            _log.error("engine process %d has ended or is stuck; its requests are computed again", self._process.pid)
            self.close()
            self._start()
            return None
        if isinstance(answer, UserError):
            raise answer
        return list(answer)

    def _is_heard(self) -> bool:
        """Twice, because this process may have been frozen with it and look before the other has woken up."""
        assert self._line is not None
        return self._line.poll(SILENCE_SECONDS / 2) or self._line.poll(SILENCE_SECONDS / 2)

    def _tell(self, message: tuple[Any, ...]) -> None:
        assert self._line is not None
        try:
            self._line.send(message)
        except OSError:  # it has ended: `collect` sees that
            return

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        if self._process is not None:
            try:
                self._process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._line = None


class Replicas:
    def __init__(self, path: Path, config: EngineConfig, resolved: EngineConfig) -> None:
        """`config`: as it was asked for; `resolved`: of the engine beside, which the others are like."""
        count = config.data_parallel_size - 1
        alike = replace(config, threads=resolved.threads, memory=resolved.memory, data_parallel_size=1)
        if config.kv_listen or config.kv_disk:
            raise UserError("engines that share requests have no --kv-listen or --kv-disk of their own", "leave it out")
        self.others = [Replica(path, alike) for _ in range(count)]

    def close(self) -> None:
        for each in self.others:
            each.close()
