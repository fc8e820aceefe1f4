"""llama.cpp (or another peer) in a process of its own, stopped while the other side is measured.

Its threads keep spinning for a while after their work, and it assumes that nobody else configures the AMX tiles of its
threads. The process is a new interpreter that runs this file and imports nothing but the peer: with numpy or tokenmill
loaded first, llama.cpp was seen to crash on x86 where it had been built with another compiler than they were. Used by
cpu_vs_llamacpp.py, cpu_vs_onnx.py, cpu_vs_vllm.py, cpu_experts.py, cpu_shapes.py and gguf_low_bit.py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any


class PeerEnded(SystemExit):
    """The peer's process is gone. Uncaught, it ends the program with its message."""


class PeerProcess:
    """The methods of llamacpp_peer.Peer that measure; `module` is another one in this folder with a `Peer`."""

    def __init__(self, path: Path, threads: int, module: str = "llamacpp_peer", python: str = sys.executable) -> None:
        self._pipe, theirs = Pipe()
        self._name = f"{module} with {path.name}"
        command = [python, __file__, str(theirs.fileno()), str(path), str(threads), module]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
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
        self._process.wait()

    def _ask(self, *request: Any) -> Any:
        try:
            self._signal(signal.SIGCONT)
            self._pipe.send(request)
        except (ProcessLookupError, ConnectionError):
            raise self._ended() from None
        return self._answer()

    def _ended(self) -> PeerEnded:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        code = self._process.returncode
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
        os.kill(self._process.pid, number)


def _serve(pipe: Connection, path: Path, threads: int, module: str) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never left behind as a stopped process
    peers = importlib.import_module(f"benchmarks.peers.{module}")  # only this process needs the library
    peer = peers.Peer(path, threads)
    pipe.send(peer.vocab_size)
    while True:
        name, *arguments = pipe.recv()
        pipe.send(getattr(peer, name)(*arguments))
        if name == "close":
            return


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])  # instead of this folder
    _serve(Connection(int(sys.argv[1])), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
