"""A directory as a tier: one file per page, so that any process may die at any moment and others may share it.

A file is written under a temporary name and renamed when whole; whatever else is found is deleted or passed over, and
every page is verified when it is read. The directory's size is capped over all models in it; files that were not read
for longest go first, and reading touches a file, so that this order survives a restart. Pages are mapped, not copied.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.entry import (
    HEADER_BYTES,
    CorruptEntryError,
    ForeignEntryError,
    decode,
    encode_header,
)
from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
_SUFFIX = ".kv"
_TEMPORARY = ".part"
_PAUSE_SECONDS = 30.0  # without writing, after a write failed


class DiskTier(PageTier):
    name = "disk"

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        identity: bytes,
        page_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`identity`: of the model, KV dtype and layout whose pages these are."""
        super().__init__()
        self._folder = folder
        self._limit = limit_bytes
        self._identity = identity
        self._clock = clock
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file name, least recently read first
        self._paused_until = 0.0
        self._num_writes = 0
        if limit_bytes < page_bytes + HEADER_BYTES:
            raise UserError(
                f"kv_disk_size is {limit_bytes}, less than one page of {page_bytes} bytes", "raise --kv-disk-size"
            )
        self._open()

    def holds(self, key: bytes) -> bool:
        return self._file_name(key) in self._sizes

    def has(self, keys: list[bytes]) -> list[bool]:
        # What another process wrote is not in our table, but it is there.
        names = [self._file_name(key) for key in keys]
        return [name in self._sizes or self._path(name).exists() for name in names]

    def get(self, key: bytes) -> memoryview | None:
        name = self._file_name(key)
        path = self._path(name)
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == 0:
                    raise CorruptEntryError
                data = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)  # writable, but not to the file
            page = decode(memoryview(data), self._identity, key)
        except FileNotFoundError:
            self._forget(name)
            self.stats.misses += 1
            return None
        except (CorruptEntryError, ForeignEntryError) as error:
            self._reject(name, path, isinstance(error, CorruptEntryError))
            return None
        except OSError as error:
            self.stats.failures += 1
            _log.warning("disk tier: cannot read %s: %s", path, error)
            return None
        self._remember(name, size)
        with contextlib.suppress(OSError):  # only the order after a restart
            os.utime(path)
        self.stats.hits += 1
        self.stats.read_bytes += page.nbytes
        return page

    def put(self, key: bytes, data: memoryview) -> None:
        if self._clock() < self._paused_until:
            return
        name = self._file_name(key)
        path = self._path(name)
        size = HEADER_BYTES + data.nbytes
        self._num_writes += 1
        temporary = path.with_name(f"{os.getpid()}-{self._num_writes}{_TEMPORARY}")
        try:
            self._trim(self._limit - size)
            path.parent.mkdir(exist_ok=True)
            with temporary.open("wb", buffering=0) as file:
                _write_all(file.fileno(), encode_header(self._identity, key, data))
                _write_all(file.fileno(), data)
            temporary.rename(path)
        except OSError as error:
            self._pause(error)
            temporary.unlink(missing_ok=True)
            return
        if self._paused_until:
            _log.warning("disk tier: %s takes pages again", self._folder)
            self._paused_until = 0.0
        self._remember(name, size)
        self.stats.written_bytes += data.nbytes

    # --- how ---

    def _file_name(self, key: bytes) -> str:
        return f"{self._identity.hex()}-{key.hex()}{_SUFFIX}"

    def _path(self, name: str) -> Path:
        return self._folder / name[33:35] / name  # by the first byte of the key: 256 folders

    def _open(self) -> None:
        probe = self._folder / f"{os.getpid()}-0{_TEMPORARY}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # pages tell what prompts said
            probe.write_bytes(b"tokenmill")
            probe.unlink()
            found = sorted(self._scan())
        except OSError as error:
            raise UserError(
                f"kv_disk '{self._folder}' cannot be used: {error.strerror or error}",
                "give a directory that can be written and has space, or leave --kv-disk out",
            ) from None
        for _, name, size in found:
            self._sizes[name] = size
        self.stats.bytes = sum(self._sizes.values())
        self.stats.foreign = sum(not name.startswith(self._identity.hex()) for name in self._sizes)
        self._trim(self._limit)
        _log.info(
            "disk tier: %d pages, %.1f MiB in %s (%d of other models)",
            len(self._sizes),
            self.stats.bytes / 2**20,
            self._folder,
            self.stats.foreign,
        )

    def _scan(self) -> Iterator[tuple[int, str, int]]:
        """(time of last use, name, size) of all whole files; what dead writers left behind is deleted."""
        for entry in os.scandir(self._folder):
            if not entry.is_dir(follow_symlinks=False):
                _delete_if_orphan(entry)
                continue
            for file in os.scandir(entry.path):
                if file.name.endswith(_SUFFIX) and file.is_file(follow_symlinks=False):
                    stat = file.stat(follow_symlinks=False)
                    yield stat.st_mtime_ns, file.name, stat.st_size
                else:
                    _delete_if_orphan(file)

    def _remember(self, name: str, size: int) -> None:
        with self._lock:
            self.stats.bytes += size - self._sizes.get(name, 0)
            self._sizes[name] = size
            self._sizes.move_to_end(name)
            self.stats.entries = len(self._sizes)

    def _forget(self, name: str) -> None:
        with self._lock:
            self.stats.bytes -= self._sizes.pop(name, 0)
            self.stats.entries = len(self._sizes)

    def _reject(self, name: str, path: Path, corrupt: bool) -> None:
        self.stats.corrupt += corrupt
        self.stats.foreign += not corrupt
        _log.warning("disk tier: %s is %s and is deleted", path, "corrupt" if corrupt else "another model's")
        self._forget(name)
        _unlink(path)

    def _trim(self, target: int) -> None:
        while True:
            with self._lock:
                if self.stats.bytes <= target or not self._sizes:
                    self.stats.entries = len(self._sizes)
                    return
                name, size = self._sizes.popitem(last=False)
                self.stats.bytes -= size
            _unlink(self._path(name))

    def _pause(self, error: OSError) -> None:
        self.stats.failures += 1
        if not self._paused_until:
            _log.warning(
                "disk tier: cannot write to %s (%s); pages stay in memory only, next try in %.0f s",
                self._folder,
                error.strerror or error,
                _PAUSE_SECONDS,
            )
        self._paused_until = self._clock() + _PAUSE_SECONDS


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("disk tier: cannot delete %s: %s", path, error)


def _delete_if_orphan(entry: os.DirEntry[str]) -> None:
    """A temporary file whose writer lives no more, on this machine."""
    pid = entry.name.split("-", 1)[0]
    if not entry.name.endswith(_TEMPORARY) or not pid.isdecimal():
        return
    try:
        if int(pid) != os.getpid():  # our own number can only be a predecessor's: nothing is written yet
            os.kill(int(pid), 0)
            return
    except ProcessLookupError:
        pass
    except (OSError, OverflowError):
        return  # alive, but another user's
    _unlink(Path(entry.path))
