"""The secret that entries are signed with: given by the operator in a file, or generated and kept for the next start.

Whoever can read the secret can forge entries; servers that share a directory or a Redis must have the same one. The
disk tier keeps a generated secret inside its directory, Redis in the user's state directory.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from tokenmill.errors import UserError

_MIN_BYTES = 16


def read_secret(path: Path) -> bytes:
    """The secret that the operator gave: the file's content without white space around it."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise UserError(
            f"kv_secret_file '{path}' cannot be read: {error.strerror or error}",
            "give a file that this user can read, or leave --kv-secret-file out",
        ) from None
    if len(secret) < _MIN_BYTES:
        raise UserError(
            f"kv_secret_file '{path}' has {len(secret)} bytes, at least {_MIN_BYTES} are needed",
            "make one with: openssl rand -hex 32",
        )
    return secret


def own_secret(path: Path) -> bytes:
    """The secret in `path`, generated (mode 0600) if there is none. Raises OSError, also for a file that others own or
    can read: they could have written or copied it."""
    for _ in range(2):
        try:
            return _read_private(path)
        except FileNotFoundError:
            _create(path)
    return _read_private(path)


def state_directory() -> Path:
    """Where programs of this user keep what must survive a restart."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base else Path.home() / ".local" / "state") / "tokenmill"


def _read_private(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} is not a private file of this user; give --kv-secret-file")
        secret = os.read(descriptor, 4096).strip()
    finally:
        os.close(descriptor)
    if len(secret) < _MIN_BYTES:
        raise OSError(f"{path} has only {len(secret)} bytes; delete it or give --kv-secret-file")
    return secret


def _create(path: Path) -> None:
    """Complete before it is visible, and never in place of another process's."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f"{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(32).encode())
        os.fsync(descriptor)
        os.link(temporary, path)
    except FileExistsError:
        pass  # another process was first: its secret is ours too
    finally:
        os.close(descriptor)
        temporary.unlink()
