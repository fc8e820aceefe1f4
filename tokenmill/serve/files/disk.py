"""Writing that survives a kill at any moment: a file is there as a whole or not at all.

Everything that files/ and batches/ write goes through here or through the journal. Blocking: callers use threads.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

PART = ".part"  # suffix of a file that is being written; the next start deletes it


def write_whole(path: Path, chunks: Iterable[bytes]) -> int:
    """Write a file under a name of its own, then give it `path` at once. Returns its size."""
    part = path.with_name(path.name + PART)
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    size = 0
    try:
        for chunk in chunks:
            write_all(fd, chunk)
            size += len(chunk)
        os.fsync(fd)
    except OSError:
        remove(part)  # on a full disk it would be in its own way
        raise
    finally:
        os.close(fd)
    publish(part, path)
    return size


def publish(part: Path, path: Path) -> None:
    """Give a finished file its name, durably."""
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
