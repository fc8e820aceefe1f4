"""A file with a reference model's log-probabilities, so that many candidates are compared without running it again.

Layout: a header (magic, length, JSON) of 4096 bytes, a ROW per scored token, then codes [rows, vocabulary] uint16
(logit_codec.py); memory-mapped. It belongs to one model, one list of windows and one set of kernels: the header has
their hashes, and a file of others is refused. Files are in the cache directory; the least recently used are evicted.
Called by reference.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tokenmill.checkpoint.sources.base import readable_bytes
from tokenmill.checkpoint.sources.cache import cache_root
from tokenmill.errors import UserError
from tokenmill.evaluate.logit_codec import ROW, decode, encode

MAGIC = b"TMLOGIT1"
_HEADER_BYTES = 4096
LIMIT_BYTES = 16 << 30  # of all files in the cache directory
_SPARE_BYTES = 1 << 30  # of the disk, left free


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Identifies what the log-probabilities in a file belong to."""

    model: str  # as the user named it, for messages only
    model_sha256: str
    windows_sha256: str
    numerics: str  # version, kernels, KV type: what else the values depend on
    rows: int
    width: int  # of the vocabulary

    @property
    def nbytes(self) -> int:
        return _HEADER_BYTES + self.rows * (ROW.itemsize + 2 * self.width)


def is_cache(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def cache_folder() -> Path:
    return cache_root() / "references"


def cache_path(key: CacheKey) -> Path:
    return cache_folder() / f"{key.model_sha256[:16]}-{key.windows_sha256[:16]}-{key.numerics}.logits"


class ReferenceCache:
    """An open cache file. Rows are counted over all windows, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.key = _read_header(path)
        if path.stat().st_size != self.key.nbytes:
            raise UserError(f"'{path}' is cut short", "delete it and give the reference model instead")
        self._mapped = _Mapped(path, self.key, mmap.ACCESS_READ)

    def read(self, begin: int, end: int, device: torch.device | str = "cpu") -> tuple[Tensor, np.ndarray, np.ndarray]:
        """(log-probabilities [R, V] float64 on `device`, those of the targets [R], the most likely tokens [R])."""
        rows = self._mapped.rows[begin:end].copy()
        values = decode(rows, self._mapped.codes[begin:end], device), rows["target"], rows["best"]
        self._mapped.let_go()
        return values


class CacheWriter:
    def __init__(self, path: Path, key: CacheKey) -> None:
        body = json.dumps(asdict(key)).encode()
        header = MAGIC + len(body).to_bytes(4, "little") + body
        assert len(header) <= _HEADER_BYTES
        with path.open("wb") as file:
            file.write(header)
            file.truncate(key.nbytes)
            _reserve(file.fileno(), key.nbytes, path)
        self._mapped = _Mapped(path, key, mmap.ACCESS_WRITE)

    def write(self, begin: int, logprobs: Tensor, targets: Tensor) -> None:
        rows, codes = encode(logprobs, targets)
        self._mapped.rows[begin : begin + len(rows)] = rows
        self._mapped.codes[begin : begin + len(rows)] = codes
        self._mapped.let_go()


@contextlib.contextmanager
def new_cache(path: Path, key: CacheKey) -> Iterator[CacheWriter]:
    """A new cache file; it is kept only if the block ends without an exception."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        yield CacheWriter(draft, key)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def make_room(needed: int, limit: int = LIMIT_BYTES) -> bool:
    """Delete the files that were used longest ago until `needed` bytes fit the limit. False: they never will."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(folder.glob("*.logits"), key=lambda file: file.stat().st_mtime)
    held = sum(file.stat().st_size for file in files)
    if needed > limit or needed + _SPARE_BYTES > shutil.disk_usage(folder).free + held:
        return False
    while files and (held + needed > limit or needed + _SPARE_BYTES > shutil.disk_usage(folder).free):
        oldest = files.pop(0)
        held -= oldest.stat().st_size
        oldest.unlink()
    return True


def _reserve(file: int, size: int, path: Path) -> None:
    """Reserve the space now: running out of disk on a mapped page would crash the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            path.unlink(missing_ok=True)
            raise UserError(
                f"the disk of {path} has no room for {readable_bytes(size)} of log-probabilities", "make room there"
            ) from None


class _Mapped:
    def __init__(self, path: Path, key: CacheKey, access: int) -> None:
        with path.open("r+b" if access == mmap.ACCESS_WRITE else "rb") as file:
            self._map = mmap.mmap(file.fileno(), key.nbytes, access=access)
        self.rows = np.frombuffer(self._map, ROW, key.rows, _HEADER_BYTES)
        begin = _HEADER_BYTES + key.rows * ROW.itemsize
        self.codes = np.frombuffer(self._map, "<u2", key.rows * key.width, begin).reshape(key.rows, key.width)

    def let_go(self) -> None:
        """Pages that were touched leave this process, though not the system's cache: rows are used once, in order, and
        jobs with a memory limit count what they hold."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path) -> CacheKey:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
        length = int.from_bytes(header[8:12], "little")
        if header[:8] == MAGIC and 12 + length <= len(header):
            return CacheKey(**json.loads(header[12 : 12 + length]))
    except OSError as error:
        raise UserError(f"cannot read '{path}': {error.strerror}", "give a model or a logit cache") from None
    except (ValueError, TypeError):
        pass
    raise UserError(f"'{path}' is not a logit cache of this version", "give the reference model instead")
