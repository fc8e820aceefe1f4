"""Gives the memory of an idle model back to the machine, and takes it again: what sleep and wake do in an engine.

Everything stays at its address, so the recorded program, the tokenizer and the compiled grammars stay valid and a wake
costs no more than reading the weights. Packed weights go to an unnamed file beside the model cache, written at the
first sleep; stored weights that kernels read in place are mapped from the checkpoint, which the system reads again; KV
pages are dropped, because the caller has forgotten what they hold. On a CPU only: captured GPU graphs hold addresses
that would be lost. Called by the engine process between requests.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

import numpy as np

from tokenmill.checkpoint.sources import cache_root
from tokenmill.errors import UserError
from tokenmill.kernels import cpu
from tokenmill.kernels.host import HOST, address
from tokenmill.runtime.build import Runtime


class SleepingRuntime:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._file: IO[bytes] | None = None
        self.asleep = False

    @property
    def declines(self) -> str:
        """Why this runtime cannot sleep; empty if it can."""
        if self._runtime.model.device.type != "cpu":
            return "weights in GPU memory are dropped and read again instead"
        if not sys.platform.startswith("linux"):
            return "memory cannot be given back on this system"
        if self._runtime.crew is not None:
            return "other ranks hold parts of it"
        if self._runtime.executor.adapters is not None:
            return "adapters lie beside its weights"
        return ""

    def sleep(self) -> int:
        """Bytes given back. No request may be running, and no page of the KV cache may be read again."""
        if self.declines:
            raise UserError(f"the model cannot sleep: {self.declines}", "unload it")
        before = resident_bytes()
        if cpu.unavailable(HOST) is None:
            cpu.module().park_weights(self._open_file().fileno())
        checkpoint = self._runtime.model.checkpoint
        for name in checkpoint.names():
            checkpoint.release(name)
        store = self._runtime.store
        for tensor in (*store.page_tensors(), *store.states.pieces):
            _give_back(tensor)
        _trim_heap()
        self.asleep = True
        return max(0, before - resident_bytes())

    def wake(self) -> None:
        """Raises where the weights cannot be read back: the process is then of no more use."""
        if self._file is not None:
            cpu.module().unpark_weights(self._file.fileno())
        self.asleep = False

    def _open_file(self) -> IO[bytes]:
        """On the disk of the model cache: temporary folders are often memory."""
        if self._file is None:
            folder = cache_root()
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  # as long as this object
            except OSError as error:
                problem = f"weights cannot be kept in {folder}: {error.strerror}"
                raise UserError(problem, "set TOKENMILL_CACHE to a folder that can be written") from None
        return self._file


def resident_bytes() -> int:
    """Of this process, as the system counts it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _give_back(array: Any) -> None:
    """The whole pages of memory inside an array or tensor; they read as zeros from then on."""
    if isinstance(array, np.ndarray):
        start, size = address(array), array.nbytes
    else:
        storage = array.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


def _trim_heap() -> None:
    trim = getattr(_libc(), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
