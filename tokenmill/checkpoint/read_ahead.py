"""Weights on their way from the disk while something else is prepared: the system is asked to read the files ahead.

An engine process imports its libraries for seconds before it opens its checkpoint, and then faults the mapped pages in
as its packing threads come to them. Asked before that, the kernel reads in large pieces, in the file's order. What is
cached already costs nothing, and nothing is copied: only the page cache is filled. Used where engines are started.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from tokenmill.hardware.machine import available_memory
from tokenmill.log import get_logger

_log = get_logger(__name__)
_PIECE = 8 << 20  # bytes: the kernel queues a piece at a time
_SHARE = 0.7  # of the free memory: more would push out what was read first
_SUFFIXES = (".safetensors", ".gguf", ".bin")


def weight_files(path: Path) -> list[Path]:
    """Of a checkpoint, a file or a folder, in the order in which they are read."""
    if path.is_file():
        return [path]
    return sorted(each for each in path.glob("*") if each.suffix in _SUFFIXES and each.is_file())


def read_ahead(path: Path) -> threading.Thread | None:
    """Begin; returns at once. None where nothing is read: the files would not fit, or the system cannot be asked."""
    if not hasattr(os, "posix_fadvise"):  # macOS
        return None
    files = weight_files(path)
    total, free = sum(each.stat().st_size for each in files), available_memory()
    if total > _SHARE * free:
        _log.info("weights are not read ahead: %.1f GiB, with %.1f GiB free", total / 2**30, free / 2**30)
        return None
    reading = threading.Thread(target=_read, args=(files,), name="read-ahead", daemon=True)
    reading.start()
    return reading


def _read(files: list[Path]) -> None:
    for each in files:
        try:
            number = os.open(each, os.O_RDONLY)
        except OSError:
            return  # whoever loads it says what is wrong
        try:
            for begin in range(0, os.fstat(number).st_size, _PIECE):
                os.posix_fadvise(number, begin, _PIECE, os.POSIX_FADV_WILLNEED)
        except OSError:
            return
        finally:
            os.close(number)
