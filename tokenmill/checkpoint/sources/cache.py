"""The cache of assembled models: its location, the check that a model in it is complete, and the write lock.

models/<alias>/ holds the model, `verified.json` (written last, after the hashes were checked; from then on sizes are
enough), `work/` while a download is under way, and `lock`. Knows nothing about how models arrive. Called by packages.py
and pull.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenmill.checkpoint.sources.aliases import Alias
from tokenmill.checkpoint.sources.base import Resolved, readable_bytes
from tokenmill.errors import UserError

MARKER = "verified.json"


def cache_root() -> Path:
    if override := os.environ.get("TOKENMILL_CACHE"):
        return Path(override).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "tokenmill"


def model_folder(alias: Alias) -> Path:
    return cache_root() / "models" / alias.name


def find_cached(alias: Alias) -> Resolved | None:
    """The model if it is complete: a marker of this table entry, and every file of the size recorded in it."""
    folder = model_folder(alias)
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        if marker["fingerprint"] != alias.fingerprint:
            return None
        if any((folder / name).stat().st_size != size for name, size in marker["files"].items()):
            return None
        return Resolved(folder / alias.file, sum(marker["files"].values()), marker["source"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def write_marker(alias: Alias) -> Resolved:
    """Mark the files in the folder as verified. The caller has checked the hashes."""
    folder = model_folder(alias)
    model = folder / alias.file
    members = sorted(path for path in model.rglob("*") if path.is_file()) if model.is_dir() else [model]
    marker = {
        "fingerprint": alias.fingerprint,
        "source": alias.source,
        "license": alias.license,
        "files": {path.relative_to(folder).as_posix(): path.stat().st_size for path in members},
        "sha256": {piece.file: piece.sha256 for piece in alias.pieces},
    }
    write_json(folder / MARKER, marker)
    return Resolved(model, sum(marker["files"].values()), alias.source)  # type: ignore[attr-defined]


def write_json(path: Path, content: object) -> None:
    """Write atomically: the old or the new content survives a kill or a power failure."""
    draft = path.with_name(path.name + ".new")
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def require_space(alias: Alias, folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed:
        raise UserError(
            f"'{alias.name}' needs {needed} bytes ({readable_bytes(needed)}) in '{folder}', "
            f"where {free} bytes ({readable_bytes(free)}) are free",
            "free some space, or set TOKENMILL_CACHE to a folder on a larger disk",
        )


@contextmanager
def exclusive(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """One writer per model: a second process waits here. The system drops the lock when its holder dies."""
    try:
        import fcntl
    except ImportError:  # no such lock on Windows; two concurrent pulls are not prevented there
        yield
        return
    with open(folder / "lock", "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
