"""Files by owner: kept in one folder, listed from memory, within a share of the folder's bound for each owner.

An owner sees only its own files: another's id is as unknown as one that never was. A file exists once its record (JSON)
does; what a kill left without one is deleted at the next start. One server at a time has the folder. Knows neither HTTP
nor batches; its calls block, so routes make them in threads.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import msgspec

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.errors import ApiError
from tokenmill.serve.files.disk import PART, publish, remove, write_all, write_whole

_log = get_logger(__name__)
_MAX_FILES = 10_000  # of one owner
_RECORD = ".json"


class FileRecord(msgspec.Struct, frozen=True):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None


class FileStore:
    def __init__(self, folder: str, max_bytes: int) -> None:
        self._root = Path(folder).expanduser()
        self._max_bytes = max_bytes
        self._folders: dict[str, Path] = {}
        self._guard = threading.Lock()  # of the index: uploads end in threads
        self._index: dict[str, dict[str, FileRecord]] = {}  # owner's folder -> id -> record, oldest first
        self._used: dict[str, int] = {}  # bytes by owner's folder, unfinished uploads included
        self.held: set[str] = set()  # ids that an unfinished batch reads: neither deleted nor expired
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise UserError(f"another server uses {self._root}", "give each its own --files-dir") from None
        except OSError as error:
            raise UserError(f"cannot use {self._root}: {error.strerror}", "give another --files-dir") from None
        for each in self._root.iterdir():
            if (each / "files").is_dir():
                self._scan(each)

    def close(self) -> None:
        os.close(self._lock)

    def folder(self, owner: str) -> Path:
        """Of everything that the owner has. Its name tells nothing of a key."""
        path = self._folders.get(owner)
        if path is None:
            path = self._root / hashlib.sha256(f"owner:{owner}".encode()).hexdigest()[:32]
            for each in (path, path / "files", path / "batches"):
                each.mkdir(mode=0o700, exist_ok=True)
            self._folders[owner] = path
        return path

    def folders(self) -> list[Path]:
        return [each for each in self._root.iterdir() if each.is_dir()]

    # --- reading ---

    def listed(self, owner: str) -> list[FileRecord]:
        """Newest first."""
        with self._guard:
            found = list(self._index.get(self.folder(owner).name, {}).values())
        return [each for each in reversed(found) if not self._drop_if_expired(owner, each)]

    def find(self, owner: str, file_id: str) -> FileRecord:
        with self._guard:
            found = self._index.get(self.folder(owner).name, {}).get(file_id)
        if found is None or self._drop_if_expired(owner, found):
            shown = file_id[:80].encode("ascii", "replace").decode()
            raise ApiError(404, f"there is no file '{shown}'", param="file_id", code="file_not_found")
        return found

    def path(self, owner: str, file_id: str) -> Path:
        """Of the content. `file_id` must be one that `find` or `put` knows."""
        return self.folder(owner) / "files" / file_id

    # --- writing ---

    def upload(self, owner: str, num_keys: int) -> Upload:
        """Begin a file. Each of `num_keys` owners may fill an equal part of the folder."""
        self.check_number(owner)
        return Upload(self, owner, self.limit(num_keys))

    def check_number(self, owner: str) -> None:
        """Raise ApiError if the owner has as many files as it may: before an upload, and before a batch, which makes
        files too."""
        if len(self.listed(owner)) >= _MAX_FILES:  # which also makes room: expired ones are dropped
            raise ApiError(400, f"this key has {_MAX_FILES} files: delete some", code="files_full")

    def limit(self, num_keys: int) -> int:
        """Bytes that one of so many owners may have."""
        return self._max_bytes // max(1, num_keys)

    def put(self, owner: str, file_id: str, filename: str, purpose: str, chunks: Iterable[bytes]) -> FileRecord:
        """A file of the server's own under a known id, written again if it was there. Not checked against the bound."""
        size = write_whole(self.path(owner, file_id), chunks)
        self.charge(owner, size)
        return self.add(owner, FileRecord(file_id, size, int(time.time()), filename, purpose))

    def add(self, owner: str, record: FileRecord) -> FileRecord:
        """Make a record of content that is there and charged."""
        folder = self.folder(owner)
        write_whole(folder / "files" / f"{record.id}{_RECORD}", [msgspec.json.encode(record)])
        with self._guard:
            files = self._index.setdefault(folder.name, {})
            before = files.pop(record.id, None)
            files[record.id] = record
        if before is not None:
            self.charge(owner, -before.bytes)
        return record

    def delete(self, owner: str, file_id: str) -> None:
        record = self.find(owner, file_id)
        if file_id in self.held:
            raise ApiError(409, f"a batch reads '{file_id}': cancel the batch first", code="file_in_use")
        self._remove(owner, record)

    def charge(self, owner: str, num_bytes: int) -> None:
        with self._guard:
            name = self.folder(owner).name
            self._used[name] = self._used.get(name, 0) + num_bytes

    def used(self, owner: str) -> int:
        with self._guard:
            return self._used.get(self.folder(owner).name, 0)

    def _remove(self, owner: str, record: FileRecord) -> None:
        """The record first: without it the content is nobody's."""
        folder = self.folder(owner)
        remove(folder / "files" / f"{record.id}{_RECORD}")
        remove(folder / "files" / record.id)
        with self._guard:
            known = self._index.get(folder.name, {}).pop(record.id, None)
        if known is not None:
            self.charge(owner, -record.bytes)

    def _drop_if_expired(self, owner: str, record: FileRecord) -> bool:
        if record.expires_at is None or record.expires_at > time.time() or record.id in self.held:
            return False
        self._remove(owner, record)
        return True

    def _scan(self, folder: Path) -> None:
        """Read the records of an owner; delete what a kill left half done."""
        records: list[FileRecord] = []
        for path in (folder / "files").iterdir():
            content = path.with_name(path.name.removesuffix(_RECORD))
            if path.suffix == PART:
                remove(path)
            elif path.suffix == _RECORD:
                try:
                    record = msgspec.json.decode(path.read_bytes(), type=FileRecord)
                    if record.id != content.name or content.stat().st_size != record.bytes:
                        raise ValueError("the record is of another file")
                    records.append(record)
                except (OSError, ValueError) as error:
                    _log.warning("%s is dropped: %s", path, error)
                    remove(path)
        for path in (folder / "files").iterdir():
            if path.suffix != _RECORD and not path.with_name(path.name + _RECORD).exists():
                remove(path)
        records.sort(key=lambda each: each.created_at)
        self._index[folder.name] = {each.id: each for each in records}
        self._used[folder.name] = sum(each.bytes for each in records)


class Upload:
    """A file that is being received. `commit` or `abort` must follow."""

    def __init__(self, store: FileStore, owner: str, limit: int) -> None:
        self.id = f"file-{uuid.uuid4().hex}"
        self._store = store
        self._owner = owner
        self._limit = limit
        self._path = store.path(owner, self.id)
        self._part = self._path.with_name(self.id + PART)
        self._fd = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0

    def write(self, data: bytes) -> None:
        self._store.charge(self._owner, len(data))
        self._size += len(data)
        if self._store.used(self._owner) > self._limit:
            raise ApiError(
                413, f"the files of this key would exceed {self._limit} bytes: delete some", code="files_full"
            )
        write_all(self._fd, data)

    def commit(self, filename: str, purpose: str, seconds: int | None = None) -> FileRecord:
        """`seconds`: after which the file expires."""
        os.fsync(self._fd)
        self._close()
        publish(self._part, self._path)
        now = int(time.time())
        expires = None if seconds is None else now + seconds
        return self._store.add(self._owner, FileRecord(self.id, self._size, now, filename, purpose, expires))

    def abort(self) -> None:
        """Leave nothing behind. Does nothing after `commit`."""
        if self._fd >= 0:
            self._close()
            remove(self._part)
            self._store.charge(self._owner, -self._size)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1
