"""A directory as a tier: one file per page, so that any process may die at any moment and others may share it.

A file is written under a temporary name that no other process uses and renamed when complete; nothing is synced to the
device, because every page is verified when it is read and a torn one is computed again. Each process keeps a table of
the files and refreshes it from the directory: what others wrote is found, what they deleted is forgotten. The size is
capped over all models in the directory; files that were not read for longest go first, and reading touches a file, so
that this order holds across processes and restarts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tokenmill.engine.kv.tier.base import PageTier
from tokenmill.engine.kv.tier.entry import HEADER_BYTES, EntryCodec, RejectedEntryError
from tokenmill.engine.kv.tier.secret import own_secret
from tokenmill.errors import UserError
from tokenmill.log import get_logger

_log = get_logger(__name__)
_SUFFIX = ".kv"
_NAME = re.compile(r"[0-9a-f]{32}-([0-9a-f]{2})[0-9a-f]*\.kv")  # namespace, key; the key's first byte is the subfolder
_TEMPORARY = ".part"
_SECRET = "secret"
_ORPHAN_SECONDS = 3600.0  # a temporary file that nobody wrote to for so long has no writer
_SETTLED_NS = 2 * 10**9  # a directory that changed more recently may change again within the clock's resolution


class _File(NamedTuple):
    size: int
    used_ns: int  # modification time: when it was last read or written


class DiskTier(PageTier):
    name = "disk"

    def __init__(
        self,
        folder: Path,
        limit_bytes: int,
        identity: bytes,
        page_bytes: int,
        secret: bytes = b"",
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        """`identity`: of the model, KV dtype and layout whose pages these are. Without `secret` one is kept in the
        folder. `clock`: the time of day, as files have it."""
        super().__init__()
        self._folder = folder
        self._limit = limit_bytes
        self._identity = identity
        self._page_bytes = page_bytes
        self._secret = secret
        self._clock = clock
        self._codec = EntryCodec(secret, identity, page_bytes)
        self._writer = secrets.token_hex(8)  # process ids repeat between containers
        self._num_writes = 0
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _File] = OrderedDict()  # by name, least recently used first
        self._scanned: dict[str, int] = {}  # modification times of subfolders whose content is in the table
        if limit_bytes < page_bytes + HEADER_BYTES:
            raise UserError(
                f"kv_disk_size is {limit_bytes}, less than one page of {page_bytes} bytes", "raise --kv-disk-size"
            )

    # --- the contract ---

    def open(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # pages tell what prompts said
        self._codec = EntryCodec(self._secret or own_secret(self._folder / _SECRET), self._identity, self._page_bytes)
        self.refresh()
        ours = sum(name.startswith(self._codec.namespace.hex()) for name in self._files)
        _log.info(
            "disk tier: %d pages, %.1f MiB in %s (%d of this model)",
            len(self._files),
            self.stats.bytes / 2**20,
            self._folder,
            ours,
        )

    def holds(self, key: bytes) -> bool:
        return self._file_name(key) in self._files

    def has(self, keys: list[bytes]) -> list[bool]:
        return [self._file_name(key) in self._files for key in keys]

    def get(self, key: bytes) -> memoryview | None:
        name = self._file_name(key)
        path = self._path(name)
        try:
            page = self._codec.decode(self._read(path), key)
        except FileNotFoundError:  # another process needed the space
            self._forget(name)
            self.stats.misses += 1
            return None
        except RejectedEntryError as error:
            self._reject(name, path, error.reason)
            return None
        used = self._clock()
        with contextlib.suppress(OSError):  # it only keeps the order for others
            os.utime(path, ns=(used, used), follow_symlinks=False)
        self._remember(name, _File(self._codec.entry_bytes, used))
        self.stats.hits += 1
        self.stats.read_bytes += page.nbytes
        return page

    def put(self, key: bytes, data: memoryview) -> None:
        name = self._file_name(key)
        path = self._path(name)
        size = self._codec.entry_bytes
        if not path.exists():  # else another process wrote it meanwhile
            self._trim(self._limit - size)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._num_writes += 1
            self._write(path, path.with_name(f"{self._writer}-{self._num_writes}{_TEMPORARY}"), key, data)
            self.stats.written_bytes += data.nbytes
        self._remember(name, _File(size, self._clock()))

    def refresh(self) -> None:
        """Bring the table up to date. Only subfolders that have changed are listed, and only new files looked at."""
        began = self._clock()
        found: dict[str, _File] = {}
        listed: set[str] = set()
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    self._delete_if_orphan(entry)
                    continue
                changed = entry.stat(follow_symlinks=False).st_mtime_ns
                if self._scanned.get(entry.name) != changed:
                    self._list(entry, found)
                    listed.add(entry.name)
                    self._scanned[entry.name] = changed if began - changed > _SETTLED_NS else 0
        self._merge(found, listed, began)
        self._trim(self._limit)

    # --- files ---

    def _file_name(self, key: bytes) -> str:
        return f"{self._codec.namespace.hex()}-{key.hex()}{_SUFFIX}"

    def _path(self, name: str) -> Path:
        return self._folder / name[33:35] / name  # by the first byte of the key: 256 folders

    def _read(self, path: Path) -> bytearray:
        """A copy, no map: a mapped file that another process cuts short would end this one."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RejectedEntryError("file") from None
            raise
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RejectedEntryError("file")
            if status.st_size != self._codec.entry_bytes:
                raise RejectedEntryError("length")
            data = bytearray(self._codec.entry_bytes)
            view = memoryview(data)
            while view.nbytes and (count := file.readinto(view)):
                view = view[count:]
        if view.nbytes:
            raise RejectedEntryError("length")
        return data

    def _write(self, path: Path, temporary: Path, key: bytes, data: memoryview) -> None:
        try:
            with temporary.open("xb", buffering=0) as file:
                for part in (self._codec.header(key, data), data):
                    view = memoryview(part).cast("B")
                    while view.nbytes:
                        view = view[file.write(view) :]
            temporary.rename(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _list(self, subfolder: os.DirEntry[str], found: dict[str, _File]) -> None:
        with os.scandir(subfolder.path) as entries:
            for entry in entries:
                match = _NAME.fullmatch(entry.name)
                if match is None or match[1] != subfolder.name:
                    self._delete_if_orphan(entry)
                    continue
                known = self._files.get(entry.name)
                with contextlib.suppress(FileNotFoundError):
                    found[entry.name] = known or _describe(entry)

    def _delete_if_orphan(self, entry: os.DirEntry[str]) -> None:
        """A temporary file whose writer must be dead: one that lives writes a page in far less than an hour."""
        if not entry.name.endswith(_TEMPORARY):
            return
        with contextlib.suppress(OSError):
            if self._clock() - entry.stat(follow_symlinks=False).st_mtime_ns > _ORPHAN_SECONDS * 1e9:
                os.unlink(entry.path)

    # --- the table ---

    def _merge(self, found: dict[str, _File], listed: set[str], began: int) -> None:
        """Take in the content of the listed subfolders. What this process wrote since `began` is not missing there."""
        with self._lock:
            kept = {
                name: file
                for name, file in self._files.items()
                if name[33:35] not in listed or name in found or file.used_ns >= began
            }
            kept |= {name: file for name, file in found.items() if name not in kept}
            self._files = OrderedDict(sorted(kept.items(), key=lambda item: item[1].used_ns))
            self.stats.bytes = sum(file.size for file in self._files.values())
            self.stats.entries = len(self._files)

    def _remember(self, name: str, file: _File) -> None:
        with self._lock:
            before = self._files.get(name)
            self.stats.bytes += file.size - (before.size if before is not None else 0)
            self._files[name] = file
            self._files.move_to_end(name)
            self.stats.entries = len(self._files)

    def _forget(self, name: str) -> None:
        with self._lock:
            file = self._files.pop(name, None)
            self.stats.bytes -= file.size if file is not None else 0
            self.stats.entries = len(self._files)

    def _reject(self, name: str, path: Path, reason: str) -> None:
        """The name is in our own namespace, so the file is ours to delete."""
        self.stats.reject(reason)
        _log.warning("disk tier: %s is rejected (%s) and deleted", path, reason)
        self._forget(name)
        path.unlink(missing_ok=True)

    def _trim(self, target: int) -> None:
        """Delete the files that nobody read for longest, until no more than `target` bytes are left."""
        while True:
            with self._lock:
                if self.stats.bytes <= target or not self._files:
                    return
                name, file = next(iter(self._files.items()))
            path = self._path(name)
            try:
                used = os.stat(path, follow_symlinks=False).st_mtime_ns
                if used > file.used_ns:  # by another process
                    self._remember(name, _File(file.size, used))
                    continue
                path.unlink()
            except FileNotFoundError:
                pass  # another process was faster
            self._forget(name)


def _describe(entry: os.DirEntry[str]) -> _File:
    status = entry.stat(follow_symlinks=False)
    return _File(status.st_size, status.st_mtime_ns)
