"""The answers of a batch as they come: one line each, appended. What is in it is never asked for again.

A kill can tear the last line only; the next start cuts it off, and that request is answered again. Lines are those of
the output file (lines.py), keyed by `custom_id`. Blocking; knows neither batches nor engines.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tokenmill.serve.batches.lines import ID_PREFIX
from tokenmill.serve.files.disk import write_all

_SYNC_SECONDS = 1.0  # a power failure may cost the answers of this time; a kill costs none
_TORN_START = b'{"id":"' + ID_PREFIX.encode()


class _Response(msgspec.Struct):
    status_code: int


class Entry(msgspec.Struct):
    """What is remembered of an answer."""

    id: str
    custom_id: str
    response: _Response | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class JournalError(Exception):
    """A line that is no answer of ours. `line` counts from 1."""

    def __init__(self, line: int) -> None:
        super().__init__(f"line {line} is not the answer to a request")
        self.line = line


_decode = msgspec.json.Decoder(Entry).decode


class Journal:
    def __init__(self, path: Path) -> None:
        """Open or create it. Raises JournalError, and changes nothing, if the file holds anything else."""
        self.path = path
        self.ids: dict[str, str] = {}  # custom_id -> id of the answer
        self.num_succeeded = self.num_failed = 0
        self.num_bytes = 0
        self._lock = threading.Lock()  # answers come from several threads
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: another process writes to it
            self._read()
        except BaseException:
            os.close(self._fd)
            raise
        self._synced = time.monotonic()

    def append(self, custom_id: str, line: bytes) -> bool:
        """Keep an answer; False if there is one already, or the journal is closed. A write that fails leaves the
        journal as it was."""
        with self._lock:
            if custom_id in self.ids or self._fd < 0:
                return False
            try:
                write_all(self._fd, line)
            except OSError:
                os.ftruncate(self._fd, self.num_bytes)
                raise
            self._note(line)
            if time.monotonic() - self._synced > _SYNC_SECONDS:
                self.sync()
            return True

    def sync(self) -> None:
        os.fsync(self._fd)
        self._synced = time.monotonic()

    def lines(self) -> Iterator[tuple[Entry, bytes]]:
        with open(self.path, "rb") as file:
            for line in file:
                yield _decode(line), line

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _read(self) -> None:
        torn = b""
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    torn = line
                    if not _is_torn_answer(line):
                        raise JournalError(number)
                    break
                try:
                    self._note(line)
                except (ValueError, RecursionError):
                    raise JournalError(number) from None
        if torn:
            os.ftruncate(self._fd, self.num_bytes)

    def _note(self, line: bytes) -> None:
        entry = _decode(line)
        self.num_bytes += len(line)
        self.ids[entry.custom_id] = entry.id
        if entry.succeeded:
            self.num_succeeded += 1
        else:
            self.num_failed += 1


def _is_torn_answer(line: bytes) -> bool:
    """Whether it is the beginning of a line that we write; anything else is not ours to cut."""
    start = line[: len(_TORN_START)]
    return _TORN_START.startswith(start) or not line.strip(b"\0")  # zeros: what a power failure leaves
