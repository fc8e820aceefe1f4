"""The accounts of a server on disk (--usage-file): written as a whole every few seconds and at the end.

A kill costs what the last seconds added. The file has the owners of keys, by name or by a hash of their key, and
numbers; one server at a time uses it. Blocking, but for `keep`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
import time
from pathlib import Path

import msgspec

from tokenmill.errors import UserError
from tokenmill.log import get_logger
from tokenmill.serve.files.disk import write_whole
from tokenmill.serve.tenants.accounts import Account, Accounts, DeviceTime

_log = get_logger(__name__)
_SECONDS = 5.0  # between two writes
_VERSION = 1


class _Content(msgspec.Struct):
    version: int = _VERSION
    accounts: dict[str, Account] = {}
    device: DeviceTime = msgspec.field(default_factory=DeviceTime)


class UsageFile:
    def __init__(self, path: str) -> None:
        """Open it, or make it with the first write. Raises UserError if it is something else, or in use."""
        self._path = Path(path).expanduser()
        self._lock = -1
        self._writing = threading.Lock()  # a write that was under way when the server was told to stop goes on
        self._closed = False
        try:
            self._lock = os.open(self._path.with_name(self._path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._loaded = _Content()
            if self._path.exists():
                self._loaded = msgspec.json.decode(self._path.read_bytes(), type=_Content)
            if self._loaded.version != _VERSION:
                raise ValueError("another version")
        except (OSError, ValueError, RecursionError) as error:
            if self._lock >= 0:
                os.close(self._lock)
            reason = "it is not one of ours"
            if isinstance(error, OSError):
                reason = "another server does" if isinstance(error, BlockingIOError) else str(error.strerror)
            raise UserError(f"cannot use {self._path}: {reason}", "give another --usage-file") from None

    def load_into(self, accounts: Accounts) -> None:
        accounts.by_owner, accounts.device = self._loaded.accounts, self._loaded.device

    async def keep(self, accounts: Accounts) -> None:
        """Write what has changed, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            if accounts.changed:
                accounts.changed = False
                data = _encoded(accounts)
                try:
                    await asyncio.to_thread(self._write, data)
                except OSError as error:
                    accounts.changed = True
                    _log.error("%s cannot be written: %s", self._path, error.strerror)

    def close(self, accounts: Accounts | None) -> None:
        """Write for the last time."""
        try:
            if accounts is not None and accounts.changed:
                self._write(_encoded(accounts))
        except OSError as error:
            _log.error("%s cannot be written: %s", self._path, error.strerror)
        finally:
            with self._writing:
                self._closed = True
                os.close(self._lock)

    def _write(self, data: bytes) -> None:
        with self._writing:
            if not self._closed:
                write_whole(self._path, [data])


def _encoded(accounts: Accounts) -> bytes:
    return msgspec.json.encode(_Content(_VERSION, accounts.by_owner, accounts.measure(time.monotonic())))
