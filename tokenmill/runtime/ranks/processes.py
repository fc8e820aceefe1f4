"""The other ranks as processes of this host: started with the engine, watched, and ended with it.

Each gets a socket to rank 0, on which its part of the work is told, and a file to meet the others at (gloo). A rank
that ends or does not come to an exchange ends the engine with the reason, within `rank_timeout` seconds: its supervisor
starts all of them anew. Ranks whose rank 0 is gone are killed by the kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from tokenmill.config import ResolvedConfig
from tokenmill.hardware.sharding import Grid
from tokenmill.log import get_logger
from tokenmill.model.group import RankError
from tokenmill.runtime.ranks.groups import make_group, shared_memory
from tokenmill.runtime.ranks.seat import Crew, Link, Seat
from tokenmill.runtime.ranks.shared import SharedGroup
from tokenmill.runtime.ranks.wire import Broken, Names, Numbers, decode

_log = get_logger(__name__)
_STOP_SECONDS = 2.0  # for ranks to end by themselves
_LOOK_SECONDS = 0.5  # between looks at the processes while one of them is waited for
_ENDING_SECONDS = 0.5  # until a process whose connection broke is seen to have ended
_WATCH_SECONDS = 0.1
_STOPPED = ("T", "t")  # states of processes


class SocketLink(Link):
    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)

    def send(self, frame: bytes) -> None:
        self._connection.send_bytes(frame)

    def receive(self, timeout: float | None = None) -> bytes:
        if timeout is not None and not self._connection.poll(timeout):
            raise EOFError
        return self._connection.recv_bytes()

    def has_news(self, seconds: float) -> bool:
        """Whether a frame, or the end of the line, comes within this time."""
        return self._connection.poll(seconds)

    def waiting(self) -> bytes | None:
        """A frame that has come, if there is one."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(0) else None
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self._connection.close()


class ProcessCrew(Crew):
    def __init__(self, model: Path, config: ResolvedConfig, grid: Grid) -> None:
        self._folder = tempfile.mkdtemp(prefix="tokenmill-ranks-")
        meeting = os.path.join(self._folder, "meeting")
        memory = shared_memory(grid, config.device)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[SocketLink] = []
        self._failed: RankError | None = None
        self._stopped = False
        for rank in range(1, grid.size):
            ours, theirs = socket.socketpair()
            limit = struct.pack("ll", int(config.rank_timeout), int(config.rank_timeout % 1 * 1e6))
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)  # to a rank that no longer reads
            spec = {"model": str(model), "config": asdict(config), "grid": asdict(grid), "rank": rank}
            process = subprocess.Popen(
                [sys.executable, "-m", "tokenmill.runtime.ranks.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
            )
            theirs.close()
            line = SocketLink(ours.detach())
            line.send(json.dumps({**spec, "meeting": meeting, "memory": memory, "parent": os.getpid()}).encode())
            self._processes.append(process)
            self._lines.append(line)
        super().__init__(self._lines, config.rank_timeout)
        try:
            for rank in range(1, grid.size):  # importing takes seconds, which are not part of any exchange
                self.hear(rank)
            self._group = make_group(grid.place(0), meeting, config.rank_timeout, config.device, memory)
        except RankError as error:
            raise self.failure(error) from None
        finally:
            if memory:  # all have mapped it by now, or nobody needs it
                os.unlink(memory)
        self.seat = Seat(grid.place(0), self._group, config.exact_ranks, crew=self)
        threading.Thread(target=self._watch, name="rank-watch", daemon=True).start()
        _log.info("%d ranks: processes %s", grid.size, ", ".join(str(each.pid) for each in self._processes))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def _watch(self) -> None:
        """Of ranks that wait for each other in shared memory none would notice that another has ended."""
        while self._failed is None and not self._stopped:
            if any(process.poll() is not None for process in self._processes) and isinstance(self._group, SharedGroup):
                self._group.abort()
                return
            time.sleep(_WATCH_SECONDS)

    def hear(self, rank: int, timeout: float | None = None) -> Numbers | Names:
        """Without a timeout, as while parts are loaded: for as long as all ranks are alive and none is stopped."""
        began = time.monotonic()
        while timeout is None and not self._lines[rank - 1].has_news(_LOOK_SECONDS):
            self.check()
            if not any(_state(pid) in _STOPPED for pid in self.pids):
                began = time.monotonic()
            elif time.monotonic() - began > (self._timeout or 0.0):
                raise self.failure(RankError("a rank does not run"))
        return super().hear(rank, timeout)

    def check(self) -> None:
        if any(process.poll() is not None for process in self._processes):
            raise self.failure(RankError("a rank has ended"))

    def failure(self, error: RankError) -> RankError:
        if self._failed is not None:
            return self._failed
        reasons = [self._reason(rank) for rank in range(1, len(self._processes) + 1)]
        first = sorted((each for each in reasons if each is not None), key=lambda each: each[0])
        self._failed = RankError(f"{first[0][1]} ({error})" if first else str(error))
        self._kill()
        return self._failed

    def _reason(self, rank: int) -> tuple[int, str] | None:
        """Why this rank stopped, if it did; the smaller number says more about what was at fault."""
        process = self._processes[rank - 1]
        named = f"rank {rank} (process {process.pid})"
        while (frame := self._lines[rank - 1].waiting()) is not None:
            message = decode(frame)
            if isinstance(message, Broken):
                return (3 if message.follows else 1), f"{named}: {message.reason}"
        try:
            code = process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return (2, f"{named} is stopped") if _state(process.pid) in _STOPPED else None
        if code < 0:
            return 0, f"{named} was killed by {signal.Signals(-code).name}"
        return 4, f"{named} ended with code {code}"

    def stop(self) -> None:
        self._stopped = True
        if self._failed is None:
            super().stop()
            for process in self._processes:
                try:
                    process.wait(_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()  # also where it is stopped
            process.wait()
        for line in self._lines:
            line.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _state(pid: int) -> str:
    """The letter of a process's state, as R, S or T (stopped); empty if it cannot be read."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
