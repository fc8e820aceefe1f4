"""Memory-maps a file of weights and cuts tensors out of it without copying.

The mapping is private: torch wants writable memory, and a stray write must not reach the file. Knows no format. Used by
gguf.py and safetensors.py.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

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
    """Give back the memory behind mapped bytes that were read; they come from the file again if anyone looks.

    Only whole pages inside the range: its neighbours stay. Safe because the mapping is never written.
    """
    page = mmap.PAGESIZE
    first, end = -(-start // page) * page, (start + count) // page * page
    if end > first and hasattr(mmap, "MADV_DONTNEED"):
        buffer.madvise(mmap.MADV_DONTNEED, first, end - first)


def view_tensor(buffer: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """A tensor over mapped bytes; the caller has checked that they exist. Copies only what lies misaligned."""
    import torch  # here: who reads only metadata, such as a tokenizer in the server process, does without

    count = math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    if start % dtype.itemsize:
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=count * dtype.itemsize, offset=start)
        return raw.clone().view(dtype).view(shape)
    return torch.frombuffer(buffer, dtype=dtype, count=count, offset=start).view(shape)
