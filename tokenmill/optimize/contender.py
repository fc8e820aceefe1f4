"""A child process that builds, times or judges candidates, and the limits it works under: time and memory.

One command at a time (contender_messages.py). A child that crashes, does not answer in time or takes more memory than
it may is killed, and the reason is raised in one line; the parent and the other children go on. While it is not asked
anything, a child waits for its pipe and uses no processor time. Called by the laboratory.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn, TypeVar

from tokenmill.errors import UserError
from tokenmill.optimize.artefacts import NotEnoughTimeError
from tokenmill.optimize.contender_messages import (
    Command,
    Failure,
    Ready,
    decode_answer,
    encode_begin,
    encode_command,
)

T = TypeVar("T")
START_SECONDS = 120.0  # for the interpreter and its packages, from a slow disk on a busy machine
_WATCH_SECONDS = 0.05  # between two looks at a child's memory
_CLOSE_SECONDS = 5.0
_GIB = 1 << 30


class ContenderError(UserError):
    """A candidate failed: its engine, its process, or a limit that it broke. `candidate`: whose, "" if of none."""

    candidate: str = ""


class NoAnswerError(ContenderError):
    """The child did not answer in time."""


class Contender:
    """The parent's side of one child. `memory_limit`: bytes of its own memory, 0: none."""

    def __init__(self, log: Path | None = None, memory_limit: int = 0) -> None:
        self.memory_limit = memory_limit
        self.alive = True
        self._is_ready = False
        self._buffer = b""
        with contextlib.ExitStack() as stack:
            sink = stack.enter_context(open(log, "ab")) if log else subprocess.DEVNULL
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill.optimize.contender_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                start_new_session=True,  # Ctrl-C is for the parent; what the child starts is killed with it
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._send(encode_begin())

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, command: Command, answer: type[T], seconds: float, doing: str) -> T:
        """Raises ContenderError with the reason in one line. The child is killed, unless it refused by itself."""
        self.wait_ready()
        try:
            self._send(encode_command(command, seconds))
            found = decode_answer(self._receive(seconds, doing), answer)
        except BaseException:
            self.kill()  # also at Ctrl-C: a child in the middle of a command cannot be asked again
            raise
        if isinstance(found, Failure):
            if found.kind == "error":
                self.kill()  # nobody knows what it left behind
            raise NotEnoughTimeError(found.text) if found.kind == "time" else ContenderError(found.text)
        return found

    def wait_ready(self) -> None:
        """Children are started without waiting for them: several can start at the same time."""
        if not self._is_ready:
            decode_answer(self._receive(START_SECONDS, "starting"), Ready)
            self._is_ready = True

    def is_running(self) -> bool:
        return self.alive and self._process.poll() is None

    def memory_bytes(self) -> int:
        return private_bytes(self.pid)

    def close(self) -> None:
        """The child ends when its pipe closes."""
        with contextlib.suppress(OSError):
            self._input.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
        self._output.close()
        self.alive = False

    def kill(self) -> None:
        self.alive = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()

    def _send(self, line: bytes) -> None:
        try:
            self._input.write(line)
            self._input.flush()
        except OSError:  # it has ended: the answer that does not come says why
            pass

    def _receive(self, seconds: float, doing: str) -> bytes:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0:
                self._stop(NoAnswerError(f"no answer in {seconds:.3g} s while {doing}"))
            readable, _, _ = select.select([self._output], [], [], min(left, _WATCH_SECONDS))
            if readable:
                piece = os.read(self._output.fileno(), 1 << 20)
                if not piece:
                    self._stop(ContenderError(f"{self._end_in_words()} while {doing}"))
                self._buffer += piece
            self._watch_memory(doing)
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _watch_memory(self, doing: str) -> None:
        if self.memory_limit and (taken := self.memory_bytes()) > self.memory_limit:
            limit = self.memory_limit / _GIB
            self._stop(ContenderError(f"took {taken / _GIB:.1f} GiB of {limit:.1f} GiB while {doing}"))

    def _end_in_words(self) -> str:
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code >= 0:
            return f"ended with exit status {code}"
        return f"killed by signal {-code}" + (" (out of memory?)" if -code == signal.SIGKILL else "")

    def _stop(self, error: ContenderError) -> NoReturn:
        self.kill()
        raise error


def private_bytes(pid: int) -> int:
    """Memory of a process that is its own: without pages of mapped files, which the kernel can drop. 0 where the system
    does not say."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            sizes = dict(line.split(":", 1) for line in file if line.startswith(("RssAnon", "RssShmem")))
        return sum(int(size.split()[0]) * 1024 for size in sizes.values())
    except (OSError, ValueError):
        return 0
