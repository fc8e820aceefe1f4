"""Memory-maps a file of weights.

The mapping is private: torch wants writable memory, and a stray write must not reach the file. Knows neither formats
nor tensors (mapped_tensor.py does). Used by the readers of GGUF, safetensors and llama2.c files.
"""

from __future__ import annotations

import mmap
from pathlib import Path

from tokenmill.errors import CheckpointError

DAMAGED = "the file is damaged or incomplete: download or convert it again"


def map_file(path: Path, smallest: int) -> mmap.mmap:
    """Map the whole file; it must have at least `smallest` bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < smallest:
                raise CheckpointError(f"{path.name} has only {size} bytes", DAMAGED)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"cannot read {path}: {reason}", "check the path and its permissions") from None


def release_pages(buffer: mmap.mmap, start: int, count: int) -> None:
    """Release the memory behind mapped bytes that were read; they are read from the file again on access.

    Only whole pages inside the range are released. Safe because the mapping is never written.
    """
    page = mmap.PAGESIZE
    first, end = -(-start // page) * page, (start + count) // page * page
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED, first, end - first)
