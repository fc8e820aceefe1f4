"""llama.cpp (or another peer) in a process of its own, stopped while the other side is measured.

Its threads keep spinning for a while after their work, and it assumes that nobody else configures the AMX tiles of its
threads. Used by cpu_vs_llamacpp.py, cpu_experts.py and cpu_shapes.py.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class PeerEnded(SystemExit):
    """The peer's process is gone. Uncaught, it ends the program with its message."""


class PeerProcess:
    """The methods of llamacpp_peer.Peer that measure; `module` is another one in this folder with a `Peer`."""

    def __init__(self, path: Path, threads: int, module: str = "llamacpp_peer") -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._name = f"{module} with {path.name}"
        self._process = context.Process(target=_serve, args=(theirs, path, threads, module), daemon=True)
        self._process.start()
        atexit.register(self._process.kill)  # a stopped process receives no milder signal
        theirs.close()
        self.vocab_size: int = self._answer()

    def prefill(self, tokens: Sequence[int]) -> float:
        return float(self._ask("prefill", tokens))

    def decode(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        return float(self._ask("decode", prompts, steps))

    def use_threads(self, threads: int) -> None:
        self._ask("use_threads", threads)

    def hold(self, prompt: Sequence[int], count: int, steps: int) -> None:
        self._ask("hold", prompt, count, steps)

    def decode_held(self, steps: int) -> float:
        return float(self._ask("decode_held", steps))

    def serve(self, prefix: Sequence[int], tails: Sequence[Sequence[int]], output: int, slots: int) -> float:
        return float(self._ask("serve", prefix, tails, output, slots))

    def close(self) -> None:
        self._ask("close")
        self._signal(signal.SIGCONT)
        self._process.join()

    def _ask(self, *request: Any) -> Any:
        try:
            self._signal(signal.SIGCONT)
            self._pipe.send(request)
        except (ProcessLookupError, ConnectionError):
            raise self._ended() from None
        return self._answer()

    def _ended(self) -> PeerEnded:
        self._process.join(10)
        code = self._process.exitcode
        if code is not None and code < 0:  # nothing was printed then
            return PeerEnded(f"{self._name}: ended by {signal.Signals(-code).name}")
        return PeerEnded(f"{self._name}: ended with status {code}; its own message is above")

    def _answer(self) -> Any:
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None
        self._signal(signal.SIGSTOP)
        return answer

    def _signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def _serve(pipe: Connection, path: Path, threads: int, module: str) -> None:
    peers = importlib.import_module(f"benchmarks.peers.{module}")  # only this process needs the library

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never left behind as a stopped process
    peer = peers.Peer(path, threads)
    pipe.send(peer.vocab_size)
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(peer, name)(*arguments))
        if name == "close":
            return
